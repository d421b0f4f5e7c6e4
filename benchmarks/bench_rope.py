"""Benchmark RoPE against a copy of equal size, unsloth, Liger, torch.compile and transformers.

    python -m benchmarks rope [--device cpu] [--quick] [--tokens N ...]

bf16 on CUDA; a reduced run in fp32 and bf16 on a CPU. A packed row of T tokens (lognormal lengths,
mean 350), positions restarting in each sequence, q and k of (query + key heads) x head size.

- `copy`: copies as many bytes as q and k hold between two buffers; no rotation can be faster.
- `unsloth`, `Liger`, `torch.compile` and `transformers` rotate the same row, with q and k strided
  as in models. All but unsloth take cos and sin gathered for each token beforehand, untimed.
  torch.compile compiles transformers' code once for all T, for the first shape only.
- `cuseq` reads the layout; its other lines name how they differ from that. "dense" is one sequence.

GB/s counts the minimum of bytes: q and k read once and written once, and the used rows of the table
read once; with q/k norm, the backward also reads q and k besides their gradients. "Of copy" is that
bandwidth over the copy's. Host time is of one call: without autograd; with it; forward and
backward; and forward and backward within a stack of LAYERS calls under one backward, as in a model,
where autograd starts its engine once. Errors are relative L2 against fp32. unsloth's norm kernel
supports only frozen weights, so one line of cuseq uses those.

The last table repeats the sweep of unsloth's sample packing, measuring its kernel again next to
cuseq: dense and varlen, 256 to 8,192 tokens, in microseconds, with the largest and the mean
difference of the two results.

unsloth patches transformers and torch on import, so it and the sweep are measured in a separate
process. The peers' packages come from the folder in PEERS (default .peers; peers.txt says how to
fill it). A missing package is reported and left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timer
import torch
from report import Report, Table, arguments, draw_bars, environment
from workload import import_peer, lognormal_lengths, peers_folder

import cuseq

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Heads = tuple[int, int, int]

MEAN_LENGTH = 350
EPS = 1e-6
LAYERS = 16
MAIN: Heads = (40, 8, 128)
SIZES = [2**power for power in range(8, 18)]
SHAPES: dict[Heads, list[int]] = {MAIN: SIZES} | {
    heads: [512, 2048, 8192, 32_768] for heads in ((16, 8, 128), (32, 8, 128), (64, 8, 64))
}
QUICK_SHAPES: dict[Heads, list[int]] = {MAIN: [512, 8192], (64, 8, 64): [8192]}
CPU_SHAPES: dict[Heads, list[int]] = {(8, 2, 64): [256, 2048]}
# Heads of Llama 3 8B, chosen here: the shape and columns of the published sweep could not be found.
SWEEP_HEADS: Heads = (32, 8, 128)
SWEEP_SIZES = [256, 512, 1024, 2048, 4096, 8192]

# Host time does not grow with the row, and long rows would only make the host wait.
HOST_TOKENS = 8192
ERROR_TOKENS = 8192
# Seconds after which no further case is started, so that the results are written in time.
STOP_S = 140
WORKER_LIMIT_S = 100

COPY, COMPILED, EAGER = "copy", "torch.compile", "transformers"
CUSEQ, UNSLOTH, LIGER = "cuseq", "unsloth", "Liger"
NORM = ", q/k norm"
FROZEN = ", frozen weights"


@dataclass(frozen=True)
class Case:
    """One packed row: q `[T, Hq, D]`, k `[T, Hk, D]`, gradients of those shapes, positions."""

    q: Tensor
    k: Tensor
    grads: Pair
    packed: cuseq.PackedLayout

    @property
    def tokens(self) -> int:
        return self.q.size(0)

    @property
    def heads(self) -> Heads:
        return self.q.size(1), self.k.size(1), self.q.size(2)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def as_in_transformers(self) -> tuple[Pair, Pair]:
        """Return inputs and gradients in transformers' shape, `[1, H, T, D]`."""
        return (bhsd(self.q), bhsd(self.k)), tuple(bhsd(grad) for grad in self.grads)

    def table(self) -> Pair:
        """Return cos and sin in fp32, one row per position, `[T, D / 2]`."""
        return cuseq.rope_table(self.tokens, self.q.size(2), device=self.device)

    def job(self) -> Job:
        """Return the rotation of the row, with cos and sin of each token."""
        ids = self.packed.position_ids
        return Job(*(t[ids] for t in self.table()))

    def table_bytes(self) -> int:
        """Return the bytes of the fp32 table's rows in use; equal for all contenders."""
        return 2 * self.packed.max_seqlen * self.q.size(2) // 2 * 4


