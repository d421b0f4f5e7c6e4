"""Inputs of the benchmarks: document lengths, documents of random tokens, and the peers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Fields of Qwen3's configuration, by the size of the published model.
QWEN3 = {
    "0.6b": dict(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "14b": dict(
        vocab_size=151_936, hidden_size=5120, intermediate_size=17_408, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


def lognormal_lengths(total_tokens: int, mean: float, seed: int, sigma: float = 0.8) -> list[int]:
    """Return document lengths that add up to `total_tokens` exactly.

    Args:
        total_tokens: tokens of the packed row.
        mean: mean of the lognormal distribution, in tokens.
        seed: seed of the draw; the same seed gives the same lengths.
        sigma: standard deviation of the logarithm.

    Returns:
        Lengths of at least 2 tokens each, so that every document has a target; the last is cut to
        fit.
    """
    draw = random.Random(seed)
    mu = math.log(mean) - sigma * sigma / 2
    lengths: list[int] = []
    left = total_tokens
    while left > 0:
        length = min(left, max(2, round(draw.lognormvariate(mu, sigma))))
        if left - length == 1:
            length += 1
        lengths.append(length)
        left -= length
    return lengths


def documents(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Return one list of random token ids in `[0, vocab_size)` for each length."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


@functools.lru_cache
def peers_folder() -> Path | None:
    """Return the folder of the packages that cuseq is measured against; None if there is none.

    The environment's `PEERS`, default `.peers` in the repository, is that folder, or contains the
    packages as `site.tar.gz`, which is unpacked once to the folder for temporary files.
    """
    given = Path(os.environ.get("PEERS", ROOT / ".peers"))
    archive = given / "site.tar.gz"
    if not archive.exists():
        return given if given.is_dir() else None
    state = archive.stat()
    folder = Path(tempfile.gettempdir()) / f"cuseq-peers-{state.st_size}-{state.st_mtime_ns}"
    if not folder.exists():
        # Unpacked under another name first, so that an existing folder is always complete.
        part = Path(tempfile.mkdtemp(prefix="cuseq-peers-"))
        subprocess.run(["tar", "-xf", str(archive), "-C", str(part)], check=True)
        part.rename(folder)
    return folder


def import_peer(package: str) -> bool:
    """Import a peer, from the peers' folder if it is not installed; return False if it is missing.

    Only this package is imported from the folder, whose other packages could replace installed
    ones.
    """
    folder = peers_folder()
    if importlib.util.find_spec(package) is None and folder is not None:
        sys.path.append(str(folder))
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            return False
        finally:
            sys.path.remove(str(folder))
    return importlib.util.find_spec(package) is not None


def has_flash_attention_4() -> bool:
    """Return whether flash-attn-4 is installed. It shares its folder with flash-attn."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return importlib.util.find_spec("flash_attn.cute") is not None
