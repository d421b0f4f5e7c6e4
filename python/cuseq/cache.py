"""The identity cache: every fact that cuseq remembers about a tensor.

An entry belongs to a tensor: offsets to their lengths, a layout to the position ids that describe
it, a table of cosines to its frequencies. The entry goes when that tensor goes, when the tensor or
the value is edited in place, at the end of the `forward_scope` that made it, and when there is no
room left (`CUSEQ_CACHE_MAX_ENTRIES`, default 64, the least recently used first, and
`CUSEQ_CACHE_MAX_BYTES`, default no bound, masks first and offsets last). `CUSEQ_CACHE=0` switches
the cache off. docs/cache.md lists what is kept.
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
    """Drop, at its end, what this thread put into the cache since it opened. Scopes nest.

    Tables of `rope_table` stay, since they describe no forward.

    Example:
        >>> lengths = torch.tensor([2, 3])
        >>> with cuseq.cache.forward_scope():
        ...     offsets = cuseq.ops.cached_cu_seqlens(lengths)
    """
    exit_scope = _C.exit_scope  # a scope left open may end when the interpreter's modules are gone
    scope = _C.enter_scope()
    try:
        yield
    finally:
        exit_scope(scope)


def stats() -> dict[str, int]:
    """Count the calls since the process started, and what is held now.

    Returns:
        `hits`, `misses`, `bypasses` (calls that may not use the cache: traced, watched, captured),
        `evictions` (entries dropped for room), `bytes` and `entries` (held now).

    Example:
        >>> sorted(cuseq.cache.stats())
        ['bypasses', 'bytes', 'entries', 'evictions', 'hits', 'misses']
    """
    return _C.cache_stats()


def info() -> dict[str, dict[str, int]]:
    """List every kind of fact that the process may hold, with what is held of it now.

    Returns:
        For each kind of fact `{"entries": ..., "bytes": ...}`. A kind that Python makes is listed
        from its first use on. `pending_host_copy` counts copies of device lengths to the host
        that are under way and have not been waited for; `clear` leaves those alone.

    Example:
        >>> lengths = torch.tensor([2, 3])
        >>> offsets = cuseq.ops.cached_cu_seqlens(lengths)
        >>> cuseq.cache.info()["cu_seqlens"]["entries"] > 0
        True
    """
    return _C.cache_info()


def clear() -> None:
    """Drop every entry of every kind.

    Example:
        >>> cuseq.cache.clear()
        >>> cuseq.cache.stats()["entries"]
        0
    """
    _C.clear_cache()


def invalidate(tensor: Tensor) -> None:
    """Drop every entry that the memory of a tensor has a part in, and all references to the tensor.

    The entries are those that were made from the tensor, or from any view of its memory (lengths,
    offsets, position ids, frequencies, spans), and those whose value lies in that memory.

    A program has to call it after a write that PyTorch's version counter cannot see (through NumPy,
    DLPack or `.data`, by a raw kernel or another process), and before `torch.utils.swap_tensors` on
    the tensor. Never synchronises.

    Args:
        tensor: any tensor, on any device.

    Raises:
        TypeError: `tensor` is no tensor.

    Example:
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
    """Return `make()`, or what it returned before for the same key, fact and parameters.

    For cuseq's own modules. The key is the same while it is the same tensor, of the same version,
    storage, offset, sizes, strides and dtype. Nothing is kept in compiled code, under tracing and
    dispatch modes, in inference mode, while a CUDA graph is captured, of inference and fake
    tensors, and with `CUSEQ_CACHE=0`. `make` runs without any lock: two threads may both run it.

    Args:
        key: tensor that the fact is about, or `new_key()` of an object without one.
        fact: name of the kind of fact, as `info` shows it and docs/cache.md lists it.
        make: makes the value. The value must not refer to the key: neither would ever go.
        parameters: what else decides the value. All facts together should have few thousand
            different ones: use configuration (a dtype, a window), and sizes, but no data.
        device: where the value lies, default the key's device. A hit on another stream of it waits
            for the stream that made the value. It is a parameter too.
        tensors: lists the tensors in a value; default the value itself, or the items of a tuple.
            They count as bytes, and an edit in place of one of them ends the entry.
        outlives_scopes: whether the end of a `forward_scope` leaves the value.

    Raises:
        TypeError: `key` is no tensor, or a parameter is not hashable.
    """
    if torch.compiler.is_compiling():
        return make()
    return _C.remember(key, (fact, parameters), make, device, tensors, outlives_scopes)


def keeps(key: Tensor, device: torch.device | str | int | None = None) -> bool:
    """Tell whether `remember` would keep a value now. For cuseq's own modules."""
    return not torch.compiler.is_compiling() and _C.keeps(key, device)


def new_key() -> Tensor:
    """Make a small key for facts about an object that has no tensor. For cuseq's own modules.

    The object holds the key, and its facts go with it.
    """
    return _C.new_key()
