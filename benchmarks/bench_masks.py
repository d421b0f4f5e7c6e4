"""Benchmark masks against a fill, unsloth, transformers, BlockMask, attention-gym and xformers.

    python -m benchmarks masks [--device cpu]

Causal masks of one packed row of T tokens; additive masks hide with `-inf`. Six tables:

- Dense: bool and additive masks (bf16, on a CPU fp32), 1 to 2,000 documents, one case with a tail.
  `fill` writes as many bytes by `fill_` into a tensor of the same shape. "In a graph" is one of
  many calls in a CUDA graph; each call writes to memory of its own, and ROTATED_BYTES or more are
  written before any memory is reused. GB/s and "of fill" refer to that. "Alone" is one call timed
  by events after overwriting the L2 cache, which is the only way to time the peers, since they wait
  for the device. unsloth's cache is emptied before each call, but its host copy of the lengths is
  kept. transformers' mask is made from position ids, as its models do.
- BlockMask: everything that one call launches, for lognormal lengths and for one document.
  create_block_mask tells documents apart by an id per token, made beforehand; attention-gym makes
  that from offsets. For compiled calls, the seconds of the first call are listed separately.
- Flex attention with cuseq's BlockMask and with an eagerly made one of create_block_mask. It is
  compiled for each T and measured in turns; the forward is that of training. On a CPU it is not
  compiled and has no backward.
- LAYERS layers of varlen_attention over flex, each compiled alone, that make their masks in each
  layer or take the one that the layout holds, which is made in each pass.
- xformers' bias from host lengths, compared with `BlockDiagonalCausalMask.from_seqlens`.
- Kernels, copies and waits of one call of each, as the profiler counts them.

Host time of cuseq is measured for the op (or function) without any lookup; for the first call on a
new layout; and for a hit, the same layout again. "Same" tells whether a peer's mask equals cuseq's
on real tokens; on the tail they differ by design.

The peers' packages come from the folder in PEERS (default .peers; peers.txt says how to fill it). A
missing package is reported and left out. A step that might end after LIMIT_S (CPU_LIMIT_S) is not
started.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import timer
import torch
from report import Report, Table, arguments, draw_bars, environment
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from workload import import_peer, lognormal_lengths, peers_folder

import cuseq

Tensor = torch.Tensor
Row = dict[str, Any]

MEAN_LENGTH = 350
DOCUMENTS = (1, 16, 254, 2000)
TAIL = 100
PEER_TOKENS = (4096, 8192)
# Host time does not grow with the row, and long rows would only make the host wait.
HOST_TOKENS = 8192
BLOCK_TOKENS = [8192, 32_768, 131_072]
FLEX_HEADS = (16, 8, 128)
LAYERS = 8
# Several times the L2 cache of any GPU.
ROTATED_BYTES = 2**28

# Time limit of the whole program in seconds, and the part reserved for the profiler at the end.
LIMIT_S = 150
PROFILE_S = 12
CPU_LIMIT_S = 30

CUSEQ, FILL, UNSLOTH, TRANSFORMERS = "cuseq", "fill", "unsloth", "transformers"
EAGER, COMPILED, GYM = "create_block_mask", "create_block_mask, compiled", "attention-gym"
XFORMERS = "xformers"


@dataclass(frozen=True)
class Pack:
    """One packed row on a device; tokens beyond the lengths are the tail."""

    lengths: tuple[int, ...]
    tokens: int
    device: torch.device

    @staticmethod
    def lognormal(tokens: int, device: torch.device) -> Pack:
        return Pack(tuple(lognormal_lengths(tokens, MEAN_LENGTH, seed=0)), tokens, device)

    @property
    def real_tokens(self) -> int:
        return sum(self.lengths)

    def layout(self) -> cuseq.PackedLayout:
        """Return a new layout, of which nothing is cached."""
        return cuseq.PackedLayout.from_lengths(self.lengths, self.tokens).to(self.device)

    def device_lengths(self) -> Tensor:
        """Return the lengths, int32 `[n_seqs]`."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)


