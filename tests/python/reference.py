"""Reference implementations of the ops as slow loops over Python ints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


def cu_seqlens(lengths: list[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def max_seqlen(lengths: list[int]) -> int:
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    return longest


def last_token_indices(lengths: list[int]) -> list[int]:
    indices = []
    begin = 0
    for length in lengths:
        indices.append(begin + length - 1 if length > 0 else -1)
        begin += length
    return indices


def position_ids(lengths: list[int], total_tokens: int) -> list[int]:
    positions = []
    for length in [*lengths, total_tokens - sum(lengths)]:  # the tail is one more segment
        positions.extend(range(length))
    return positions


def seq_ids(lengths: list[int], total_tokens: int) -> list[int]:
    ids = []
    for sequence, length in enumerate([*lengths, total_tokens - sum(lengths)]):
        ids.extend([sequence] * length)
    return ids


def cu_seqlens_static(lengths: list[int], max_seqs: int) -> list[int]:
    offsets = cu_seqlens(lengths)
    return offsets + [offsets[-1]] * (max_seqs + 1 - len(offsets))


def lengths_from_padding_mask(mask: list[list[int]]) -> list[int]:
    lengths = []
    for row in mask:
        length = 0
        for token_is_real in row:
            if token_is_real:
                length += 1
        lengths.append(length)
    return lengths


def lengths_from_position_ids(rows: list[list[int]], is_plane: bool = False) -> list[int]:
    """Return the lengths of the sequences that position ids describe.

    A sequence starts at each row's first token and wherever a position does not follow the previous
    one. In a plane of multimodal positions, which repeat inside an image and jump after it, only a
    drop or a second zero is a start.
    """
    lengths = []
    for row in rows:
        for column, position in enumerate(row):
            if column == 0:
                starts = True
            elif is_plane:
                starts = position < row[column - 1] or position == row[column - 1] == 0
            else:
                starts = position != row[column - 1] + 1
            if starts:
                lengths.append(0)
            lengths[-1] += 1
    return lengths


def cu_seqlens_from_position_ids(
    rows: list[list[int]], max_seqs: int, is_plane: bool = False
) -> tuple[list[int], int]:
    lengths = lengths_from_position_ids(rows, is_plane)
    # Offsets beyond max_seqs are left out, but the last offset is always the end of the row.
    offsets = cu_seqlens(lengths)[:max_seqs]
    total = sum(len(row) for row in rows)
    return offsets + [total] * (max_seqs + 1 - len(offsets)), len(lengths)


def mask_boundary_labels(
    labels: list[int], lengths: list[int], shift: int = 0, ignore_index: int = -100
) -> list[int]:
    segments = seq_ids(lengths, len(labels))
    masked = []
    for token, label in enumerate(labels):
        # The token that this label holds, and the token that has to predict it.
        target = token + shift
        source = token if shift > 0 else token - 1
        in_one_sequence = (
            source >= 0
            and target < len(labels)
            and segments[source] == segments[target]
            and segments[target] < len(lengths)
        )
        masked.append(label if in_one_sequence else ignore_index)
    return masked


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[tuple[int, int]],
    silu: bool = False,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each span (begin, end) of the row `[tokens, channels]`; other tokens give zero.

    Returns the output and the final states of the spans, `[n_spans, channels, width - 1]`.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    rows = [x.new_zeros(channels)] * tokens
    finals = []
    for number, (begin, end) in enumerate(spans):
        before = x.new_zeros(width - 1, channels) if states is None else states[number].t()
        inputs = torch.cat([before, x[begin:end]])
        for token in range(begin, end):
            window = inputs[token - begin : token - begin + width]
            row = (window * weight.t()).sum(0)
            row = row if bias is None else row + bias
            rows[token] = torch.nn.functional.silu(row) if silu else row
        finals.append(inputs[end - begin :].t())
    out = torch.stack(rows) if rows else x.new_zeros(0, channels)
    empty = x.new_zeros(0, channels, width - 1)
    return out, torch.stack(finals) if finals else empty


def recurrent_offsets(
    lengths: list[int], segment_lengths: list[int] | None, total_tokens: int
) -> list[int]:
    """Return the ends of all sequences, of the padding after each and of the row, from 0 on."""
    ends = {0, total_tokens}
    begin = 0
    for length, whole in zip(lengths, segment_lengths or lengths, strict=True):
        ends |= {begin + length, begin + whole}
        begin += whole
    return sorted(ends)


def chunk_indices(offsets: list[int], chunk_size: int) -> list[list[int]]:
    chunks = []
    for run, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        for number, _ in enumerate(range(begin, end, chunk_size)):
            chunks.append([run, number])
    return chunks


def chunk_offsets(offsets: list[int], chunk_size: int) -> list[int]:
    found = [0]
    for begin, end in zip(offsets, offsets[1:], strict=False):
        found.append(found[-1] + len(range(begin, end, chunk_size)))
    return found


def gather_rows(
    tensor: Tensor, index: Sequence[int], rows: Sequence[int], leading: int, fill: complex
) -> Tensor:
    """Return rows where row r is slot `index[r]`, or `fill` if there is no such slot."""
    slots = [slot for line in tensor for slot in line] if leading == 2 else list(tensor)
    trailing = tensor.shape[leading:]
    out = torch.full((len(index), *trailing), fill, dtype=tensor.dtype, device=tensor.device)
    for row, slot in enumerate(index):
        if 0 <= slot < len(slots):
            out[row] = slots[slot]
    return out.view(*rows, *trailing)


def collate(
    examples: list[dict[str, list[int]]], total_tokens: int, fills: dict[str, int]
) -> dict[str, Any]:
    """Return one packed row: for each key, its values one after the other, then its fill."""
    examples = [{"labels": example["input_ids"], **example} for example in examples]
    lengths = [len(example["input_ids"]) for example in examples]
    row: dict[str, list[int]] = {}
    for key in examples[0]:
        values = [value for example in examples for value in example[key]]
        row[key] = values + [fills.get(key, 0)] * (total_tokens - len(values))
    row["labels"] = mask_boundary_labels(row["labels"], lengths)
    row["position_ids"] = position_ids(lengths, total_tokens)
    return row


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax attention of each sequence with itself; zeros on the tail."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    rows, begin = [], 0
    for length in lengths:
        own = slice(begin, begin + length)
        keys, values = (t[own].repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (distance.abs() >= window)
        weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, values))
        begin += length
    rows.append(q.new_zeros(q.shape[0] - begin, q.shape[1], v.shape[2]))
    return torch.cat(rows)


def mask(
    lengths: Sequence[int],
    total_tokens: int,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Sequence[tuple[int, int]] = (),
    starts: Sequence[int] | None = None,
) -> Tensor:
    """Return which keys (columns) each token (row) sees, bool `[total_tokens, total_tokens]`.

    `starts` gives where the sequences begin, if they are not adjacent.
    """
    seen = [bytearray(total_tokens) for _ in range(total_tokens)]
    for token in range(total_tokens):  # tail and padding see only themselves
        seen[token][token] = True
    begins = cu_seqlens(list(lengths)) if starts is None else starts
    for begin, length in zip(begins, lengths, strict=False):
        for query in range(begin, begin + length):
            for key in range(begin, begin + length):
                comes_later = causal and key > query
                too_far = window is not None and abs(query - key) >= window
                if not comes_later and not too_far:
                    seen[query][key] = True
    for start, end in spans:
        for query in range(start, end):
            for key in range(start, end):
                seen[query][key] = True
    if total_tokens == 0:
        return torch.zeros(0, 0, dtype=torch.bool)
    return torch.frombuffer(bytearray().join(seen), dtype=torch.bool).view(total_tokens, -1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float | None = None
) -> Tensor:
    """Compute softmax attention per token over the keys it sees; `[tokens, heads, dim]`."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    rows = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for token, own in enumerate(seen):
        visible = own.nonzero().squeeze(1)
        scores = torch.einsum("hd,khd->hk", q[token], keys[visible]) * scale
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[visible]).unsqueeze(0))
    return torch.cat(rows)


