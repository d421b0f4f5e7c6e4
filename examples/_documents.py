"""Read the training documents: the standard library's source files, or a folder of the user's."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROSE_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".html"}
CODE_SUFFIXES = {".py", ".pyi", ".c", ".h", ".cpp", ".cu", ".cuh", ".java", ".js", ".ts", ".rs"}
TEXT_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
JSONL_SUFFIX = ".jsonl"
PARQUET_SUFFIX = ".parquet"
USER_SUFFIXES = TEXT_SUFFIXES | {JSONL_SUFFIX, PARQUET_SUFFIX}
# Installed packages lie inside the standard library's folder and differ between machines.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


class UserError(Exception):
    """A mistake in the user's options or data; the message names it in one sentence."""


@dataclass
class Documents:
    """Texts in training order, and counts of what was skipped.

    Attributes:
        source: where they come from, for messages.
        texts: the documents, none of them blank.
        places: where each text was found: a file, or a line or row of one.
        empty: number of blank documents skipped.
        undecodable: number of files skipped because they are not UTF-8.
    """

    source: str
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    empty: int = 0
    undecodable: int = 0


def read_documents(path: Path | None, max_characters: int, seed: int) -> Documents:
    """Read documents in an order that depends only on `seed` and the file names.

    Args:
        path: a text, JSONL or Parquet file or a folder of them; None takes Python's standard
            library.
        max_characters: reading stops once the texts together reach this length.
        seed: seed of the shuffle of the files.

    Returns:
        At least one document.

    Raises:
        UserError: `path` does not exist, cannot be read, holds no text, or a JSONL line or a
            Parquet file is broken.
    """
    documents = Documents(source="Python's standard library" if path is None else str(path))
    files = _standard_library() if path is None else _user_files(path)
    random.Random(seed).shuffle(files)
    characters = 0
    for place, text in _texts(files, documents):
        if not text.strip():
            documents.empty += 1
            continue
        documents.places.append(place)
        documents.texts.append(text)
        characters += len(text)
        if characters >= max_characters:
            break
    if not documents.texts:
        raise UserError(
            f"no text in {documents.source}: {len(files)} files read, {documents.empty} empty "
            f"documents, {documents.undecodable} files that are not UTF-8"
        )
    return documents


def _standard_library() -> list[Path]:
    return _files_below(Path(sysconfig.get_path("stdlib")), {".py"})


def _user_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"--data {path}: no such file or folder")
    files = _files_below(path, USER_SUFFIXES)
    if not files:
        known = " ".join(sorted(USER_SUFFIXES))
        raise UserError(f"no text in {path}: none of its files ends in {known}")
    return files


def _files_below(root: Path, suffixes: set[str]) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")
        )
        files += [
            Path(folder, name) for name in sorted(names) if Path(name).suffix.lower() in suffixes
        ]
    return files


def _texts(files: list[Path], documents: Documents) -> Iterator[tuple[str, str]]:
    """Yield place and text of every document; count undecodable files in `documents`."""
    for file in files:
        try:
            if file.suffix.lower() == JSONL_SUFFIX:
                yield from _jsonl_texts(file)
            elif file.suffix.lower() == PARQUET_SUFFIX:
                yield from _parquet_texts(file)
            else:
                yield str(file), file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            documents.undecodable += 1
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error


def _jsonl_texts(file: Path) -> Iterator[tuple[str, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            if line.strip():
                yield place, _jsonl_text(line, place)


def _jsonl_text(line: bytes, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise UserError(f'{place}: must be an object with a string "text"')
    return value["text"]


def _parquet_texts(file: Path) -> Iterator[tuple[str, str]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{file}: Parquet files need datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("text"), str):
                raise UserError(f'{file}, row {number}: must have a string in column "text"')
            yield f"{file}, row {number}", row["text"]
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:  # pyarrow's errors too
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file}: not a valid Parquet file ({reason})") from error
