"""Benchmark packing and unpacking of padded batches, and the time that packing saves attention.

    python -m benchmarks thd [--device cpu] [--out FOLDER]

- Pack and unpack of one tensor of hidden states, forward and backward; the backward of one is the
  other. Bytes are those read and written; "copy" is the bandwidth relative to a copy of equal size.
  For comparison, the PyTorch calls that make up flash-attention's `unpad_input` and `pad_input`.
- Eight token-sized tensors in one call.
- Everything in a layout, from a 2-D mask on the device, with a fixed total.
- Attention over a batch of which a third is real: fake packing (each padded row is a sequence),
  real packing, and real packing in segments as long as the padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import timer
import torch
from report import Report, Table, arguments, environment

import cuseq

Tensor = torch.Tensor


@dataclass(frozen=True)
class Size:
    """Sizes of the batch, its hidden states and attention."""

    batch: int
    seqlen: int
    real_tokens: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int


GPU = Size(16, 4096, 31_476, 5120, 32, 8, 128)
CPU = Size(4, 128, 250, 64, 4, 2, 16)


def padding_mask(size: Size, device: torch.device) -> Tensor:
    """Return bool `[batch, seqlen]`, padded on the right, with `real_tokens` True in total."""
    lengths = [size.real_tokens // size.batch] * size.batch
    lengths[-1] += size.real_tokens - sum(lengths)
    for i in range(0, size.batch - 1, 2):  # short and long rows in turn
        moved = min(lengths[i] // 2, size.seqlen - lengths[i + 1])
        lengths[i] -= moved
        lengths[i + 1] += moved
    positions = torch.arange(size.seqlen, device=device)
    return positions < torch.tensor(lengths, device=device).unsqueeze(1)


def flash_unpad(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return offsets, the longest length and the rows, as flash-attention's unpad_input does."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    lengths.max().item()
    torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices]


def flash_pad(rows: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    padded = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    padded[indices] = rows
    return padded.unflatten(0, (batch, seqlen))


def measure_moves(size: Size, device: torch.device) -> list[dict]:
    """Return the rows of the table of pack and unpack."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mask = padding_mask(size, device)
    hidden = torch.randn(size.batch, size.seqlen, size.hidden, device=device, dtype=dtype)
    packed = cuseq.PackedLayout.from_padding_mask(mask)
    rows = cuseq.pack(packed, hidden)
    indices = mask.flatten().nonzero().flatten()
    row_bytes = size.hidden * hidden.element_size()
    real, slots = size.real_tokens * row_bytes, size.batch * size.seqlen * row_bytes
    copied = torch.empty_like(rows)

    def backward(function: Callable[..., Tensor], given: Tensor) -> Callable[[], object]:
        leaf = given.detach().requires_grad_()
        out = function(packed, leaf)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)

    calls: list[tuple[str, Callable[[], object], int]] = [
        ("copy", lambda: copied.copy_(rows), 2 * real),
        ("cuseq.pack", lambda: cuseq.pack(packed, hidden), 2 * real),
        ("cuseq.unpack", lambda: cuseq.unpack(packed, rows), real + slots),
        ("cuseq.pack, backward", backward(cuseq.pack, hidden), real + slots),
        ("cuseq.unpack, backward", backward(cuseq.unpack, rows), 2 * real),
        ("flash-attn's unpad_input", lambda: flash_unpad(hidden, mask), 2 * real),
        (
            "flash-attn's pad_input",
            lambda: flash_pad(rows, indices, size.batch, size.seqlen),
            real + slots,
        ),
    ]
    found = []
    for name, call, moved in calls:
        us = timer.device_time(call, device=device).median
        host_us = timer.host_time(call, device=device, calls=5).median
        found.append({"what": name, "us": us, "gb_s": moved / us / 1e3, "host_us": host_us})
    copy = found[0]["gb_s"]
    return [row | {"of_copy": row["gb_s"] / copy} for row in found]


def measure_small(size: Size, device: torch.device) -> list[dict]:
    """Measure eight token-sized tensors, and the layout itself."""
    mask = padding_mask(size, device)
    shape = (size.batch, size.seqlen)
    ids = [torch.randint(0, 1000, shape, device=device) for _ in range(8)]
    total = -(-size.real_tokens // 128) * 128 + 16 * size.batch
    packed = cuseq.PackedLayout.from_padding_mask(mask, 16, total_tokens=total)

    def layout() -> tuple[object, ...]:
        made = cuseq.PackedLayout.from_padding_mask(mask, 16, total_tokens=total)
        return made, made.position_ids, made.seq_ids, made.moe_padding_mask, made.cu_seqlens_padded

    found = []
    for name, call in (
        ("cuseq.pack of 8 token-sized tensors", lambda: cuseq.pack(packed, *ids)),
        ("PackedLayout.from_padding_mask with all it holds, total_tokens given", layout),
    ):
        row = {
            "what": name,
            "us": timer.device_time(call, device=device).median,
            "host_us": timer.host_time(call, device=device, calls=5).median,
        }
        if device.type == "cuda":
            seen = timer.profile(call, device=device).within(timer.WHOLE)
            row |= {"kernels": seen.kernels, "waits": seen.syncs + seen.event_waits}
        found.append(row)
    return found


def measure_attention(size: Size, device: torch.device) -> list[dict]:
    """Measure forward and backward over a batch of which a third is real."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, seqlen = min(size.batch, 8), size.seqlen
    length = seqlen // 3
    mask = (torch.arange(seqlen) < length).expand(batch, -1)
    layouts = {
        "fake packing": cuseq.PackedLayout.from_lengths([seqlen] * batch),
        "real packing": cuseq.PackedLayout.from_padding_mask(mask),
        "real packing in padded segments": cuseq.PackedLayout.from_padding_mask(mask, seqlen),
    }
    found = []
    for name, layout in layouts.items():
        packed = layout.to(device)
        tensors = [
            torch.randn(
                packed.total_tokens, heads, size.head_dim, device=device, dtype=dtype
            ).requires_grad_()
            for heads in (size.heads, size.key_heads, size.key_heads)
        ]

        def both(tensors=tensors, packed=packed) -> object:
            out = cuseq.varlen_attention(*tensors, packed)
            return torch.autograd.grad(out, tensors, torch.ones_like(out))

        us = timer.device_time(both, device=device, repeats=20).median
        found.append({"what": name, "tokens": packed.total_tokens, "us": us})
    fake = found[0]["us"]
    return [row | {"times": fake / row["us"]} for row in found]


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    device = torch.device(args.device)
    size = GPU if device.type == "cuda" else CPU
    moves = measure_moves(size, device)
    attention = measure_attention(size, device)
    small = measure_small(size, device)
    report = Report("thd", environment(args.device))
    shape = f"{size.batch} x {size.seqlen:,} x {size.hidden:,}, {size.real_tokens:,} real tokens"
    report.tables.append(
        Table(
            shape,
            {"what": "", "us": "us", "gb_s": "GB/s", "of_copy": "of copy", "host_us": "host us"},
            moves,
        )
    )
    counted = {"kernels": "kernels", "waits": "waits"} if device.type == "cuda" else {}
    report.tables.append(
        Table("Small ones", {"what": "", "us": "us", "host_us": "host us"} | counted, small)
    )
    report.tables.append(
        Table(
            "Attention, forward and backward, a third of the batch real",
            {"what": "", "tokens": "tokens", "us": "us", "times": "times as fast"},
            attention,
        )
    )
    report.write(args.out)


if __name__ == "__main__":
    main()