# Rotary embedding.


def rope_positions(
    lengths: list[int], total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> list[int]:
    """Return the positions of the tokens that a rank holds.

    Each segment has `2 * cp_size` chunks. A rank holds two of them: chunk `rank` from the front and
    chunk `rank` from the back.
    """
    if cp_size == 1:
        return position_ids(lengths, total_tokens)
    positions = []
    for length in [*lengths, total_tokens - sum(lengths)]:  # the tail is one more segment
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions.extend(range(index * chunk, (index + 1) * chunk))
    return positions


def mrope_plane(pair: int, section: Sequence[int], interleaved: bool) -> int:
    """Return whether a pair rotates by the token's time (0), height (1) or width (2)."""
    if interleaved:
        plane = pair % 3
        return plane if pair < 3 * section[plane] else 0
    if pair < section[0]:
        return 0
    return 1 if pair < section[0] + section[1] else 2


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Sequence[int] | Sequence[Sequence[int]],
    *,
    interleaved: bool = False,
    section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> Tensor:
    """Rotate the pairs of `x`, `[tokens, heads, head_dim]`, in float64.

    The tables are `[rows, pairs]`, one row per position; dimensions after the pairs are unchanged.
    There is one position per token, or three lists of positions if a section is given.
    """
    pairs = cos.shape[1]
    cosines, sines = cos.double().tolist(), sin.double().tolist()
    out = x.double().tolist()
    for token, heads in enumerate(out):
        for head in heads:
            for pair in range(pairs):
                if section is None:
                    position = positions[token]
                else:
                    plane = mrope_plane(pair, section, mrope_interleaved)
                    position = positions[plane][token]
                c, s = cosines[position][pair], sines[position][pair]
                first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
                a, b = head[first], head[second]
                head[first], head[second] = a * c - b * s, b * c + a * s
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


# Strategies of the tests: packings, and the tensors that hold them.

DTYPES = (torch.int32, torch.int64)


def packings(max_sequences: int = 12) -> st.SearchStrategy[tuple[list[int], int]]:
    """Draw lengths and the total: mixed, empty, one-token, one giant, equal; a tail or none."""
    count = st.integers(0, max_sequences)
    lengths = st.one_of(
        st.lists(st.integers(0, 20), max_size=max_sequences),
        st.builds(lambda n, length: [length] * n, count, st.sampled_from([0, 1, 7])),
        st.builds(lambda giant: [giant], st.integers(500, 3000)),
        st.builds(lambda n, giant: [0] * n + [giant] + [1] * n, count, st.integers(500, 3000)),
    )
    tail = st.sampled_from([0, 0, 1, 5, 300])
    return st.builds(lambda values, rest: (values, sum(values) + rest), lengths, tail)


def make_lengths(
    values: list[int], dtype: torch.dtype, device: torch.device, strided: bool = False
) -> torch.Tensor:
    """Return a tensor of the lengths; strided means one column of three, among other numbers."""
    if not strided:
        return torch.tensor(values, dtype=dtype, device=device)
    columns = torch.full((len(values), 3), -5, dtype=dtype, device=device)
    columns[:, 1] = torch.tensor(values, dtype=dtype, device=device)
    return columns[:, 1]


class Pack(NamedTuple):
    """Input of a mask test."""

    lengths: Sequence[int]
    total_tokens: int
    row_length: int | None = None
    spans: Sequence[tuple[int, int]] = ()


@st.composite
def masked_packs(draw, max_rows: int = 3, max_row_length: int = 24) -> Pack:
    """Draw rows filled by sequences, with a tail after the last, and spans inside some of them."""
    rows = draw(st.integers(1, max_rows))
    row_length = draw(st.integers(1, max_row_length))
    lengths: list[int] = []
    for _ in range(rows):
        cuts = sorted(draw(st.lists(st.integers(0, row_length), max_size=4)))
        edges = [0, *cuts, row_length]
        lengths += [end - begin for begin, end in zip(edges, edges[1:], strict=False)]
    left_out = draw(st.sampled_from([0, 0, 1, 3, len(lengths)]))  # these become the tail
    lengths = lengths[: max(0, len(lengths) - left_out)]
    spans = []
    for begin, length in zip(cu_seqlens(lengths), lengths, strict=False):
        ends = st.lists(st.integers(begin, begin + length), unique=True, max_size=4).map(sorted)
        points = draw(ends) if draw(st.booleans()) else []
        spans += list(zip(points[::2], points[1::2], strict=False))
    asked = row_length if rows > 1 or draw(st.booleans()) else None
    return Pack(lengths, rows * row_length, asked, spans)


WINDOWS = st.none() | st.integers(1, 30)