@dataclass(frozen=True)
class Job:
    """The expected rotation: cos and sin in fp32 `[T, rotary_dim / 2]`, pairing and weights."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    weights: Pair | None = None

    def result(self, q: Tensor, k: Tensor, dtype: torch.dtype = torch.float32) -> Pair:
        """Return q and k, THD, rotated by the plain formula in `dtype`."""
        return tuple(self._one(x.to(dtype), i) for i, x in enumerate((q, k)))

    def _one(self, x: Tensor, index: int) -> Tensor:
        if self.weights is not None:
            scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
            x = x * scale * self.weights[index].detach().to(x.dtype)
        cos, sin = (table.to(x.dtype)[:, None] for table in (self.cos, self.sin))
        pairs = cos.size(-1)
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned[..., :pairs], turned[..., pairs:]
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((turned, rest), -1)


@dataclass(frozen=True)
class Contender:
    """One way to rotate q and k.

    Attributes:
        name: name in the tables.
        rotate: takes q and k as in `inputs` and returns them rotated.
        inputs: q and k in the shape that `rotate` expects.
        grads: gradients of its outputs.
        job: the expected result; None for the copy.
        table_bytes: bytes of the table's rows in use.
        weights: norm weights that `rotate` reads and that require gradients.
        repeats: most samples of device time.
        differentiable: whether the backward is measured.
    """

    name: str
    rotate: Callable[[Tensor, Tensor], Any]
    inputs: Pair
    grads: Pair
    job: Job | None
    table_bytes: int
    weights: tuple[Tensor, ...] = ()
    repeats: int = 30
    differentiable: bool = True

    def bytes(self, part: str) -> int:
        """Return the fewest bytes that its forward or backward moves."""
        values = sum(x.numel() * x.element_size() for x in self.inputs)
        moved = 2 * values + self.table_bytes
        if NORM in self.name and part == "backward":
            # The inputs again, and one fp32 reciprocal for each of their heads.
            moved += values + sum(x.numel() // x.size(-1) * 4 for x in self.inputs)
        return moved


def make_case(tokens: int, heads: Heads, device: torch.device, dtype: torch.dtype) -> Case:
    """Return random inputs that are equal in every process."""
    query_heads, key_heads, dim = heads
    generator = torch.Generator(device=device).manual_seed(tokens)

    def random(n_heads: int) -> Tensor:
        shape = (tokens, n_heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed=0)
    return Case(
        random(query_heads),
        random(key_heads),
        (random(query_heads), random(key_heads)),
        cuseq.PackedLayout.from_lengths(lengths, tokens).to(device),
    )


def bhsd(x: Tensor) -> Tensor:
    """Return a view of `[T, H, D]` in transformers' shape, `[1, H, T, D]`, without a copy."""
    return x[None].transpose(1, 2)


def thd(x: Tensor, tokens: int) -> Tensor:
    """Return a contender's input or output as `[T, H, D]`; there are fewer heads than tokens."""
    x = x[0] if x.dim() == 4 else x
    return x if x.size(0) == tokens else x.transpose(0, 1)


def token_table(job: Job, dtype: torch.dtype) -> Pair:
    """Return cos and sin as transformers' layers get them: `[1, T, D]`, halves repeated."""
    return tuple(torch.cat((t, t), -1)[None].to(dtype) for t in (job.cos, job.sin))


