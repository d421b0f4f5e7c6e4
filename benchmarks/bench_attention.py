"""Benchmark packed causal attention against PyTorch's flash kernels and SDPA with a mask.

    python -m benchmarks attention [--device cpu] [--tokens T ...] [--means M ...]

bf16 on CUDA, fp32 on a CPU; 16 query and 8 key-value heads of size 128 unless the options say
otherwise. "PyTorch's kernels" calls `aten::_flash_attention_forward` and `_backward` directly with
the exact longest length, which is the lowest cost of any wrapper; "bound" passes the row's length
as the longest length instead. If flash-attn-4 is installed, the last line is cuseq over its
kernels, by `backend="fa4"`; its other lines run PyTorch's flash kernels. The error column compares
output and gradients with the first line of each case.

Host time is measured in two ways: for one call with its own backward, which includes starting
autograd's engine and waking its thread, and per call of a stack of LAYERS calls under one backward,
as in a model. On a CPU a second table has the host time of calls whose kernels do nothing, in place
of FlashAttention 4: what checks, the choice of a backend, allocation and autograd take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timer
import torch
from report import Report, Table, arguments, draw_bars, environment
from torch.nn.attention.varlen import varlen_attn
from workload import has_flash_attention_4, lognormal_lengths

import cuseq
from cuseq import _C
from cuseq.attention import packages
from cuseq.attention.table import read_table

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]

KERNELS = "PyTorch's kernels, exact"
CUSEQ = "cuseq.varlen_attention"
AUTOGRAD = "PyTorch's kernels, exact, autograd"
LAYERS = 16


@dataclass(frozen=True)
class Case:
    """Inputs of one case, THD: q `[T, Hq, D]`, k and v `[T, Hk, D]`, a gradient like q."""

    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the row; there is no tail."""
        return self.q.size(0)


@dataclass(frozen=True)
class Contender:
    """One attention implementation.

    It consists of a forward on plain tensors; the same with its backward (output, dq, dk, dv); and
    LAYERS chained forwards under one backward.
    """

    name: str
    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, Gradients]]
    stacked: Callable[[], object]


def make_case(tokens: int, mean: int, heads: tuple[int, int, int], device: torch.device) -> Case:
    """Return random inputs; q and k have the scale of a normalised head."""
    query_heads, key_heads, dim = heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(tokens + mean)

    def random(n_heads: int) -> Tensor:
        shape = (tokens, n_heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return Case(
        lognormal_lengths(tokens, mean, seed=mean),
        random(query_heads),
        random(key_heads),
        random(key_heads),
        random(query_heads),
    )


def with_autograd(
    name: str, case: Case, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Contender:
    """Make a contender from a differentiable function of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(case.q, case.k, case.v)

    def both() -> tuple[Tensor, Gradients]:
        out = attend(*leaves)
        return out, torch.autograd.grad(out, leaves, case.grad)

    # Separate keys and values for each layer; otherwise their gradients would have to be summed.
    layers = [[x.detach().requires_grad_() for x in (case.k, case.v)] for _ in range(LAYERS)]

    def stacked() -> object:
        out = leaves[0]
        for k, v in layers:
            out = attend(out, k, v)
        return torch.autograd.grad(
            out, [leaves[0], *(x for pair in layers for x in pair)], case.grad
        )

    return Contender(name, forward, both, stacked)


def kernels_alone(name: str, case: Case, offsets: Tensor, longest: int) -> Contender:
    """Make a contender of PyTorch's flash kernels without autograd; `longest` is the maximum."""
    q, k, v = case.q, case.k, case.v
    # Only dropout reads these two.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)

    def run() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, True, False
        )

    def both() -> tuple[Tensor, Gradients]:
        out, logsumexp, *_ = run()
        return out, torch.ops.aten._flash_attention_backward(
            case.grad, q, k, v, out, logsumexp, offsets, offsets, longest, longest, 0.0, True,
            rng_state, unused,
        )  # fmt: skip

    def stacked() -> object:
        return [both() for _ in range(LAYERS)]

    return Contender(name, lambda: run()[0], both, stacked)


def contenders(case: Case, device: torch.device) -> list[Contender]:
    """Return all contenders, the reference of the errors first."""
    offsets = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32).to(device)
    longest, total = max(case.lengths), case.tokens
    layout = cuseq.PackedLayout.from_lengths(case.lengths, total).to(device)
    ids = layout.seq_ids
    mask = (ids[:, None] == ids).tril()[None, None]
    groups = case.q.size(1) // case.k.size(1)

    def through_autograd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, True, False
        )[0]

    def by_varlen_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0))

    own_backend = "flash" if device.type == "cuda" else "segments"

    def with_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuseq.varlen_attention(q, k, v, layout, backend=own_backend)

    def over_fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuseq.varlen_attention(q, k, v, layout, backend="fa4")

    def by_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.cuseq.varlen_attention(
            q, k, v, layout.cu_seqlens_static, layout.host_meta, backend=own_backend
        )[0]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Keys and values are repeated, as transformers does whenever there is a mask.
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out[0].transpose(0, 1)

    own = [
        with_autograd(CUSEQ, case, with_layout),
        with_autograd("torch.ops.cuseq.varlen_attention", case, by_op),
    ]
    masked = with_autograd("SDPA, dense mask", case, dense)
    if device.type != "cuda":
        return [masked, *own]
    faster = []
    if has_flash_attention_4():
        faster.append(with_autograd(f"{CUSEQ}, FA4", case, over_fa4))
    return [
        kernels_alone(KERNELS, case, offsets, longest),
        kernels_alone("PyTorch's kernels, bound", case, offsets, total),
        with_autograd(AUTOGRAD, case, through_autograd),
        with_autograd("torch.nn.attention.varlen, exact", case, by_varlen_attn),
        *own,
        masked,
        *faster,
    ]


