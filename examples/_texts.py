"""The texts of the examples: files of yours, or Python's own sources."""

from __future__ import annotations

import errno
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import pyarrow.parquet
from _ranks import say

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
TEXTS = {".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".cu", ".java", ".js"}
TEXT_TYPES = ("string", "large_string")
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}

datasets.disable_progress_bars()


def read_texts(path: str | None) -> datasets.Dataset:
    """Return a dataset with the column `text`, without blank ones."""
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        raise SystemExit(f"--data {path}: no such file or folder")
    kinds = {".py"} if path is None else {*BUILDERS, *TEXTS}
    files = [root] if root.is_file() else sorted(
        file for file in root.rglob("*")
        if file.suffix.lower() in kinds and not SKIPPED & {*file.relative_to(root).parts}
    )  # fmt: skip
    if not files:
        raise SystemExit(f"--data {path}: no file there ends in {' '.join(sorted(kinds))}")
    parts, plain = [], []
    for file in files:
        builder = BUILDERS.get(file.suffix.lower())
        if builder is None:
            try:
                plain.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                plain.append("")
            except OSError as error:
                raise SystemExit(f"{file}: cannot be read ({error.strerror})") from error
            continue
        if file.is_file() and has_no_rows(file):
            continue
        rows = read_rows(str(file))
        if "text" not in rows.column_names or rows.features["text"].dtype not in TEXT_TYPES:
            raise SystemExit(f'{file}: must have a column "text" of strings, has {rows.features}')
        parts.append(rows.select_columns("text").cast_column("text", datasets.Value("string")))
    if plain:
        parts.append(datasets.Dataset.from_dict({"text": plain}))
    texts = datasets.concatenate_datasets(parts or [datasets.Dataset.from_dict({"text": [""]})])
    found = texts.filter(lambda one: bool(one["text"] and one["text"].strip()))
    if len(found) == 0:
        raise SystemExit(f"--data {path}: no text in {len(files)} files (in UTF-8)")
    if skipped := len(texts) - len(found):
        say(f"Skipped, without text or not in UTF-8: {skipped:,}.")
    return found


def has_no_rows(file: Path) -> bool:
    """Return whether a file is empty, or a table without rows, which `datasets` does not read."""
    with suppress(pyarrow.ArrowInvalid):
        return file.stat().st_size == 0 or pyarrow.parquet.read_metadata(file).num_rows == 0
    return False


def read_rows(name: str, option: str = "", *kinds: tuple[str, ...]) -> datasets.Dataset:
    """Return a data set of the Hub, or of a JSONL or Parquet file, with the columns of a kind."""
    builder = BUILDERS.get(Path(name).suffix.lower())
    if Path(name).is_file() and has_no_rows(Path(name)):
        raise SystemExit(f"{option} {name}: has no rows".lstrip())
    try:
        with naming_full_disk():
            given = {} if builder is None else {"data_files": name}
            rows = datasets.load_dataset(builder or name, split="train", **given)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise SystemExit(f"{option} {name}: cannot be read ({reason})".lstrip()) from error
    if kinds and not any({*kind} <= {*rows.column_names} for kind in kinds):
        named = ", or ".join(" and ".join(kind) for kind in kinds)
        many = "s" if len(kinds[0]) > 1 else ""
        raise SystemExit(f"{option} {name}: must have the column{many} {named}, has "
                         f"{', '.join(rows.column_names)}")  # fmt: skip
    return rows


@contextmanager
def naming_full_disk() -> Iterator[None]:
    """Exit if the disk of the tables of `datasets` is full."""
    try:
        yield
    except (OSError, datasets.exceptions.DatasetsError) as error:
        causes = (error, error.__cause__, error.__context__)
        if not any(getattr(one, "errno", None) == errno.ENOSPC for one in causes):
            raise
        folder = datasets.config.HF_DATASETS_CACHE
        raise SystemExit(
            f"{folder}: no space left for tokens: HF_DATASETS_CACHE names another folder"
        ) from error
