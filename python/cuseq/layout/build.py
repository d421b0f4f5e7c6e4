"""Functions that make the records of a layout from lengths, offsets, masks and positions."""

from __future__ import annotations

import copyreg
import ctypes
from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import (
    as_int,
    as_int64s,
    as_size,
    ceil_div,
    check_flag,
    check_untransformed,
    plain_tensor,
    round_up,
    shown,
)
from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import to_host
from cuseq.layout.records import NUM_SEQS, Records, Row, Tree

_ops = torch.ops.cuseq

_MOST_DEPTH = 2**16  # of a tree
_MOST_MULTIPLE = 2**20  # of segments, as in csrc/ops/cu_seqlens.cpp: sums of segments are int64
_OUTSIDE = "make the layout outside and pass it in"

Multiple = int | Sequence[int]


def common_multiple(multiple: Multiple, name: str) -> int:
    """Return the least common multiple of one int or of several, each at least 1."""
    multiples = multiple if isinstance(multiple, Sequence) else (multiple,)
    return as_int(lcm(*(as_int(one, name, least=1) for one in multiples)), name)


def as_numbers(values: Sequence[int] | Tensor, name: str) -> Tensor:
    """Return a one-dimensional tensor: ints as int64 on the host, a tensor unchanged."""
    if isinstance(values, Tensor):
        values = plain_tensor(values, name)
        check_untransformed(values, name, _OUTSIDE)
    else:
        try:
            with outside_inference_mode():
                values = as_int64s(tuple(values))  # a tuple, since array() reads bytes as memory
        except TypeError as error:
            raise TypeError(
                f"{name} must be ints or an integer tensor, got {shown(values)}"
            ) from error
        except (OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(f"{name} must fit in int64, got {shown(values)}") from error
    if values.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(values.shape)}")
    return values


def of_sequences(
    source: Tensor,
    total_tokens: int | None,
    max_seqs: int | None,
    *,
    from_cu_seqlens: bool,
    num_seqs: Tensor | None = None,
) -> Row:
    """Return the row for lengths or offsets, without padding between sequences.

    The row is on the device of `source`. If `total_tokens` is None, it is on the host: the sum of
    the lengths is needed at once, and once the values are on the host nothing has to wait again.

    Args:
        source: int32 or int64, lengths `[n_seqs]` or offsets `[n_seqs + 1]`.
        total_tokens, max_seqs: as for `PackedLayout.from_lengths`.
        from_cu_seqlens: whether `source` holds offsets.
        num_seqs: int32 `[1]`, the number of sequences if `source` has room for more.
    """
    total_tokens = as_size(total_tokens, "total_tokens")
    max_seqs = as_size(max_seqs, "max_seqs")
    if type(total_tokens) is int and total_tokens >= 2**31:
        raise ValueError(f"total_tokens must be at most 2^31 - 1, got {total_tokens}")
    if total_tokens is None:
        with outside_inference_mode():
            source = source if source.device.type == "cpu" else to_host(source)
            total_tokens = _C.tokens_of(source, from_cu_seqlens)
    n_seqs = source.shape[0] - 1 if from_cu_seqlens else source.shape[0]
    if max_seqs is None:
        # Sequences found from positions are never empty, so there are at most total_tokens of them.
        max_seqs = total_tokens if num_seqs is not None else max(total_tokens, n_seqs)
    if type(max_seqs) is int and max_seqs >= 2**31:
        raise ValueError(f"max_seqs must be at most 2^31 - 1, got {max_seqs}")
    with outside_inference_mode():
        made = _ops.layout_metadata(source, total_tokens, max_seqs, from_cu_seqlens, num_seqs)
        return _checked(_started(made, total_tokens, n_seqs if num_seqs is None else None))