def empty_calls(heads: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return the host time on a CPU of calls whose kernels do nothing, chosen and asked for."""
    device = torch.device("cpu")
    query_heads, key_heads, dim = heads
    # The measurements of a GPU stand for a CPU, so that the choice compares the call with them.
    rows = [((0, *facts[1:]), {"fa4": 1.0}) for facts, _ in read_table()]
    _C.set_measured_attention(rows)
    library = packages.register_kernels("fa4", "empty", _nothing, _nothing, device="CPU")
    shapes = [(64, n, dim) for n in (query_heads, key_heads, key_heads)]
    q, k, v = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    layout = cuseq.PackedLayout.from_lengths([40, 24])
    found = []
    for backend in ("auto", "fa4"):

        def forward(backend: str = backend) -> Tensor:
            with torch.no_grad():
                return cuseq.varlen_attention(q, k, v, layout, backend=backend)

        def both(backend: str = backend) -> object:
            out = cuseq.varlen_attention(q, k, v, layout, backend=backend)
            return torch.autograd.grad(out, (q, k, v), out)

        row = {"name": f'backend="{backend}"'}
        for part, call in (("forward", forward), ("both", both)):
            taken = timer.host_time(call, device=device, calls=200, warmup=50)
            row |= {f"{part}_us": taken.median, f"{part}_low_us": taken.low}
        found.append(row)
    _C.set_measured_attention([])
    del library
    return found


def _nothing(*tensors: object) -> None:
    pass


def error(found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients]) -> float:
    """Return the largest relative L2 distance among output, dq, dk and dv."""
    pairs = zip((found[0].detach(), *found[1]), (expected[0].detach(), *expected[1]), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def measure(case: Case, mean: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one row per contender; a failed one has the error instead of times."""
    rows = []
    expected = None
    for contender in contenders(case, device):
        row: dict[str, Any] = {
            "tokens": case.tokens, "mean": mean, "sequences": len(case.lengths),
            "longest": max(case.lengths), "name": contender.name,
        }  # fmt: skip
        rows.append(row)
        try:
            result = contender.both()
            expected = expected or result
            row["error"] = error(result, expected)
            del result
            for part, call in (("forward", contender.forward), ("both", contender.both)):
                taken = timer.device_time(call, device=device)
                row |= {f"{part}_us": taken.median, f"{part}_p90_us": taken.high}
                if device.type == "cuda":
                    # Batches of about 20 ms on the device; longer batches add nothing for slow
                    # calls.
                    calls = max(3, min(20, int(20e3 / taken.median)))
                    host = timer.host_time(call, device=device, calls=calls)
                    row[f"{part}_host_us"] = host.median
            if device.type == "cuda":
                host = timer.host_time(contender.stacked, device=device, calls=1)
                row["stacked_host_us"] = host.median / LAYERS
        except RuntimeError as failure:
            row["note"] = str(failure).splitlines()[0]
    alone = rows[0].get("stacked_host_us")
    for row in rows:
        if alone is not None and "stacked_host_us" in row:
            row["above_us"] = row["stacked_host_us"] - alone
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="default depends on the device")
    parser.add_argument("--means", type=int, nargs="+", default=[512, 64])
    parser.add_argument(
        "--heads", type=int, nargs=3, metavar=("HQ", "HK", "D"), help="default 16 8 128, CPU 4 2 64"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    sizes = args.tokens or ([2048, 4096, 8192, 16384] if on_gpu else [512, 1024, 2048])
    heads = tuple(args.heads or ((16, 8, 128) if on_gpu else (4, 2, 64)))

    rows = []
    for mean in args.means:
        for tokens in sizes:
            rows += measure(make_case(tokens, mean, heads, device), mean, device)
            print(f"measured {tokens:,} tokens, mean {mean}", flush=True)
            if on_gpu:
                torch.cuda.empty_cache()

    report = Report("attention", environment(args.device))
    dtype = "bf16" if on_gpu else "fp32"
    report.notes.append(f"({heads[0]}+{heads[1]})x{heads[2]}, {dtype}, causal, lognormal lengths.")
    headings = {
        "tokens": "tokens",
        "mean": "mean",
        "sequences": "sequences",
        "longest": "longest",
        "name": "attention",
        "forward_us": "forward us",
        "both_us": "forward + backward us",
        "both_p90_us": "p90",
        "error": "error",
    }
    if on_gpu:
        headings |= {
            "forward_host_us": "forward host us",
            "both_host_us": "forward + backward host us",
            "stacked_host_us": f"the same in a stack of {LAYERS}",
            "above_us": "above the kernels",
        }
    if failed := [row["name"] for row in rows if "note" in row]:
        headings["note"] = "failed"
    report.tables.append(Table("Attention", headings, rows))
    if not on_gpu:
        headings = {"name": "attention", "forward_us": "forward us", "forward_low_us": "p10",
                    "both_us": "forward + backward us", "both_low_us": "p10"}  # fmt: skip
        report.tables.append(Table("Calls whose kernels do nothing", headings, empty_calls(heads)))
    report.write(args.out)

    names = list(dict.fromkeys(row["name"] for row in rows))
    cases = list(dict.fromkeys((row["tokens"], row["mean"]) for row in rows))
    times = {(row["tokens"], row["mean"], row["name"]): row.get("both_us") for row in rows}
    draw_bars(
        args.out / "attention.png",
        "Attention, forward and backward",
        "us",
        [f"{tokens:,}, mean {mean}" for tokens, mean in cases],
        {name: [times[(*case, name)] for case in cases] for name in names},
    )
    if CUSEQ in failed:
        sys.exit(f"{CUSEQ} failed, see the table")


if __name__ == "__main__":
    main()
