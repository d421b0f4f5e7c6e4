"""Types of the compiled module. `csrc/python` defines it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
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
    OF_REPLAYS: int  # a value of STATUS

class RankMeta:
    """Positions of the numbers in the `rank_meta` of a rank's part of a row."""

    CP_SIZE: int
    RANK: int
    ULYSSES: int
    WINDOW: int
    ANY_FAR: int
    SAVES_FAR_ROWS: int
    NUM_PIECES: int
    NUM_CUT: int
    NUM_TOKENS: int
    NUM_CUT_TOKENS: int
    LONGEST_WHOLE: int
    LONGEST_CUT: int
    LONGEST_KEYS: int
    NUM_KEY_ROWS: int
    NUM_FAR_ROWS: int
    NUM_SENT_ROWS: int
    ROW_TOKENS: int
    HASH_LOW: int
    HASH_HIGH: int
    PIECE_CAPACITY: int
    KEY_CAPACITY: int
    SEND_CAPACITY: int
    SOURCE_CAPACITY: int
    SIZE: int
    TOKENS_PER_KEPT_ROW: int

class CpPlan:
    """Which tokens each rank of context parallelism holds."""

    def __init__(
        self,
        lengths: Tensor,
        segments: Tensor | None,
        total_tokens: int,
        cp_size: int,
        policy: str,
        heads: int,
        key_heads: int,
        window: int | None,
        max_far_rows: int | None,
        /,
    ) -> None: ...
    def deal(self) -> tuple[Tensor, Tensor]: ...
    def is_for(self, lengths: Tensor, segments: Tensor | None, total_tokens: int, /) -> bool: ...
    def pieces(self, rank: int, /) -> Tensor: ...
    def share(
        self, rank: int, max_seqs: int, room: Sequence[int] | None, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def most_room(self, max_seqs: int, /) -> list[int]: ...
    @property
    def num_whole(self) -> int: ...
    @property
    def num_cut(self) -> int: ...
    @property
    def hash(self) -> int: ...
    @property
    def pairs(self) -> int: ...
    @property
    def max_pairs(self) -> int: ...
    @property
    def far_rows(self) -> int: ...
    @property
    def time(self) -> int: ...

# A captured step updates these parameters; a group is the list of an optimizer's parameters.

class CapturedParameters:
    def __init__(self, groups: list[list[Tensor]], /) -> None: ...
    def are(self, groups: list[list[Tensor]], /) -> bool: ...
    def set_gradients(self, groups: list[list[Tensor]], /) -> None: ...

# Trees (csrc/trees).

class TreeMeta:
    """What each entry of a tree's meta holds."""

    DEPTH: int
    LONGEST_PATH: int
    MEAN_KEYS: int
    MEAN_DEPTH: int
    NUM_NODES: int
    NODE_CAPACITY: int
    OFFSETS_CAPACITY: int
    MAX_DEPTH: int

class Tree:
    """Which tokens of a row follow which."""

    def lengths(self) -> Tensor: ...
    def sample_lengths(self) -> Tensor: ...
    def positions(self, total_tokens: int, /) -> Tensor: ...
    def calls(
        self, max_seqs: int, max_depth: int, total_tokens: int, /
    ) -> tuple[Tensor, Tensor]: ...
    def rows_of(self, sample: int, /) -> Tensor: ...
    def uses(self, total_tokens: int, /) -> tuple[Tensor, Tensor, Tensor]: ...
    def targets(self, input_ids: Tensor, /) -> tuple[Tensor, Tensor, Tensor]: ...
    def parts(self) -> tuple[list[int], list[int], list[int], list[int]]: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def longest_path(self) -> int: ...

def tree_of_parts(
    lengths: Sequence[int],
    parents: Sequence[int],
    samples: Sequence[int],
    context: Sequence[int],
    /,
) -> Tree: ...
def tree_of_nodes(lengths: Tensor, parents: Tensor, /) -> Tree: ...
def tree_of_groups(
    prompts: Any, completions: Any, total_tokens: int | None, /
) -> tuple[Tree, Tensor]: ...
def tree_of_sequences(
    sequences: Any, keys: Any, min_shared: int, total_tokens: int | None, /
) -> tuple[Tree, Tensor]: ...

# The choice of an attention backend. Facts are (sm, half, head_dim, mask, window, mode, tokens,
# sequences).
_Facts = tuple[int, bool, int, str, int, str, int, int]

def set_measured_attention(rows: Sequence[tuple[_Facts, dict[str, float]]], /) -> None: ...
def closest_measured_attention(
    facts: _Facts, /, backend: str = "", or_causal: bool = False
) -> dict[str, float] | None: ...
def set_missing_attention(name: str, why: str, /) -> None: ...
def set_registered_attention(name: str, on_cuda: bool, takes_two_rows: bool, /) -> None: ...
def failed_attention(name: str, /) -> str: ...
def attention_backend_names() -> list[str]: ...
def missing_attention(name: str, /) -> str: ...
def missing_cudnn_attention(sm: int, /) -> str: ...
def cudnn_plan_sizes(sequences: int, longest: int, tokens: int, /) -> tuple[int, int, int]: ...
def cudnn_plans() -> int: ...
def pairs_of_rank(rank_rows: Tensor, rank_meta: Tensor, q: Tensor, /) -> int: ...

# q, k and v, and the other arguments of the op varlen_attention.
def attention_choice(q: Tensor, k: Tensor, v: Tensor, /, *options: Any) -> tuple[str, str]: ...
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
    tensors: Callable[[Any], Iterable[Tensor]] | None,
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
def refill_token_metadata(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    position_ids: Tensor,
    seq_ids: Tensor,
    is_pad: Tensor,
    /,
) -> None: ...
def recurrent_offsets(
    lengths: Tensor, segment_lengths: Tensor | None, total_tokens: int, /
) -> Tensor: ...
def chunks_of(offsets: Tensor, chunk_size: int, /) -> tuple[Tensor, Tensor]: ...
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

# The convolution.
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    silu: bool,
    final_states: bool,
    /,
) -> list[Tensor]: ...

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
def mrope_positions(
    types: Tensor,
    lengths: Tensor,
    segments: Tensor,
    image_grids: Tensor,
    video_grids: Tensor,
    intervals: Tensor,
    spatial_merge: int,
    temporal_merge: int,
    frames_apart: bool,
    /,
) -> Tensor: ...
def vision_rows(
    grids: Tensor, merge: int, window: int, frames_apart: bool, /
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def block_spans(
    blocks: Tensor, lengths: Tensor, segments: Tensor, /
) -> list[tuple[int, int]] | None: ...
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