def of_segments(
    lengths: Tensor,
    total_tokens: int | None,
    segment_multiple: Multiple,
    total_multiple: Multiple,
    max_seqs: int | None,
) -> Row:
    """Return the row for lengths whose segments are padded to multiples."""
    segment_multiple = common_multiple(segment_multiple, "segment_multiple")
    if segment_multiple > _MOST_MULTIPLE:
        raise ValueError(f"segment_multiple must lie in [1, 2^20], got {segment_multiple}")
    total_multiple = common_multiple(total_multiple, "total_multiple")
    total_multiple = as_int(lcm(segment_multiple, total_multiple), "total_multiple")
    total_tokens = as_size(total_tokens, "total_tokens")
    if total_tokens is None:
        with outside_inference_mode():
            lengths = lengths if lengths.device.type == "cpu" else to_host(lengths)
            _C.tokens_of(lengths, False)  # raises if a length is invalid, before they are summed
            parts = int(ceil_div(lengths.long(), segment_multiple).sum())
        total_tokens = round_up(parts * segment_multiple, total_multiple)
        if total_tokens >= 2**31:
            raise ValueError(
                f"total_tokens must be at most 2^31 - 1, but segment_multiple = {segment_multiple} "
                f"and total_multiple = {total_multiple} give {total_tokens}"
            )
    elif total_tokens % total_multiple != 0:
        raise ValueError(
            f"total_tokens must be a multiple of {total_multiple}, the least common multiple of "
            f"segment_multiple and total_multiple, got {total_tokens}"
        )
    max_seqs = as_size(max_seqs, "max_seqs")
    if max_seqs is None:
        max_seqs = max(total_tokens, lengths.shape[0])
    if segment_multiple == 1:
        return of_sequences(lengths, total_tokens, max_seqs, from_cu_seqlens=False)
    n_seqs = lengths.shape[0]
    with outside_inference_mode():
        made = _ops.segment_metadata(lengths, total_tokens, max_seqs, segment_multiple)
        segments = _checked(_started(made[3:], total_tokens, n_seqs))
        return _started(made[:3], total_tokens, n_seqs)._replace(segments=segments)


def of_mask(
    real: Tensor,
    kind: str,
    total_tokens: int | None,
    segment_multiple: Multiple,
    total_multiple: Multiple,
    max_seqs: int | None,
) -> Row:
    """Return the row for the mask `[batch, seqlen]` and the kind from `real_tokens`."""
    with outside_inference_mode():
        lengths = _ops.lengths_from_padding_mask(real, kind)
    return of_segments(lengths, total_tokens, segment_multiple, total_multiple, max_seqs)


def of_positions(position_ids: Tensor, plane: int | None, max_seqs: int | None) -> Row:
    """Return the row for positions that restart with each sequence."""
    position_ids = plain_tensor(position_ids, "position_ids")
    check_untransformed(position_ids, "position_ids", _OUTSIDE)
    max_seqs, plane = as_size(max_seqs, "max_seqs"), as_size(plane, "plane")
    if max_seqs == 0 and position_ids.numel() > 0:
        raise ValueError("max_seqs must be at least 1, since every token has a sequence, got 0")
    if type(max_seqs) is int and max_seqs > 2**31 - 3:  # the offsets are one more
        raise ValueError(f"max_seqs must be at most 2^31 - 3, got {max_seqs}")
    with outside_inference_mode():
        offsets, num_seqs = _ops.cu_seqlens_from_position_ids(position_ids, max_seqs, plane)
    tokens = position_ids[0] if position_ids.dim() == 3 else position_ids
    return of_sequences(offsets, tokens.numel(), max_seqs, from_cu_seqlens=True, num_seqs=num_seqs)


def of_lengths_and_segments(
    lengths: Tensor, segment_lengths: Tensor | None, total_tokens: int, max_seqs: int
) -> Row:
    """Return the row for sequences in segments of the given lengths.

    `segment_lengths=None` means that segments are as long as their sequences.
    """
    row = of_sequences(lengths, total_tokens, max_seqs, from_cu_seqlens=False)
    if segment_lengths is None:
        return row
    segments = of_sequences(segment_lengths, total_tokens, max_seqs, from_cu_seqlens=False)
    return row._replace(segments=segments)


def of_tree(tree: _C.Tree, total_tokens: int, max_seqs: int | None, max_depth: int) -> Records:
    """Return the records, on the host, of a row that holds the nodes of a tree.

    Raises:
        ValueError: the tree does not fit into `total_tokens`, `max_seqs` or `max_depth`.
    """
    if total_tokens < tree.num_tokens:
        raise ValueError(
            f"total_tokens must be at least the {tree.num_tokens} tokens of the tree, got "
            f"{total_tokens}"
        )
    if max_depth > _MOST_DEPTH:
        raise ValueError(f"max_depth must be at most {_MOST_DEPTH}, got {max_depth}")
    if tree.depth > max_depth:
        raise ValueError(
            f"max_depth must be at least the depth of the tree, {tree.depth}, got {max_depth}"
        )
    with outside_inference_mode():
        row = of_sequences(tree.lengths(), total_tokens, max_seqs, from_cu_seqlens=False)
        rows, meta = tree.calls(row.max_seqs, max_depth, total_tokens)
        return Records(row, tree=Tree(tree.positions(total_tokens), rows, meta, tree))


def tree_of_parts(
    lengths: Sequence[int], parents: Sequence[int], samples: Sequence[int], context: Sequence[int]
) -> _C.Tree:
    return _C.tree_of_parts(lengths, parents, samples, context)