@functools.lru_cache
def norm_modules(dim: int, device: torch.device, dtype: torch.dtype, trainable: bool) -> tuple:
    """Return q_norm and k_norm of transformers' Qwen3, with weights around 1."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(1)
    modules = []
    for _ in range(2):
        module = Qwen3RMSNorm(dim, eps=EPS)
        module.weight.data += 0.1 * torch.randn(dim, generator=generator)
        modules.append(module.to(device=device, dtype=dtype).requires_grad_(trainable))
    return tuple(modules)


def norm_weights(case: Case, trainable: bool) -> Pair:
    """Return the weights of q's and k's norm, `[D]`."""
    modules = norm_modules(case.q.size(2), case.device, case.q.dtype, trainable)
    return tuple(module.weight for module in modules)


def rotation() -> Callable:
    """Return transformers' eager rotation."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb


def compile_for_timing(function: Callable) -> Callable:
    """Return torch.compile(function) with a backward that may run twice over one forward.

    The measurement needs that.
    """
    torch._functorch.config.donated_buffer = False
    return torch.compile(function)


@functools.lru_cache
def compiled_rotation() -> Callable:
    """Return transformers' rotation, compiled: one graph for all T."""
    return compile_for_timing(rotation())


@functools.lru_cache
def normed_rotation(dim: int, device: torch.device, dtype: torch.dtype, compiled: bool) -> Callable:
    """Return transformers' q_norm, k_norm and rotation of q and k `[1, T, H, D]`."""
    q_norm, k_norm = norm_modules(dim, device, dtype, True)
    rotate = rotation()

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        return rotate(q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2), cos, sin)

    return compile_for_timing(run) if compiled else run


def of_any_length(tensors: Sequence[Tensor], tokens: int) -> None:
    """Mark the dimension of size `tokens` as dynamic for the compiler."""
    for x in tensors:
        torch._dynamo.maybe_mark_dynamic(x, list(x.shape).index(tokens))


def with_copy(case: Case) -> Contender:
    """Make the contender that copies the bytes of q and k between two buffers."""
    size = sum(x.numel() * x.element_size() for x in (case.q, case.k))
    source = torch.empty(size, dtype=torch.int8, device=case.device)
    target = torch.empty_like(source)
    return Contender(
        COPY,
        lambda q, k: target.copy_(source),
        (case.q, case.k),
        case.grads,
        None,
        table_bytes=0,
        differentiable=False,
    )