class Steps:
    """Runs the steps that there is time for, and records why the others are missing."""

    def __init__(self, begun: float, device: torch.device):
        self.notes: list[str] = []
        self._begun = begun
        self._device = device
        on_gpu = device.type == "cuda"
        self._end, self._kept = (LIMIT_S, PROFILE_S) if on_gpu else (CPU_LIMIT_S, 0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def run(
        self, name: str, needs_s: float, step: Callable[[], list[Row]], *, last: bool = False
    ) -> list[Row]:
        """Return the step's rows.

        Args:
            name: name of the step in the notes.
            needs_s: the most seconds it may take.
            step: makes the rows.
            last: whether it may use the time reserved for the end.
        """
        if self.seconds + needs_s + (0 if last else self._kept) > self._end:
            self.notes.append(f"Left out for lack of time: {name}.")
            return []
        before = self.seconds
        try:
            rows = step()
        except Exception as failure:
            self.notes.append(f"Not measured: {name}: {reason(failure)}.")
            rows = []
        print(f"{name} ({self.seconds - before:.1f} s)", flush=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return rows


def reason(failure: Exception) -> str:
    """Return the first line of an error."""
    return (str(failure).splitlines() or [""])[0][:200] or type(failure).__name__


@contextmanager
def noting(row: Row) -> Iterator[None]:
    """Write the reason into the row if its measurement fails."""
    try:
        yield
    except Exception as failure:
        row["note"] = reason(failure)


@functools.lru_cache
def document_lengths(tokens: int, documents: int) -> tuple[int, ...]:
    """Return lengths of that many documents: lognormal, or equal if the mean is below 8."""
    if documents > 1 and tokens >= 8 * documents:
        for seed in range(2000):
            found = lognormal_lengths(tokens, tokens / documents, seed)
            if len(found) == documents:
                return tuple(found)
    shorter, longer = divmod(tokens, documents)
    return (shorter + 1,) * longer + (shorter,) * (documents - longer)


def first_call_us(pack: Pack, call: Callable[[cuseq.PackedLayout], object], layouts: int) -> float:
    """Measure host time of the first call on a layout; each call gets a new, untimed layout."""
    held: list[cuseq.PackedLayout] = []
    unused: list[cuseq.PackedLayout] = []

    def renew() -> None:
        held[:] = [pack.layout() for _ in range(layouts)]
        unused[:] = held

    def first() -> None:
        call(unused.pop())

    return timer.host_time(
        first, device=pack.device, calls=layouts, batches=15, warmup=layouts, setup=renew
    ).median


def measure_peer(make: Callable[[], object], device: torch.device, row: Row) -> None:
    """Measure device time by events and, on a GPU, host time."""
    taken = timer.device_time(make, device=device, repeats=20, warmup=2)
    row["alone_us"] = taken.median
    if device.type == "cuda":
        # At most as many calls per batch as the device completes in about 20 ms.
        calls = max(1, min(20, int(20e3 / taken.median)))
        host = timer.host_time(make, device=device, calls=calls, batches=15, warmup=1)
        row["host_us"] = host.median


# ------------------------------------------------------------------------------------ dense masks


def short(dtype: torch.dtype) -> str:
    return {torch.bool: "bool", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def measure_dense(make: Callable[[], Tensor], size: int, device: torch.device, row: Row) -> None:
    """Measure device time of writing `size` bytes, in a graph and by events, and the bandwidth."""
    row["alone_us"] = timer.device_time(make, device=device, repeats=20).median
    taken_us = row["alone_us"]
    if device.type == "cuda":
        calls = min(200, max(4, ROTATED_BYTES // size + 1))
        # Keep what the graph's calls return, so that each call writes to memory of its own.
        kept: deque[Tensor] = deque(maxlen=calls)
        taken_us = timer.graph_time(lambda: kept.append(make()), calls=calls, repeats=15).median
        row["graph_us"] = taken_us
    row["gb_s"] = size / taken_us / 1e3


def filled(tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that fills a mask's memory with the value that hides."""
    hidden = False if dtype == torch.bool else float("-inf")
    shape = (1, 1, tokens, tokens)
    return lambda: torch.empty(shape, dtype=dtype, device=device).fill_(hidden)


def dense_rows(tokens: int, counts: tuple[int, ...], device: torch.device) -> list[Row]:
    """Return rows of the fill, cuseq and the peers, for each dtype and number of documents."""
    on_gpu = device.type == "cuda"
    cases = [(documents, 0) for documents in counts if documents <= tokens // 2]
    cases.append((min(254, cases[-1][0]), TAIL))
    rows: list[Row] = []
    for dtype in (torch.bool, torch.bfloat16 if on_gpu else torch.float32):
        base = {"tokens": tokens, "dtype": short(dtype)}
        fill: Row = {**base, "name": FILL}
        with noting(fill):
            measure_dense(filled(tokens, dtype, device), tokens**2 * dtype.itemsize, device, fill)
        rows.append(fill)
        for documents, tail in cases:
            pack = Pack(document_lengths(tokens - tail, documents), tokens, device)
            case = {**base, "documents": documents, "tail": tail}
            own: Row = {**case, "name": CUSEQ}
            with noting(own):
                measure_own_dense(pack, dtype, own)
            if "gb_s" in own and "gb_s" in fill:
                own["of_fill"] = own["gb_s"] / fill["gb_s"]
            rows.append(own)
            if tokens in PEER_TOKENS:
                rows += [{**case, **row} for row in dense_peers(pack, dtype)]
    return rows


def measure_own_dense(pack: Pack, dtype: torch.dtype, row: Row) -> None:
    """Measure one mask by the op, by a new layout and by the same layout."""
    device, layout = pack.device, pack.layout()
    offsets = layout.cu_seqlens

    def make() -> Tensor:
        return torch.ops.cuseq.dense_mask(offsets, pack.tokens, True, dtype=dtype)

    size = pack.tokens**2 * dtype.itemsize
    measure_dense(make, size, device, row)
    if pack.tokens > HOST_TOKENS:
        return
    if device.type == "cuda":
        row["host_us"] = timer.host_time(make, device=device, batches=15).median
        layouts = max(2, min(8, 2**30 // size))
        row["first_us"] = first_call_us(pack, lambda new: new.dense_mask(dtype), layouts)
    hit = timer.host_time(layout.dense_mask, dtype, device=device, calls=100, batches=15)
    row["hit_us"] = hit.median


def dense_peers(pack: Pack, dtype: torch.dtype) -> Iterator[Row]:
    """Yield rows of the peers' masks of that dtype."""
    makers = {TRANSFORMERS: by_transformers}
    # On a CPU it takes seconds for more documents.
    if dtype != torch.bool and (pack.device.type == "cuda" or len(pack.lengths) <= 16):
        makers[UNSLOTH] = by_unsloth
    seen = visible(pack.layout().dense_mask(), pack)
    for name, maker in makers.items():
        row: Row = {"name": name}
        with noting(row):
            make = maker(pack, dtype)
            mask = make()
            if mask is None:
                raise ValueError("makes none for one document: is_causal")
            row["same"] = "yes" if torch.equal(visible(mask, pack), seen) else "NO"
            del mask
            measure_peer(make, pack.device, row)
        yield row


def visible(mask: Tensor, pack: Pack) -> Tensor:
    """Return which real tokens see which."""
    mask = mask[..., : pack.real_tokens, : pack.real_tokens]
    return mask if mask.dtype == torch.bool else mask == 0


def by_transformers(pack: Pack, dtype: torch.dtype) -> Callable[[], Tensor | None]:
    """Return the function that makes transformers' mask, once per forward.

    The mask is bool for sdpa and additive for eager attention.
    """
    from transformers import Qwen3Config
    from transformers.masking_utils import create_causal_mask

    config = Qwen3Config(num_hidden_layers=1)
    config._attn_implementation = "sdpa" if dtype == torch.bool else "eager"
    # Only its shape, dtype and device are read.
    floats = torch.float32 if dtype == torch.bool else dtype
    embeds = torch.empty(1, pack.tokens, 1, dtype=floats, device=pack.device)
    ids = pack.layout().position_ids.long()[None]
    return lambda: create_causal_mask(
        config=config,
        inputs_embeds=embeds,
        attention_mask=None,
        past_key_values=None,
        position_ids=ids,
    )


@functools.lru_cache
def unsloth_packing() -> ModuleType:
    """Import unsloth's packing module alone; importing the whole package would patch torch."""
    folder = peers_folder()
    path = folder / "unsloth" / "utils" / "packing.py" if folder is not None else None
    if path is None or not path.exists():
        raise ImportError("unsloth is not in PEERS")
    spec = importlib.util.spec_from_file_location("unsloth_packing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_unsloth(pack: Pack, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return the function that makes unsloth's SDPA mask, as in the first layer of a forward."""
    packing = unsloth_packing()
    lengths = torch.tensor(pack.lengths, dtype=torch.int32)
    info = packing.get_packed_info_from_kwargs({"packed_seq_lengths": lengths}, pack.device)
    options = {"dtype": dtype, "device": pack.device, "total_tokens": pack.tokens}

    def make() -> Tensor:
        packing._SDPA_MASK_CACHE.clear()
        return packing.build_sdpa_packed_attention_mask(info, **options)

    return make


# ------------------------------------------------------------------------------------ block masks


def document_mask(ids: Tensor) -> Callable[..., Tensor]:
    """Return the mask_mod that users write, from the document id of each token, `[T]`."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids[query] == ids[key]) & (query >= key)

    return seen


def by_create_block_mask(pack: Pack, create: Callable = create_block_mask) -> Callable[[], object]:
    """Return the function that calls PyTorch's create_block_mask, eager by default."""
    mask_mod = document_mask(pack.layout().seq_ids)
    where = pack.device.type
    return lambda: create(mask_mod, 1, 1, pack.tokens, pack.tokens, device=where)


def by_attention_gym(pack: Pack) -> Callable[[], object]:
    """Return the function that makes a BlockMask from attention-gym's document mask."""
    if not import_peer("attn_gym"):
        raise ImportError("attn_gym is neither installed nor in PEERS")
    from attn_gym.masks import causal_mask, generate_doc_mask_mod

    offsets, tokens = pack.layout().cu_seqlens, pack.tokens

    def make() -> object:
        mask_mod = generate_doc_mask_mod(causal_mask, offsets)
        return create_block_mask(mask_mod, 1, 1, tokens, tokens, device=pack.device.type)

    return make


def own_block_rows(sizes: list[int], device: torch.device) -> list[Row]:
    """Return rows of cuseq's BlockMask for each T, with lognormal lengths and with one document."""
    rows = []
    for tokens in sizes:
        for pack in (Pack.lognormal(tokens, device), Pack((tokens,), tokens, device)):
            row: Row = {"tokens": tokens, "documents": len(pack.lengths), "name": CUSEQ}
            with noting(row):
                measure_own_block(pack, row)
            rows.append(row)
    return rows


def measure_own_block(pack: Pack, row: Row) -> None:
    """Measure one BlockMask by the function, by a new layout and by the same layout."""
    device, lengths, layout = pack.device, pack.device_lengths(), pack.layout()

    def make() -> BlockMask:
        return cuseq.ops.block_mask(lengths, pack.tokens)

    row["alone_us"] = timer.device_time(make, device=device).median
    if device.type == "cuda":
        row["graph_us"] = timer.graph_time(make).median
        row["host_us"] = timer.host_time(make, device=device).median
        row["first_us"] = first_call_us(pack, lambda new: new.block_mask(), 10)
    row["hit_us"] = timer.host_time(layout.block_mask, device=device, calls=100).median


def peer_block_rows(name: str, sizes: list[int], device: torch.device) -> list[Row]:
    """Return rows of a peer's BlockMask for each T, compared with cuseq's."""
    makers = {
        EAGER: by_create_block_mask,
        COMPILED: lambda pack: by_create_block_mask(pack, torch.compile(create_block_mask)),
        GYM: by_attention_gym,
    }
    rows = []
    for tokens in sizes:
        pack = Pack.lognormal(tokens, device)
        row: Row = {"tokens": tokens, "documents": len(pack.lengths), "name": name}
        with noting(row):
            make = makers[name](pack)
            begun = time.perf_counter()
            theirs = make()
            timer.synchronize(device)
            if name == COMPILED:
                row["compile_s"] = time.perf_counter() - begun
            row["same"] = "yes" if same_blocks(pack.layout().block_mask(), theirs) else "NO"
            del theirs
            measure_peer(make, device, row)
        rows.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def same_blocks(ours: BlockMask, theirs: BlockMask) -> bool:
    """Return whether both masks visit the same blocks, with equal counts of full blocks."""
    return torch.equal(ours.to_dense().bool(), theirs.to_dense().bool()) and torch.equal(
        ours.full_kv_num_blocks.long(), theirs.full_kv_num_blocks.long()
    )


# --------------------------------------------------------------------------------- flex attention


def flex_rows(tokens: int, device: torch.device) -> list[Row]:
    """Return rows of flex attention with either mask, and the difference of their results."""
    on_gpu = device.type == "cuda"
    query_heads, key_heads, dim = FLEX_HEADS if on_gpu else (4, 2, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    pack = Pack.lognormal(tokens, device)
    layout = pack.layout()
    generator = torch.Generator(device=device).manual_seed(tokens)

    def random(heads: int) -> Tensor:
        shape = (1, heads, tokens, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    leaves = [random(heads).requires_grad_(on_gpu) for heads in (query_heads, key_heads, key_heads)]
    grad = random(query_heads)
    attend = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    masks = {CUSEQ: layout.block_mask, EAGER: by_create_block_mask(pack)}
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    results: dict[str, tuple[Tensor, ...]] = {}
    rows: dict[str, Row] = {}
    for name, make in masks.items():
        row = rows[name] = {"tokens": tokens, "documents": len(pack.lengths), "name": name}
        with noting(row):
            mask = make()

            def forward(mask: BlockMask = mask) -> Tensor:
                return attend(*leaves, block_mask=mask, enable_gqa=True)

            def both(forward: Callable[[], Tensor] = forward) -> tuple[Tensor, ...]:
                out = forward()
                return out, *torch.autograd.grad(out, leaves, grad)

            begun = time.perf_counter()
            results[name] = both() if on_gpu else (forward(),)
            timer.synchronize(device)
            if on_gpu:
                row["compile_s"] = time.perf_counter() - begun
                calls[name, "both"] = both
            calls[name, "forward"] = forward
    if len(results) == 2:
        ours, theirs = ([x.detach().double() for x in results[name]] for name in masks)
        pairs = zip(ours, theirs, strict=True)
        rows[CUSEQ]["error"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    # In turns, so that clock drift affects both alike.
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    rounds, repeats = (3, 20) if on_gpu else (1, 5)
    for _ in range(rounds):
        for key, call in calls.items():
            taken = timer.device_time(call, device=device, repeats=repeats, warmup=2)
            samples[key].append(taken.median)
    for (name, part), found in samples.items():
        rows[name][f"{part}_us"] = statistics.median(found)
    for part in ("forward", "both"):
        ours, theirs = (rows[name].get(f"{part}_us") for name in masks)
        if ours and theirs:
            rows[CUSEQ][f"{part}_ratio"] = ours / theirs
    return list(rows.values())


class AttentionLayer(torch.nn.Module):
    """Attention alone, to be compiled one by one."""

    def forward(self, rows: list[Tensor], packed: cuseq.PackedLayout) -> Tensor:
        return cuseq.varlen_attention(*rows, packed, backend="flex")


def layer_rows(tokens: int, device: torch.device) -> list[Row]:
    """Return rows of layers that make their masks, and of layers that take the layout's."""
    pack = Pack.lognormal(tokens, device)
    shapes = [(tokens, heads, FLEX_HEADS[2]) for heads in (FLEX_HEADS[0], *[FLEX_HEADS[1]] * 2)]
    rows = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    layers = [AttentionLayer() for _ in range(LAYERS)]
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False)
    layouts = deque(pack.layout() for _ in range(64))

    def forward(hold: bool) -> None:
        packed = layouts[0]
        layouts.rotate(1)
        packed._derived.block_masks.clear()  # as a new pack's layout
        if hold:
            packed.block_mask(hold=True)
        for layer in layers:
            layer(rows, packed)

    found = []
    with torch.no_grad():
        for name, hold in (("made in each layer", False), ("held by the layout", True)):
            row: Row = {"tokens": tokens, "documents": len(pack.lengths), "name": name}
            call = functools.partial(forward, hold)
            with noting(row):
                call()
                row["host_us"] = timer.host_time(call, device=device, calls=10).median / LAYERS
                row["alone_us"] = timer.device_time(call, device=device).median / LAYERS
            found.append(row)
    return found


# --------------------------------------------------------------------------------------- xformers


def xformers_bias() -> type:
    """Return xformers' class; its compiled kernels are not needed."""
    if not import_peer("xformers"):
        raise ImportError("xformers is neither installed nor in PEERS")
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    return BlockDiagonalCausalMask


def xformers_rows(tokens: int, counts: tuple[int, ...], device: torch.device) -> list[Row]:
    """Return rows of the host time of making the bias, xformers' and cuseq's."""
    bias = xformers_bias()
    rows = []
    for documents in counts:
        pack = Pack(document_lengths(tokens, documents), tokens, device)
        lengths, layout = list(pack.lengths), pack.layout()
        case = {"tokens": tokens, "documents": documents}
        theirs: Row = {**case, "name": XFORMERS}
        own: Row = {**case, "name": CUSEQ}
        with noting(theirs):
            make = functools.partial(bias.from_seqlens, lengths, device=device)
            theirs["host_us"] = timer.host_time(make, device=device, batches=15).median
        with noting(own):
            first = first_call_us(pack, lambda new: new.xformers_bias(), 10)
            hit = timer.host_time(layout.xformers_bias, device=device, calls=100)
            own |= {"first_us": first, "hit_us": hit.median}
        rows += [theirs, own]
    return rows


# ---------------------------------------------------------------------------------- what they do


def count_rows(tokens: int, device: torch.device) -> list[Row]:
    """Return kernels, copies and waits of one call of each; last, as profiling slows launches."""
    pack = Pack(document_lengths(tokens, 254), tokens, device)
    lengths, offsets = pack.device_lengths(), pack.layout().cu_seqlens
    dtype = torch.bfloat16

    def from_device() -> cuseq.PackedLayout:
        return cuseq.PackedLayout.from_lengths(lengths, tokens)

    def first(
        call: Callable[[cuseq.PackedLayout], object],
        make: Callable[[], cuseq.PackedLayout] = pack.layout,
    ) -> Callable[[], object]:
        # Two calls: the first is the warm-up.
        layouts = iter([make(), make()])
        return lambda: call(next(layouts))

    def bias(layout: cuseq.PackedLayout) -> object:
        xformers_bias()
        return layout.xformers_bias()

    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "torch.ops.cuseq.dense_mask": lambda: lambda: torch.ops.cuseq.dense_mask(
            offsets, tokens, True, dtype=dtype
        ),
        "layout.dense_mask, first": lambda: first(lambda new: new.dense_mask(dtype)),
        "cuseq.ops.block_mask": lambda: lambda: cuseq.ops.block_mask(lengths, tokens),
        "layout.block_mask, first": lambda: first(lambda new: new.block_mask()),
        "layout.xformers_bias, first": lambda: first(bias),
        "layout.xformers_bias, first, device lengths": lambda: first(bias, from_device),
        UNSLOTH: lambda: by_unsloth(pack, dtype),
        f"{TRANSFORMERS}, additive": lambda: by_transformers(pack, dtype),
        EAGER: lambda: by_create_block_mask(pack),
    }
    rows = []
    for name, prepare in calls.items():
        row: Row = {"tokens": tokens, "documents": 254, "name": name}
        with noting(row):
            call = prepare()
            call()
            row |= timer.profile(call, device=device).within(timer.WHOLE).as_dict()
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------- results


def table(title: str, columns: dict[str, str], rows: list[Row]) -> Table:
    """Return a table without the columns that no row fills."""
    filled_in = {key: text for key, text in columns.items() if any(key in row for row in rows)}
    return Table(title, filled_in, rows)


def tables(
    dense: list[Row],
    blocks: list[Row],
    flex: list[Row],
    layers: list[Row],
    biases: list[Row],
    counts: list[Row],
) -> list[Table]:
    """Return all six tables."""
    case = {"tokens": "tokens", "documents": "documents"}
    host = {"host_us": "host us a call", "first_us": "layout's first", "hit_us": "hit"}
    ends = {"same": "same as cuseq's", "note": "failed"}
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in dense):
        headings = case | {
            "tail": "tail", "name": "mask", "graph_us": "us in a graph", "gb_s": "GB/s",
            "of_fill": "of fill", "alone_us": "us alone",
        } | host | ends  # fmt: skip
        some = [row for row in dense if row["dtype"] == dtype]
        found.append(table(f"Dense mask, {dtype}", headings, some))
    headings = case | {"name": "made by", "graph_us": "us in a graph", "alone_us": "us alone"}
    headings |= host | {"compile_s": "compiling, s"} | ends
    found.append(table("BlockMask", headings, blocks))
    headings = case | {
        "name": "BlockMask of", "forward_us": "forward us", "forward_ratio": "over theirs",
        "both_us": "forward + backward us", "both_ratio": "over theirs",
        "compile_s": "compiling, s", "error": "difference", "note": "failed",
    }  # fmt: skip
    found.append(table("Flex attention", headings, flex))
    headings = case | {"name": "masks", "host_us": "host us a layer", "alone_us": "us a layer"}
    headings |= {"note": "failed"}
    found.append(table("Layers compiled one by one, forward", headings, layers))
    headings = case | {"name": "bias of"} | host | {"note": "failed"}
    found.append(table("xformers' bias", headings, biases))
    headings = case | {
        "name": "call", "kernels": "kernels", "device_us": "device us", "syncs": "stream waits",
        "event_waits": "event waits", "dtoh_copies": "copies to host", "note": "failed",
    }  # fmt: skip
    found.append(table("What one call does", headings, counts))
    return [one for one in found if one.rows]


def draw(dense: list[Row], blocks: list[Row], out: Path) -> None:
    """Plot dense additive masks of 254 documents, and BlockMasks of lognormal lengths."""
    additive = [
        row for row in dense
        if row["dtype"] != "bool" and row.get("documents", 254) == 254 and not row.get("tail")
    ]  # fmt: skip
    lognormal = [row for row in blocks if row["documents"] > 1]
    for kind, title, rows in (
        ("dense", "Additive mask, 254 documents", additive),
        ("blocks", f"BlockMask, lengths of mean {MEAN_LENGTH}", lognormal),
    ):
        taken = {(row["name"], row["tokens"]): row.get("alone_us") for row in rows}
        sizes = sorted({tokens for _, tokens in taken})
        draw_bars(
            out / f"masks_{kind}.png",
            title,
            "us",
            [f"{tokens:,}" for tokens in sizes],
            {
                name: [taken.get((name, tokens)) for tokens in sizes]
                for name in dict.fromkeys(name for name, _ in taken)
                if any(taken.get((name, tokens)) for tokens in sizes)
            },
        )


def main() -> None:
    begun = time.monotonic()
    args = arguments(__doc__).parse_args()
    device = torch.device(args.device)
    report = Report("masks", environment(args.device))
    steps = Steps(begun, device)
    dense: list[Row] = []
    blocks: list[Row] = []
    flex: list[Row] = []
    layers: list[Row] = []
    biases: list[Row] = []
    counts: list[Row] = []

    def measure_denses(sizes: list[int], documents: tuple[int, ...], needs_s: float) -> None:
        for tokens in sizes:
            name = f"dense masks, {tokens:,} tokens"
            step = functools.partial(dense_rows, tokens, documents, device)
            dense.extend(steps.run(name, needs_s, step))

    def measure_peer_blocks(name: str, sizes: list[int], needs_s: float) -> None:
        for tokens in sizes:
            step = functools.partial(peer_block_rows, name, [tokens], device)
            blocks.extend(steps.run(f"{name}, {tokens:,} tokens", needs_s, step))

    def measure_flex(sizes: list[int], needs_s: float) -> None:
        for tokens in sizes:
            step = functools.partial(flex_rows, tokens, device)
            flex.extend(steps.run(f"flex attention, {tokens:,} tokens", needs_s, step))

    # The most important steps run first.
    if device.type == "cuda":
        measure_denses([8192, 4096], DOCUMENTS, 15)
        measure_denses([16_384, 32_768], DOCUMENTS, 8)
        blocks += steps.run("BlockMasks", 10, lambda: own_block_rows(BLOCK_TOKENS, device))
        measure_flex([8192], 40)
        layers += steps.run("layers", 25, lambda: layer_rows(8192, device))
        measure_peer_blocks(EAGER, BLOCK_TOKENS, 5)
        biases += steps.run("xformers", 10, lambda: xformers_rows(8192, DOCUMENTS, device))
        measure_flex([32_768], 30)
        measure_peer_blocks(COMPILED, [8192, 32_768], 25)
        measure_denses([1024], DOCUMENTS, 5)
        measure_peer_blocks(GYM, [8192], 5)
        measure_peer_blocks(COMPILED, [131_072], 12)
        counts += steps.run("profiles", PROFILE_S, lambda: count_rows(8192, device), last=True)
        if note := timer.check_profiler(device):
            report.notes.append(note)
    else:
        measure_denses([4096, 1024], (1, 16, 254), 10)
        blocks += steps.run("BlockMasks", 5, lambda: own_block_rows([1024, 4096], device))
        measure_peer_blocks(EAGER, [1024], 5)
        measure_peer_blocks(GYM, [1024], 5)
        measure_flex([512], 10)
        biases += steps.run("xformers", 5, lambda: xformers_rows(1024, (1, 16, 254), device))

    dense.sort(key=lambda row: (row["dtype"], row["tokens"]))
    blocks.sort(key=lambda row: row["tokens"])
    report.notes += [
        "Causal masks; medians of microseconds; lengths lognormal where their mean is 8 or more."
    ]
    report.notes += steps.notes
    report.notes.append(f"Took {steps.seconds:.0f} s.")
    report.tables += tables(dense, blocks, flex, layers, biases, counts)
    report.write(args.out)
    draw(dense, blocks, args.out)
    ours = [row for row in (*dense, *blocks, *flex, *biases) if row["name"] == CUSEQ] + layers
    failed = [row for row in ours if "note" in row]
    if failed:
        sys.exit(f"{len(failed)} lines of cuseq failed, see the tables")


if __name__ == "__main__":
    main()