# Not __setstate__: a pickle without the call of it would give a tree in memory that nobody wrote.
copyreg.pickle(_C.Tree, lambda tree: (tree_of_parts, tree.parts()))


def of_bytes(
    lengths: bytes, segment_lengths: bytes | None, total_tokens: int, max_seqs: int
) -> Row:
    """Return the row of what `as_bytes` made of lengths, after the checks of `from_lengths`.

    Raises:
        ValueError, TypeError: an argument is not what a layout has.
    """
    total_tokens = as_int(total_tokens, "total_tokens", least=0)
    max_seqs = as_int(max_seqs, "max_seqs", least=0)
    own = from_bytes(lengths, torch.int32, "lengths")
    padded = None
    if segment_lengths is not None:
        padded = from_bytes(segment_lengths, torch.int32, "segment_lengths")
        if padded.shape != own.shape or bool((padded < own).any()):
            raise ValueError(
                f"segment_lengths must be at least the lengths of the {own.shape[0]} sequences, "
                f"{own.tolist()[:8]} ..., got {padded.shape[0]}: {padded.tolist()[:8]} ..."
            )
    return of_lengths_and_segments(own, padded, total_tokens, max_seqs)


def as_bytes(tensor: Tensor) -> bytes:
    """Return the memory of a tensor: a worker sends each tensor by a shared-memory file."""
    on_host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.nbytes)


def from_bytes(numbers: bytes, dtype: torch.dtype, name: str) -> Tensor:
    """Return a vector on the CPU of the memory that `as_bytes` gave."""
    if not isinstance(numbers, bytes) or len(numbers) % dtype.itemsize != 0:
        raise TypeError(f"{name} must be the bytes of {dtype} numbers, got {shown(numbers)}")
    if not numbers:  # frombuffer refuses it
        return torch.empty(0, dtype=dtype, device="cpu")
    with outside_inference_mode():
        return torch.frombuffer(bytearray(numbers), dtype=dtype)


def mask_from_bytes(batch: tuple[bytes, int], lengths: Tensor) -> Tensor:
    """Return the mask `[batch, seqlen]` of a padded batch whose rows have these lengths."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise TypeError(f"batch must be (mask, seqlen), got {shown(batch)}")
    numbers, seqlen = batch
    seqlen = as_int(seqlen, "seqlen", least=0)
    mask = from_bytes(numbers, torch.uint8, "mask")
    if mask.shape[0] != lengths.shape[0] * seqlen or bool((mask > 1).any()):
        raise ValueError(
            f"mask must have a 0 or a 1 for each of {lengths.shape[0]} rows of seqlen = {seqlen} "
            f"tokens, got {mask.shape[0]} bytes up to {int(mask.max()) if len(mask) else 0}"
        )
    mask = mask.view(lengths.shape[0], seqlen)
    if not torch.equal(mask.sum(1, dtype=torch.int32), lengths):
        raise ValueError(
            f"mask must have as many real tokens in each row as lengths says, "
            f"{lengths.tolist()[:8]} ..., got {mask.sum(1).tolist()[:8]} ..."
        )
    return mask


def of_chunks(
    lengths: Tensor,
    segment_lengths: Tensor | None,
    total_tokens: int,
    chunk_size: int,
    max_seqs: int,
) -> Row:
    """Return the row whose sequences are the chunks of sequences with lengths on the host.

    It has room for the chunks of any other row of this size with at most `max_seqs` sequences.
    """
    offsets, padded = (
        None if one is None else torch.nn.functional.pad(one.cumsum(0), (1, 0))
        for one in (lengths, segment_lengths)
    )
    assert offsets is not None
    room = max_seqs + total_tokens // chunk_size
    found, of_segments = offsets_of_chunks(offsets, padded, chunk_size, room)
    whole = found if of_segments is None else of_segments
    count = int((whole.diff() > 0).sum())
    parts = (None if one is None else one.diff()[:count] for one in (found, of_segments))
    chunks, segments = parts
    assert chunks is not None
    return of_lengths_and_segments(chunks, segments, total_tokens, room)


def offsets_of_chunks(
    offsets: Tensor, padded: Tensor | None, chunk_size: int, capacity: int
) -> tuple[Tensor, Tensor | None]:
    """Return the offsets of chunks of sequences, by arithmetic that compiled code can do too.

    The padding after a sequence belongs to its last chunk. A sequence without tokens and padding
    has no chunk.

    Args:
        offsets: int32 `[n + 1]`, logical offsets; the last may be repeated.
        padded: int32 `[n + 1]`, physical offsets, None if they are the same.
        chunk_size: tokens.
        capacity: number of chunks that there is room for; offsets after the last chunk repeat it.

    Returns:
        Logical and physical offsets of the chunks, int32 `[capacity + 1]`; None for `padded=None`.
    """
    if offsets.shape[0] == 1:  # no sequences
        none = offsets.expand(capacity + 1).contiguous()
        return none, None if padded is None else none.clone()
    lengths = offsets.diff()
    counts = ceil_div(lengths, chunk_size)
    if padded is not None:
        counts = torch.maximum(counts, (padded.diff() > 0).to(counts.dtype))
    ends = counts.cumsum(0)
    chunk = torch.arange(capacity + 1, device=offsets.device)
    sequence = torch.searchsorted(ends, chunk, right=True).clamp(max=counts.shape[0] - 1)
    before = (chunk - (ends - counts)[sequence]) * chunk_size
    is_chunk = chunk < ends[-1]

    def of_chunks(of_sequences: Tensor) -> Tensor:
        starts = torch.where(is_chunk, of_sequences[:-1][sequence] + before, of_sequences[-1])
        return starts.to(torch.int32)

    return of_chunks(offsets), None if padded is None else of_chunks(padded)


def _started(made: Sequence[Tensor], total_tokens: int, num_sequences: int | None) -> Row:
    """Start the copy of a kernel's outputs to the host; return their row."""
    lengths, offsets, meta = made
    host_meta, host_lengths = _C.start_host_copy([meta, lengths])
    row = Row(offsets, lengths, host_meta, total_tokens, num_sequences)
    if lengths.device.type == "cpu":
        return row
    return row._replace(host_lengths=host_lengths, from_device=True)