def with_cuseq(case: Case) -> Iterator[Contender]:
    """Yield cuseq in all its variants."""
    q, k, packed, ids = case.q, case.k, case.packed, case.packed.position_ids
    tokens, dim, device, longest = case.tokens, q.size(2), case.device, packed.max_seqlen
    cos, sin = case.table()
    job = case.job()

    def contender(
        name: str, job: Job, rows: int = longest, rows_of: Pair = (cos, sin), **options: Any
    ) -> Contender:
        used = 2 * rows * rows_of[0].size(-1) * rows_of[0].element_size()

        def rotate(q: Tensor, k: Tensor) -> Pair:
            return cuseq.apply_rope(q, k, *rows_of, **options)

        return Contender(f"cuseq{name}", rotate, (q, k), case.grads, job, used)

    yield contender("", job, packed=packed)
    yield contender(", dense", Job(cos, sin), tokens)
    yield contender(", position_ids", job, position_ids=ids)
    # Replaces transformers' own call and takes its arguments.
    given = token_table(job, q.dtype)
    by_token = contender(
        ", token table, BHSD", job, tokens, given, table="token", qkv_format="bhsd"
    )
    inputs, grads = case.as_in_transformers
    yield replace(by_token, inputs=inputs, grads=grads)
    if q.dtype != torch.float32:
        narrow = tuple(t.to(q.dtype) for t in (cos, sin))
        yield contender(f", {_short(q.dtype)} table", job, rows_of=narrow, packed=packed)
    in_place = contender(", in place", job, packed=packed, inplace=True)
    yield replace(in_place, differentiable=False)
    fused = torch.cat((q, k, k), 1)
    slices = (fused[:, : q.size(1)], fused[:, q.size(1) : -k.size(1)])
    yield replace(contender(", QKV slices", job, packed=packed), inputs=slices)
    neighbours = replace(job, interleaved=True)
    yield contender(", interleaved", neighbours, packed=packed, interleaved=True)

    pairs = dim // 2
    section = [pairs // 4, 3 * pairs // 8, 3 * pairs // 8]
    planes = torch.stack((ids, ids * 3 % longest, ids * 7 % longest))
    plane = torch.arange(3, device=device).repeat_interleave(torch.tensor(section, device=device))
    picked = Job(*(t[planes[plane].T, torch.arange(pairs, device=device)] for t in (cos, sin)))
    yield contender(", MRoPE", picked, position_ids=planes, mrope_section=section)
    # Qwen3-VL's interleaving: t h w t h w ..., then time once a section is used up.
    plane = torch.arange(pairs, device=device) % 3
    plane[torch.arange(pairs, device=device) >= 3 * torch.tensor(section, device=device)[plane]] = 0
    picked = Job(*(t[planes[plane].T, torch.arange(pairs, device=device)] for t in (cos, sin)))
    options = {"mrope_section": section, "mrope_interleaved": True}
    yield contender(", MRoPE alternating", picked, position_ids=planes, **options)
    half = cuseq.rope_table(tokens, dim // 2, device=device)
    turned = Job(*(t[ids] for t in half))
    yield contender(", partial", turned, rows_of=half, packed=packed, rotary_dim=dim // 2)

    for trainable in (True, False):
        weights = norm_weights(case, trainable)

        def rotate(q: Tensor, k: Tensor, weights: Pair = weights) -> Pair:
            return cuseq.apply_qk_norm_rope(q, k, *weights, cos, sin, eps=EPS, packed=packed)

        yield replace(
            contender(NORM + ("" if trainable else FROZEN), replace(job, weights=weights)),
            rotate=rotate,
            weights=weights if trainable else (),
        )


def with_transformers(case: Case, compiled: bool) -> Iterator[Contender]:
    """Yield transformers' code, eager or compiled, alone and after its q_norm and k_norm."""
    job = case.job()
    table = token_table(job, case.q.dtype)
    inputs, grads = case.as_in_transformers
    unnormed = (case.q[None], case.k[None])
    name, repeats, rotate = EAGER, 7, rotation()
    if compiled:
        name, repeats, rotate = COMPILED, 20, compiled_rotation()
        of_any_length([*table, *inputs, *unnormed], case.tokens)
    normed = normed_rotation(case.q.size(2), case.device, case.q.dtype, compiled)
    alone = Contender(
        name,
        lambda q, k: rotate(q, k, *table),
        inputs,
        grads,
        job,
        case.table_bytes(),
        repeats=repeats,
    )
    yield alone
    weights = norm_weights(case, trainable=True)
    yield replace(
        alone,
        name=name + NORM,
        rotate=lambda q, k: normed(q, k, *table),
        inputs=unnormed,
        job=replace(job, weights=weights),
        weights=weights,
    )


def with_liger(case: Case) -> Iterator[Contender]:
    """Yield Liger's kernel, which rotates in place, incoming gradients too."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    job = case.job()
    table = token_table(job, case.q.dtype)
    own = replace(
        case,
        q=case.q.clone(),
        k=case.k.clone(),
        grads=tuple(grad.clone() for grad in case.grads),
    )
    yield Contender(
        LIGER,
        lambda q, k: liger_rotary_pos_emb(q, k, *table),
        *own.as_in_transformers,
        job,
        case.table_bytes(),
    )


def with_unsloth(case: Case) -> Iterator[Contender]:
    """Yield unsloth's kernels, with the positions that its packing passes."""
    from unsloth.kernels.qk_norm_rope import fast_qk_norm_rope
    from unsloth.kernels.rope_embedding import fast_rope_embedding

    ids = case.packed.position_ids[None]
    table = tuple(t[0] for t in token_table(Job(*case.table()), case.q.dtype))
    inputs, grads = case.as_in_transformers
    alone = Contender(
        UNSLOTH,
        lambda q, k: fast_rope_embedding(q, k, *table, ids),
        inputs,
        grads,
        case.job(),
        case.table_bytes(),
    )
    yield alone
    weights = norm_weights(case, trainable=False)
    norms = [SimpleNamespace(weight=weight, variance_epsilon=EPS) for weight in weights]
    yield replace(
        alone,
        name=UNSLOTH + NORM + FROZEN,
        rotate=lambda q, k: fast_qk_norm_rope(*norms, q, k, *table, ids),
        inputs=(case.q[None], case.k[None]),
        job=replace(alone.job, weights=weights),
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def error(contender: Contender, tokens: int) -> float:
    """Return the relative L2 error against the fp32 formula, the larger of q's and k's."""
    expected = contender.job.result(*(thd(x, tokens) for x in contender.inputs))
    with torch.no_grad():
        found = contender.rotate(*contender.inputs)
    pairs = zip((thd(x, tokens).float() for x in found), expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def measure(contender: Contender, case: Case) -> dict[str, Any]:
    """Measure one contender; a failed one has the error instead of times."""
    query_heads, key_heads, dim = case.heads
    row: dict[str, Any] = {
        "shape": f"({query_heads}+{key_heads})x{dim}", "dtype": _short(case.q.dtype),
        "tokens": case.tokens, "name": contender.name,
    }  # fmt: skip
    try:
        if contender.job is not None and case.tokens <= ERROR_TOKENS:
            row["error"] = error(contender, case.tokens)
        _measure_forward(contender, case, row)
        if contender.differentiable:
            _measure_backward(contender, case, row)
    except Exception as failure:
        row["note"] = (str(failure).splitlines() or [type(failure).__name__])[0][:200]
    return row


def _measure_forward(contender: Contender, case: Case, row: dict[str, Any]) -> None:
    rotate, (q, k) = contender.rotate, contender.inputs

    def forward() -> object:
        return rotate(q, k)

    with torch.no_grad():
        taken = timer.device_time(forward, device=case.device, repeats=contender.repeats)
        row |= {"forward_us": taken.median, "forward_p90_us": taken.high}
        row["forward_gb_s"] = contender.bytes("forward") / taken.median / 1e3
        if _host_counts(case):
            row["host_us"] = _host(forward, case, taken.median)


def _measure_backward(contender: Contender, case: Case, row: dict[str, Any]) -> None:
    rotate, grads, weights = contender.rotate, contender.grads, contender.weights
    leaves = [x.detach().requires_grad_() for x in contender.inputs]
    if contender.name.startswith(COMPILED):
        of_any_length(leaves, case.tokens)
    outputs = rotate(*leaves)

    def graded() -> object:
        return rotate(*leaves)

    def backward() -> object:
        return torch.autograd.grad(outputs, [*leaves, *weights], grads, retain_graph=True)

    def both() -> object:
        return torch.autograd.grad(rotate(*leaves), [*leaves, *weights], grads)

    def stacked() -> object:
        # With a norm first, inputs are [1, T, H, D] and outputs [1, H, T, D].
        q, k = leaves
        for _ in range(LAYERS):
            q, k = rotate(q, k)
            if q.dim() == 4 and contender.inputs[0].shape != q.shape:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
        if q.shape != grads[0].shape:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return torch.autograd.grad((q, k), [*leaves, *weights], grads)

    taken = timer.device_time(backward, device=case.device, repeats=contender.repeats)
    row["backward_us"] = taken.median
    row["backward_gb_s"] = contender.bytes("backward") / taken.median / 1e3
    taken = timer.device_time(both, device=case.device, repeats=contender.repeats)
    row["both_us"] = taken.median
    if _host_counts(case):
        row["graded_host_us"] = _host(graded, case, taken.median)
        row["both_host_us"] = _host(both, case, taken.median)
        # transformers launches too many kernels to queue a whole stack without waiting.
        if not contender.name.startswith(EAGER):
            found = timer.host_time(stacked, device=case.device, calls=1, batches=15, warmup=2)
            row["stacked_host_us"] = found.median / LAYERS


def _host_counts(case: Case) -> bool:
    return case.device.type == "cuda" and case.tokens <= HOST_TOKENS


def _host(call: Callable[[], object], case: Case, device_us: float) -> float:
    # At most as many calls per batch as the device completes in about 20 ms.
    calls = max(3, min(20, int(20e3 / device_us)))
    return timer.host_time(call, device=case.device, calls=calls, batches=15).median


def measure_case(
    case: Case, contenders: Callable[[Case], Iterator[Iterator[Contender]]]
) -> list[dict[str, Any]]:
    """Return all rows of one case, the copy first, each with its bandwidth over the copy's."""
    rows = [measure(with_copy(case), case)]
    for several in contenders(case):
        # Only one contender at a time holds its inputs.
        try:
            rows += [measure(contender, case) for contender in several]
        except ImportError as missing:
            print(f"left out: {missing}", flush=True)
    copied = rows[0].get("forward_gb_s")
    for row in rows[1:]:
        for part in ("forward", "backward"):
            if copied and f"{part}_gb_s" in row:
                row[f"{part}_of_copy"] = row[f"{part}_gb_s"] / copied
    return rows


def here(compile_shapes: Sequence[Heads], liger: bool) -> Callable[[Case], Iterator]:
    """Return the contenders of the main process."""

    def contenders(case: Case) -> Iterator[Iterator[Contender]]:
        yield with_cuseq(case)
        if liger:
            yield with_liger(case)
        if case.heads in compile_shapes:
            yield with_transformers(case, compiled=True)
        yield with_transformers(case, compiled=False)

    return contenders


def measure_cases(
    shapes: dict[Heads, list[int]],
    device: torch.device,
    contenders: Callable[[Case], Iterator],
    stop: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows of the cases started before `stop` (time.monotonic), and names of the others."""
    rows, left_out = [], []
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]
    for heads, sizes in shapes.items():
        for dtype in dtypes:
            for tokens in sizes:
                name = f"({heads[0]}+{heads[1]})x{heads[2]} {_short(dtype)}, {tokens:,} tokens"
                if time.monotonic() > stop:
                    left_out.append(name)
                    continue
                begun = time.monotonic()
                rows += measure_case(make_case(tokens, heads, device, dtype), contenders)
                print(f"measured {name} ({time.monotonic() - begun:.1f} s)", flush=True)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows, left_out


def sweep(sizes: list[int], device: torch.device, unsloth: bool) -> list[dict[str, Any]]:
    """Repeat the sweep of unsloth's sample packing, a line for each mode and length."""
    dtype = torch.bfloat16
    rows = []
    for varlen in (False, True):
        for tokens in sizes:
            case = make_case(tokens, SWEEP_HEADS, device, dtype)
            rows.append(_sweep_line(case, varlen, unsloth))
    return rows


def _sweep_line(case: Case, varlen: bool, unsloth: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": "varlen" if varlen else "dense", "tokens": case.tokens}
    cos, sin = case.table()
    job = case.job() if varlen else Job(cos, sin)
    exact = job.result(case.q, case.k, torch.float64)
    options = {"packed": case.packed} if varlen else {}
    inputs = (case.q, case.k)
    ways = {CUSEQ: (lambda q, k: cuseq.apply_rope(q, k, cos, sin, **options), inputs, case.grads)}
    if unsloth:
        from unsloth.kernels.rope_embedding import fast_rope_embedding

        table = tuple(t[0] for t in token_table(Job(cos, sin), case.q.dtype))
        indices = (case.packed.position_ids[None],) if varlen else ()
        # Without indices it rotates in place.
        own = replace(case, q=case.q.clone(), k=case.k.clone())
        ways[UNSLOTH] = (
            lambda q, k: fast_rope_embedding(q, k, *table, *indices),
            *own.as_in_transformers,
        )
    found = {}
    for name, (rotate, inputs, grads) in ways.items():
        with torch.no_grad():
            found[name] = [thd(x, case.tokens).double() for x in rotate(*inputs)]
        row[f"{name}_max"], row[f"{name}_mean"] = _difference(found[name], exact)
        leaves = [x.detach().requires_grad_() for x in inputs]

        def forward(rotate: Callable = rotate, inputs: Pair = inputs) -> object:
            return rotate(*inputs)

        def both(
            rotate: Callable = rotate, leaves: list[Tensor] = leaves, grads: Pair = grads
        ) -> object:
            return torch.autograd.grad(rotate(*leaves), leaves, grads)

        for part, call in (("forward", forward), ("both", both)):
            taken = timer.device_time(call, device=case.device)
            row[f"{name}_{part}_us"] = taken.median
            host = timer.host_time(call, device=case.device, calls=10, batches=15)
            # In back-to-back calls, the slower of host and device decides.
            row[f"{name}_{part}_call_us"] = max(taken.median, host.median)
    if unsloth:
        row["max"], row["mean"] = _difference(found[CUSEQ], found[UNSLOTH])
        for part in ("forward", "both"):
            for key in ("us", "call_us"):
                ours, theirs = (row[f"{name}_{part}_{key}"] for name in (CUSEQ, UNSLOTH))
                row[f"{part}_{key}_times"] = theirs / ours
    return row


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    apart = torch.cat([(a - b).abs().flatten() for a, b in zip(found, expected, strict=True)])
    return float(apart.max()), float(apart.mean())


def sweep_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return the tables of the sweep, forward and forward with backward, in microseconds."""
    query_heads, key_heads, dim = SWEEP_HEADS
    what = f"The sweep of unsloth's sample packing, ({query_heads}+{key_heads})x{dim}, bf16"
    found = []
    for part, title in (("forward", "forward"), ("both", "forward and backward")):
        headings = {"mode": "mode", "tokens": "tokens"}
        for key, unit in (("us", "us"), ("call_us", "us a call")):
            headings |= {f"{name}_{part}_{key}": f"{name} {unit}" for name in (UNSLOTH, CUSEQ)}
            headings[f"{part}_{key}_times"] = "times faster"
        if part == "forward":
            headings |= {"max": "largest difference", "mean": "mean difference"}
            for name in (UNSLOTH, CUSEQ):
                headings |= {f"{name}_max": f"{name} from fp64, largest", f"{name}_mean": "mean"}
        found.append(Table(f"{what}, {title}", headings, rows))
    return found


def work(args: argparse.Namespace, shapes: dict[Heads, list[int]], sizes: list[int]) -> None:
    """Run in a child process: write unsloth's rows and the sweep, or the error, to a file."""
    found: dict[str, Any] = {"rows": [], "sweep": [], "left_out": []}
    try:
        import unsloth

        found["version"] = unsloth.__version__
    except Exception as failure:
        found["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    else:
        device = torch.device(args.device)
        stop = time.monotonic() + WORKER_LIMIT_S / 2
        found["sweep"] = sweep(sizes, device, unsloth=True)
        found["rows"], found["left_out"] = measure_cases(
            shapes, device, lambda case: iter([with_unsloth(case)]), stop
        )
    args.worker.write_text(json.dumps(found), encoding="utf-8")


def run_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the process with unsloth measured; `failed` if it could not."""
    paths = [str(peers_folder() or ""), os.environ.get("PYTHONPATH", "")]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "unsloth.json"
        command = [sys.executable, __file__, "--device", args.device, "--worker", str(answer)]
        own_sizes = ["--quick"] * args.quick
        if args.tokens:
            own_sizes += ["--tokens", *map(str, args.tokens)]
        surroundings = {
            **os.environ, **offline, "UNSLOTH_DISABLE_STATISTICS": "1",
            "UNSLOTH_COMPILE_LOCATION": str(Path(scratch) / "compiled"),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }  # fmt: skip
        try:
            done = subprocess.run(command + own_sizes, env=surroundings, timeout=WORKER_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {WORKER_LIMIT_S} s"}
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        return {"failed": f"the process ended with {done.returncode}"}


def add_rows(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert unsloth's rows after the copy of their case, without the copy it measured itself."""
    ordered = []
    for row in rows:
        ordered.append(row)
        if row["name"] == COPY:
            ordered += [
                other
                for other in others
                if other["name"] != COPY
                and all(other[key] == row[key] for key in ("shape", "dtype", "tokens"))
            ]
    return ordered


def tables(rows: list[dict[str, Any]], on_gpu: bool) -> list[Table]:
    """Return a table for each shape and dtype, and another with q/k norm."""
    headings = {
        "tokens": "tokens", "name": "rotation", "forward_us": "forward us",
        "forward_gb_s": "GB/s", "forward_of_copy": "of copy", "backward_us": "backward us",
        "backward_gb_s": "GB/s", "backward_of_copy": "of copy", "both_us": "forward + backward us",
    }  # fmt: skip
    if on_gpu:
        headings |= {
            "host_us": "host us, no autograd", "graded_host_us": "autograd",
            "both_host_us": "forward + backward", "stacked_host_us": f"in a stack of {LAYERS}",
        }  # fmt: skip
    headings["error"] = "error"
    found = []
    for shape, dtype in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        for normed, title in ((False, "RoPE"), (True, "q/k norm and RoPE")):
            some = [row for row in own if row["name"] == COPY or (NORM in row["name"]) == normed]
            columns = headings | ({"note": "failed"} if any("note" in r for r in some) else {})
            found.append(Table(f"{title}, {shape}, {dtype}", columns, some))
    return found


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Plot the bandwidth of the first shape's forward."""
    shape = rows[0]["shape"], rows[0]["dtype"]
    own = [row for row in rows if (row["shape"], row["dtype"]) == shape]
    sizes = list(dict.fromkeys(row["tokens"] for row in own))
    names = [COPY, UNSLOTH, LIGER, COMPILED, EAGER, CUSEQ, UNSLOTH + NORM + FROZEN, CUSEQ + NORM]
    reached = {(row["name"], row["tokens"]): row.get("forward_gb_s") for row in own}
    draw_bars(
        out / "rope.png",
        f"RoPE, {shape[0]}, {shape[1]}, forward",
        "GB/s",
        [f"{tokens:,}" for tokens in sizes],
        {
            name: [reached.get((name, tokens)) for tokens in sizes]
            for name in names
            if any(reached.get((name, tokens)) for tokens in sizes)
        },
    )


def main() -> None:
    begun = time.monotonic()
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="these sizes of the first shape alone"
    )
    parser.add_argument(
        "--compile-all", action="store_true", help="torch.compile for every shape, which is slow"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    shapes = QUICK_SHAPES if args.quick else SHAPES
    sweep_sizes = SWEEP_SIZES
    if args.tokens:
        shapes = {MAIN: args.tokens}
    if not on_gpu:
        shapes = {heads: sizes[: 1 if args.quick else None] for heads, sizes in CPU_SHAPES.items()}
        sweep_sizes = SWEEP_SIZES[:2]
    if args.worker:
        work(args, shapes, sweep_sizes)
        return

    report = Report("rope", environment(args.device))
    report.notes.append(
        f"Packed rows, lognormal lengths of mean {MEAN_LENGTH}; medians; GB/s on the fewest bytes."
    )
    swept: dict[str, Any] = {"failed": "not run on a CPU"}
    if on_gpu:
        swept = run_worker(args)
    liger = on_gpu and import_peer("liger_kernel")
    compile_shapes = () if not on_gpu else tuple(shapes) if args.compile_all else (MAIN,)
    rows, left_out = measure_cases(shapes, device, here(compile_shapes, liger), begun + STOP_S)
    if "failed" in swept:
        report.notes.append(f"unsloth was not measured: {swept['failed']}.")
        swept_rows = sweep(sweep_sizes, device, unsloth=False)
    else:
        report.notes.append(f"unsloth {swept['version']}, in a process of its own.")
        rows, swept_rows = add_rows(rows, swept["rows"]), swept["sweep"]
        left_out += [f"{name} (unsloth)" for name in swept["left_out"]]
    if not liger:
        report.notes.append("Liger was not measured: it is not in PEERS, or there is no GPU.")
    if left_out:
        report.notes.append(f"Left out for lack of time: {'; '.join(left_out)}.")
    report.notes.append(f"Took {time.monotonic() - begun:.0f} s.")
    report.tables += [*tables(rows, on_gpu), *sweep_tables(swept_rows)]
    report.write(args.out)
    draw(rows, args.out)
    failed = [row for row in rows if "note" in row and row["name"].startswith(CUSEQ)]
    if failed:
        sys.exit(f"{len(failed)} lines of cuseq failed, see the tables")


if __name__ == "__main__":
    main()
