"""Controls of the identity cache.

What is cached belongs to a tensor of lengths: it goes when that tensor goes, when it is edited in
place, at the end of the `forward_scope` that made it, and when there is no room left
(`CUSEQ_CACHE_MAX_ENTRIES`, default 64, the least recently used first, and `CUSEQ_CACHE_MAX_BYTES`,
default no bound, masks first and offsets last).
`CUSEQ_CACHE=0` switches the cache off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from cuseq import _C
from cuseq._rope_table import clear_tables, tables_held


@contextmanager
def forward_scope() -> Iterator[None]:
    """Drops, at its end, what this thread put into the cache since it opened. Scopes nest.

    Example:
        >>> with cuseq.cache.forward_scope():
        ...     loss = model(input_ids, packed=packed).loss
    """
    exit_scope = _C.exit_scope  # a scope left open may end when the interpreter's modules are gone
    scope = _C.enter_scope()
    try:
        yield
    finally:
        exit_scope(scope)


def stats() -> dict[str, int]:
    """Counts since the process started, and what is held now.

    Returns:
        `hits`, `misses`, `bypasses` (calls that may not use the cache: traced, watched, captured),
        `evictions` (entries dropped for room), `bytes` and `entries` (held now, the tables of
        `rope_table` among them).
    """
    counts = _C.cache_stats()
    tables, table_bytes = tables_held()
    counts["entries"] += tables
    counts["bytes"] += table_bytes
    return counts


def clear() -> None:
    """Drops every entry, and every table of `rope_table`."""
    _C.clear_cache()
    clear_tables()


def invalidate(lengths: Tensor) -> None:
    """Drops what was computed from a tensor (lengths, offsets, spans), and all references to it.

    Needed after a write that PyTorch's version counter cannot see (`lengths.data.copy_(...)`, a raw
    kernel, another process), and before `torch.utils.swap_tensors` on it. Never synchronises.
    """
    _C.invalidate(lengths)