def _checked(row: Row) -> Row:
    """Raise ValueError if lengths on the host are invalid; return the row.

    Lengths on a GPU are checked when a host value is first read.
    """
    if row.lengths.device.type == "cpu":
        _C.read_host_meta(row.host_meta, NUM_SEQS)
    return row


def _check_one_document_a_row(mask: Tensor) -> None:
    """Raise ValueError for a mask that numbers the documents of a row: 1, 1, 2, 2, 2, 0."""
    if mask.is_meta:
        return
    mask = mask.long()  # torch gathers no unsigned numbers of more than 8 bits
    real = mask != 0
    first = mask.gather(-1, real.int().argmax(-1, keepdim=True)) if mask.numel() else mask
    differs = real & (mask != first)
    if not bool(differs.any()):
        return
    row = int(differs.any(-1).nonzero()[0])
    found = mask[row][real[row]].unique_consecutive()[:4].tolist()
    raise ValueError(
        "mask must have one value at all real tokens of a row, since each row is one sequence, got "
        f"{found} in row {row}: for a mask that numbers the documents of a row, pass their lengths "
        "to PackedLayout.from_lengths, or the mask to a model that cuseq.enable was called with"
    )


def real_tokens(mask: Tensor, true_is_pad: bool, waits: bool) -> tuple[Tensor, str]:
    """Return the mask `[batch, seqlen]` and its kind: which of its elements mark a real token.

    `waits` is whether the values of a mask on a GPU may be read.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"mask must be a tensor, got {type(mask).__name__}: without a mask call "
            "PackedLayout.from_lengths"
        )
    mask = plain_tensor(mask, "mask")
    check_untransformed(mask, "mask", _OUTSIDE)
    check_flag(true_is_pad, "true_is_pad")
    kind = "zero" if true_is_pad else "nonzero"
    if mask.dim() != 4:
        has_values = mask.dim() == 2 and not mask.is_floating_point() and not mask.is_complex()
        is_read = (waits or mask.device.type == "cpu") and not true_is_pad
        if has_values and is_read and mask.dtype != torch.bool:
            _check_one_document_a_row(mask)
        return mask, kind
    if mask.shape[-1] != mask.shape[-2] or mask.shape[1] < 1:
        raise ValueError(
            f"mask must be [batch, 1 or heads, seqlen, seqlen], got {tuple(mask.shape)}"
        )
    mask = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    on_host = mask.device.type == "cpu"
    if mask.is_floating_point():
        if true_is_pad:
            raise ValueError("true_is_pad must be False for an additive mask, got True")
        if on_host and not bool((mask <= 0).all()):
            raise ValueError(
                "an additive mask must have no positive element and no NaN on its diagonal, "
                f"got {mask[~(mask <= 0)][0].item()}: if it holds ones and zeros, pass mask.bool()"
            )
        return mask, "additive"
    is_signed = mask.dtype.is_signed and not mask.is_complex()
    if on_host and is_signed and bool((mask < 0).any()):
        raise ValueError(
            f"a 4-D integer mask must have no negative element, got {mask.min().item()}: an "
            "additive mask must be floating point"
        )
    return mask, kind
