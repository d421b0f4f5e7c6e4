"""The identity cache: values that cuseq has computed from a tensor and keeps with it.

Each entry belongs to a tensor: offsets to their lengths, a layout to the position ids that describe
it, a table of cosines to its frequencies. The cache drops an entry when the tensor is freed, when
the tensor or the value is edited in place, at the end of the `forward_scope` that made the entry,
and to make room. `CUSEQ_CACHE_MAX_ENTRIES` (default 64) drops the least recently used entries
first; `CUSEQ_CACHE_MAX_BYTES` (default no limit) drops masks first and offsets last.
`CUSEQ_CACHE=0` turns the cache off. docs/cache.md lists the kinds of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from cuseq import _C

__all__ = ["clear", "forward_scope", "info", "invalidate", "stats"]

T = TypeVar("T")


@contextmanager
def forward_scope() -> Iterator[None]:
    """Drop the entries that this thread adds inside the scope when the scope ends. Scopes nest.

    Tables of `rope_table` stay, because they do not belong to one forward.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> with cuseq.cache.forward_scope():
        ...     offsets = cuseq.ops.cached_cu_seqlens(lengths)
    """
    exit_scope = _C.exit_scope  # a scope may end at interpreter shutdown, when `_C` is already None
    scope = _C.enter_scope()
    try:
        yield
    finally:
        exit_scope(scope)


def stats() -> dict[str, int]:
    """Return counts of calls since the process started, and the current size of the cache.

    Returns:
        `hits`, `misses`, `bypasses` (calls that must not use the cache: under tracing, dispatch
        modes or CUDA graph capture), `evictions` (entries dropped to make room), and `bytes` and
        `entries` (held now).

    Examples:
        >>> sorted(cuseq.cache.stats())
        ['bypasses', 'bytes', 'entries', 'evictions', 'hits', 'misses']
    """
    return _C.cache_stats()


def info() -> dict[str, dict[str, int]]:
    """Return the number of entries and bytes for each kind of entry.

    Returns:
        For each kind, `{"entries": ..., "bytes": ...}`. Kinds that Python code makes are listed
        after their first use. `pending_host_copy` counts copies of device lengths to the host
        that have started and have not been waited for, `cudnn_plan` the plans that attention has
        made (`cuseq.attention_warmup`); `clear` drops neither.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> offsets = cuseq.ops.cached_cu_seqlens(lengths)
        >>> cuseq.cache.info()["cu_seqlens"]["entries"] > 0
        True
    """
    return _C.cache_info()


def clear() -> None:
    """Drop every entry of every kind.

    Examples:
        >>> cuseq.cache.clear()
        >>> cuseq.cache.stats()["entries"]
        0
    """
    _C.clear_cache()


def invalidate(tensor: Tensor) -> None:
    """Drop every entry that depends on the memory of a tensor, and all references to the tensor.

    These are the entries made from the tensor or from any view of its memory (lengths, offsets,
    position ids, frequencies, spans), and the entries whose value is in that memory.

    A program must call this after a write that PyTorch's version counter does not see (through
    NumPy, DLPack or `.data`, by a raw kernel or another process), and before
    `torch.utils.swap_tensors` on the tensor. Never synchronises.

    Args:
        tensor: any tensor, on any device.

    Raises:
        TypeError: `tensor` is not a tensor.

    Examples:
        >>> lengths = torch.tensor([2, 3])
        >>> cuseq.ops.cached_cu_seqlens(lengths).tolist()
        [0, 2, 5]
        >>> lengths.numpy()[0] = 4  # the version counter does not move
        >>> cuseq.cache.invalidate(lengths)
        >>> cuseq.ops.cached_cu_seqlens(lengths).tolist()
        [0, 4, 7]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
    _C.invalidate(tensor)


def remember(
    key: Tensor,
    fact: str,
    make: Callable[[], T],
    *parameters: Hashable,
    device: torch.device | str | int | None = None,
    tensors: Callable[[T], Iterable[Tensor]] | None = None,
    outlives_scopes: bool = False,
) -> T:
    """Return the cached value for this key, fact and parameters; call `make()` if there is none.

    For cuseq's own modules. A key matches if it is the same tensor object with the same version,
    storage, offset, sizes, strides and dtype. Nothing is cached in compiled code, under tracing and
    dispatch modes, in inference mode, during CUDA graph capture, for inference and fake tensors,
    and with `CUSEQ_CACHE=0`. `make` runs without a lock, so two threads may both run it.

    Args:
        key: tensor that the value was computed from, or `new_key()` for an object without one.
        fact: name of the kind of entry, as `info` shows it and docs/cache.md lists it.
        make: makes the value. The value must not refer to the key, or neither is ever freed.
        parameters: further arguments of the value. All facts together should use at most a few
            thousand different ones: configuration (a dtype, a window) and sizes, but no data.
        device: device of the value, default the key's device; also a parameter. A hit on another
            stream of this device waits for the stream that made the value.
        tensors: returns the tensors in a value; default the value itself, or the items of a tuple.
            Their bytes are counted, and an edit in place of one of them drops the entry.
        outlives_scopes: whether the value stays after the end of a `forward_scope`.

    Raises:
        TypeError: `key` is not a tensor, or a parameter is not hashable.
    """
    if torch.compiler.is_compiling():
        return make()
    return _C.remember(key, (fact, parameters), make, device, tensors, outlives_scopes)


def keeps(key: Tensor, device: torch.device | str | int | None = None) -> bool:
    """Return whether `remember` would cache a value now. For cuseq's own modules."""
    return not torch.compiler.is_compiling() and _C.keeps(key, device)


def new_key() -> Tensor:
    """Return a new key for an object that has no tensor. For cuseq's own modules.

    The object must hold the key; its cache entries are dropped when the key is freed.
    """
    return _C.new_key()
