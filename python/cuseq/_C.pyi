"""Types of the compiled module. `csrc/python` defines it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

class HostMeta:
    """Positions of the numbers in a layout's `host_meta`."""

    NUM_SEQS: int
    MAX_SEQLEN: int
    TOTAL_TOKENS: int
    NUM_REAL_TOKENS: int
    STATUS: int
    LENGTH_DIVISOR: int
    SIZE: int

def build_info() -> dict[str, Any]: ...

# The identity cache.
def cache_info() -> dict[str, dict[str, int]]: ...
def cache_stats() -> dict[str, int]: ...
def clear_cache() -> None: ...
def enter_scope() -> int: ...
def exit_scope(scope: int, /) -> None: ...
def invalidate(tensor: Tensor, /) -> None: ...
def keeps(key: Tensor, device: torch.device | str | int | None, /) -> bool: ...
def new_key() -> Tensor: ...
def remember(
    key: Tensor,
    fact: tuple[Hashable, ...],
    make: Callable[[], Any],
    device: torch.device | str | int | None,
    tensors: Callable[[Any], Sequence[Tensor]] | None,
    outlives_scopes: bool,
    /,
) -> Any: ...
def cached_cu_seqlens(lengths: Tensor, /) -> Tensor: ...
def cached_position_ids(lengths: Tensor, total_tokens: int, /) -> Tensor: ...
def cached_seq_ids(lengths: Tensor, total_tokens: int, /) -> Tensor: ...
def cached_dense_mask(
    cu_seqlens: Tensor,
    total_tokens: int,
    causal: bool,
    window: int | None,
    spans: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    row_length: int | None,
    dtype: torch.dtype,
    finite: bool,
    /,
) -> Tensor: ...
def cached_block_mask(
    cu_seqlens: Tensor,
    total_tokens: int,
    causal: bool,
    window: int | None,
    spans: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    row_length: int | None,
    query_block: int,
    key_block: int,
    build: Callable[..., Any],
    /,
) -> Any: ...

# Numbers and copies of a layout.
def read_host_meta(host_meta: Tensor, slot: int, /) -> int: ...
def tokens_of(source: Tensor, from_cu_seqlens: bool, /) -> int: ...
def check_spans_and_rows(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    total_tokens: int,
    spans: Tensor | None,
    row_length: int | None,
    /,
) -> None: ...
def start_host_copy(on_device: Sequence[Tensor], /) -> list[Tensor]: ...
def wait_host_copy(on_host: Tensor, /) -> None: ...
def copy_to_device(
    first: Tensor, second: Tensor, device: torch.device, /
) -> tuple[Tensor, Tensor]: ...
def remember_on_host(on_device: Tensor, on_host: Tensor, /) -> None: ...

# Rotations.
def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    host_meta: Tensor | None,
    position_ids: Tensor | None,
    offset: int | SymInt,
    table: str,
    qkv_format: str,
    interleaved: bool,
    rotary_dim: int | None,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
    cp_size: int,
    cp_rank: int,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]: ...
def apply_qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    host_meta: Tensor | None,
    position_ids: Tensor | None,
    offset: int | SymInt,
    table: str,
    qkv_format: str,
    interleaved: bool,
    rotary_dim: int | None,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
    cp_size: int,
    cp_rank: int,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]: ...

# Planning on the host.
def bin_pack(
    lengths: Tensor, capacity: int, strategy: str, overlong: str, /
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def permutation(n: int, seed: int, begin: int, end: int, /) -> Tensor: ...
def pack_window(
    lengths: Tensor,
    carried: Tensor,
    seed: int | None,
    begin: int,
    end: int,
    capacity: int,
    strategy: str,
    /,
) -> tuple[Tensor, Tensor]: ...
def row_costs(
    lengths: Tensor,
    samples: Tensor,
    begins: Tensor,
    ends: Tensor,
    quadratic: float,
    linear: float,
    constant: float,
    /,
) -> Tensor: ...
