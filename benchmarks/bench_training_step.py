"""Benchmark a whole training step: padded, packed with transformers' mask, packed with cuseq.

    python -m benchmarks training_step [--tokens 2048 8192 32768] [--variants NAME ...]
        [--model 0.6b] [--warmup N] [--steps N] [--packs N]

On CUDA: the shape of a known model with random weights, transformers' real classes, bf16, fused
AdamW. The shape is Qwen3-0.6B's, or what `--model` names (see `MODELS`). On a CPU: a model of 4
layers in fp32. Every variant gets the same documents (lognormal lengths, mean 350) in each step, T
tokens in total:

- `padded`, `padded_sorted`: micro-batches of 8 documents, each padded to its longest, in order or
  sorted by length; one optimiser step over all of them; sdpa;
- `packed_sdpa`: one row, transformers' sdpa with the mask that it derives from `position_ids`;
- `packed_flex`: the same row with transformers' flex attention;
- `packed_flex_compiled_model`: flex attention with cuseq's `packed.block_mask()`, which is made
  outside of the compiled code and replaces transformers' search; model and loss are compiled;
- `flash_path`: the same row through transformers' flash attention path: its own functions derive
  lengths from `position_ids` in every layer, over PyTorch's flash kernel;
- `cuseq`: the same row, `attn_implementation="cuseq"` and the layout from host lengths;
- `cuseq_device_lengths`: the layout is made in the step, from lengths on the GPU;
- `cuseq_enabled`: `cuseq.enable(model)`, which also fuses q/k norm and rotation into one kernel;
- `..._compiled`: each decoder layer compiled, run over 20 different packs; `..._compiled_model`:
  the whole model with its loss;
- `..._liger`: with Liger's norm and SwiGLU, and its rotation unless cuseq's is enabled;
  `cuseq_liger_rope` has only its rotation. Liger needs a GPU and is used if the package is
  installed or in the folder that PEERS names (default .peers);
- `..._fa4`: attention over FlashAttention 4, if the package flash-attn-4 is installed; cuseq's by
  `enable(model, backend="fa4")`; `..._flash`: over PyTorch's flash kernels by `backend="flash"`.

A step is: batch to the device, forward with the model's own loss, backward, optimiser. From 32,768
tokens on, the loss is computed in parts for every variant, because the fp32 logits of a whole row
would leave no memory for the mask of `packed_sdpa`.

Each variant runs in a process of its own, so that memory, compiled code and the profiler of one do
not affect another. The processes are forks of one that has imported everything and never used a
GPU. Each variant's first step, on the initial weights, is compared with that of `packed_sdpa`; the
difference of `padded` shows what bf16 does to the same documents. Up to 2,048 tokens it is also
compared with `packed_sdpa` in fp32. From 32,768 tokens on only a few variants run unless named.
Each step trains on another pack; with --packs the steps take turns over N packs, for a peer that
chooses kernels anew for other shapes: flash-linear-attention with padded rows.
Writes `training_step_T.json`, `.md` and `.png` for each T, with `MODEL_T` for other models.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import timer
import torch
from report import Report, Table, arguments, draw_bars, environment
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from workload import QWEN3, documents, has_flash_attention_4, import_peer, lognormal_lengths

Tensor = torch.Tensor

MEAN_LENGTH = 350
MICRO_BATCH = 8
COMPILED_PACKS = 20
LONG_ROW = 32_768
SHORT_ROW = 2048
LOSS_PART = 4096
FP32_TOKENS = 2048
WORKER_LIMIT_S = 240
PHASES = ("to device", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Variant:
    """How one variant feeds the model.

    Attributes:
        name: name on the command line and in the table.
        attention: transformers' `attn_implementation`.
        batching: `padded`, `sorted` or `packed`.
        lengths: where the layout's lengths come from, `host` or `device`; None for no layout.
        enabled: by `cuseq.enable`: attention, rotation and q/k norm are cuseq's.
        block_mask: the model gets `packed.block_mask()` instead of the layout.
        liger: which parts are Liger's.
        compiled: what is compiled, `layers` or `model`; None for nothing.
        flash: the replacement of PyTorch's flash attention; None for none.
        backend: of cuseq's attention, where `enabled`.
    """

    name: str
    attention: str
    batching: str
    lengths: str | None = None
    enabled: bool = False
    block_mask: bool = False
    liger: tuple[str, ...] = ()
    compiled: str | None = None
    flash: str | None = None
    backend: str = "auto"


# On a CPU, PyTorch has no backward of flex attention and no flash attention for this path.
ATTENTION_OF_GPUS = ("flex_attention", "varlen_path")
ALL_OF_LIGER = ("rope", "rms_norm", "swiglu")
ENABLED = Variant("cuseq_enabled", "sdpa", "packed", "host", enabled=True)
# The reference comes first: the others compare their gradients with its.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("packed_sdpa", "sdpa", "packed"),
        Variant("packed_sdpa_liger", "sdpa", "packed", liger=ALL_OF_LIGER),
        Variant("padded", "sdpa", "padded"),
        Variant("padded_liger", "sdpa", "padded", liger=ALL_OF_LIGER),
        Variant("padded_sorted", "sdpa", "sorted"),
        Variant("padded_sorted_liger", "sdpa", "sorted", liger=ALL_OF_LIGER),
        Variant("packed_flex", "flex_attention", "packed"),
        Variant("packed_flex_liger", "flex_attention", "packed", liger=ALL_OF_LIGER),
        Variant("flash_path", "varlen_path", "packed"),
        Variant("flash_path_liger", "varlen_path", "packed", liger=ALL_OF_LIGER),
        Variant("cuseq", "cuseq", "packed", "host"),
        Variant("cuseq_device_lengths", "cuseq", "packed", "device"),
        Variant("cuseq_liger_rope", "cuseq", "packed", "host", liger=("rope",)),
        ENABLED,
        replace(ENABLED, name="cuseq_enabled_liger", liger=("rms_norm", "swiglu")),
        Variant("packed_sdpa_compiled", "sdpa", "packed", compiled="layers"),
        Variant("packed_flex_compiled", "flex_attention", "packed", compiled="layers"),
        Variant(
            "packed_flex_compiled_model",
            "flex_attention",
            "packed",
            "host",
            block_mask=True,
            compiled="model",
        ),
        Variant("cuseq_compiled", "cuseq", "packed", "host", compiled="layers"),
        replace(ENABLED, name="cuseq_enabled_compiled", compiled="layers"),
        replace(ENABLED, name="cuseq_enabled_compiled_model", compiled="model"),
        Variant("flash_path_liger_fa4", "varlen_path", "packed", liger=ALL_OF_LIGER, flash="FA4"),
        replace(ENABLED, name="cuseq_enabled_compiled_fa4", compiled="layers", backend="fa4"),
        replace(ENABLED, name="cuseq_enabled_compiled_model_fa4", compiled="model", backend="fa4"),
        replace(ENABLED, name="cuseq_enabled_compiled_flash", compiled="layers", backend="flash"),
        replace(
            ENABLED, name="cuseq_enabled_compiled_model_flash", compiled="model", backend="flash"
        ),
    )
}
REFERENCE = "packed_sdpa"
LONG_VARIANTS = [
    "packed_sdpa",
    "padded_sorted",
    "flash_path_liger",
    "cuseq_enabled",
    "cuseq_enabled_liger",
    "cuseq_enabled_compiled",
]


@dataclass(frozen=True)
class Model:
    """A shape on CUDA, and how it is trained.

    Attributes:
        config: name of transformers' configuration class.
        shape: its arguments.
        describe: description for the report.
        lora: train adapters of all projections, with checkpointing of every layer.
        liger: Liger's function that patches the model; None to not use Liger.
        steps: warm-up and timed steps; None for the default.
    """

    config: str
    shape: dict[str, Any]
    describe: str
    lora: bool = False
    liger: str | None = None
    steps: tuple[int, int] | None = None


MODELS = {
    "0.6b": Model(
        "Qwen3Config",
        QWEN3["0.6b"] | {"max_position_embeddings": 40_960},
        "Qwen3-0.6B's shape, full fine-tuning",
        liger="apply_liger_kernel_to_qwen3",
    ),
    "14b": Model(
        "Qwen3Config",
        QWEN3["14b"] | {"max_position_embeddings": 40_960},
        "Qwen3-14B's shape, LoRA of rank 16, every layer checkpointed",
        lora=True,
        liger="apply_liger_kernel_to_qwen3",
        steps=(1, 3),
    ),
    "moe": Model(
        "Qwen3MoeConfig",
        dict(
            vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=8,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=True,
            max_position_embeddings=40_960,
        ),
        "Qwen3-30B-A3B's shape with 8 of its 48 layers, full fine-tuning",
    ),
    "sliding": Model(
        "Gemma3TextConfig",
        dict(
            vocab_size=262_144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
            num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
            query_pre_attn_scalar=256, tie_word_embeddings=True, max_position_embeddings=32_768,
        ),
        "Gemma 3 1B's shape (windows of 512 tokens in five of six layers), full fine-tuning",
    ),
    "gemma4": Model(
        "Gemma4TextConfig",
        dict(
            vocab_size=262_144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512,
            hidden_size_per_layer_input=0, tie_word_embeddings=True,
            max_position_embeddings=32_768,
        ),
        "Gemma 4's text shape without embeddings per layer (head_dim 256 and windows of 512 tokens "
        "in five of six layers, head_dim 512 in the others), full fine-tuning",
    ),
    "mla": Model(
        "DeepseekV3Config",
        dict(
            vocab_size=32_768, hidden_size=7168, intermediate_size=18_432, num_hidden_layers=4,
            first_k_dense_replace=4, num_attention_heads=128, num_key_value_heads=128,
            q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, max_position_embeddings=32_768,
        ),
        "four dense layers of DeepSeek V3's shape (128 heads, head_dim 192 for keys and 128 for "
        "values), full fine-tuning",
    ),
    "hybrid": Model(
        "Qwen3_5TextConfig",
        dict(
            vocab_size=248_320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
            num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
            linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            linear_conv_kernel_dim=4, tie_word_embeddings=True,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
            max_position_embeddings=32_768,
        ),
        "Qwen3.5-0.8B's shape (gated delta nets in three of four layers), full fine-tuning; the "
        "recurrence is flash-linear-attention's for every variant, if it can be imported. Only "
        "cuseq_enabled stops states at the ends of documents: of the others packed_sdpa and "
        "flash_path leak, so their losses are not comparable",
    ),
}  # fmt: skip
OTHER_MODELS_VARIANTS = [
    "packed_sdpa",
    "flash_path",
    "flash_path_liger",
    "cuseq_enabled",
    "cuseq_enabled_liger",
]


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward.

    Attributes:
        inputs: arguments of the model, on the host.
        share: the micro-batch's share of the step's targets.
        block_mask: whether a mask is made from the layout once it is on the device.
    """

    inputs: dict[str, Any]
    share: float
    block_mask: bool = False


class StepClock:
    """Times the phases of steps on the device; waits only when the times are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of a step, and label it for the profiler."""
        start = self._now()
        with torch.profiler.record_function(name):
            yield
        self._marks.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Return each phase's time, and the whole step's as `step`. Waits for the device."""
        timer.synchronize(self._device)
        total = dict.fromkeys(PHASES, 0.0)
        for name, start, end in self._marks:
            total[name] += self._between(start, end)
        total["step"] = self._between(self._marks[0][1], self._marks[-1][2])
        return total

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return (end - start) * 1e3
        return start.elapsed_time(end)


def build_model(variant: Variant, name: str, device: torch.device) -> torch.nn.Module:
    """Build the model, with equal random weights for every variant."""
    import transformers

    shape = MODELS[name]
    config = getattr(transformers, shape.config)(**shape.shape)
    if device.type != "cuda":
        small = dict(
            vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        )  # fmt: skip
        config = transformers.Qwen3Config(**small, tie_word_embeddings=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=variant.attention
        )
    if shape.lora:
        model = add_adapters(model)
    return model.train()


def add_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Add LoRA and checkpointing. Both matrices are random, so that both get gradients at once."""
    import peft

    model.gradient_checkpointing_enable({"use_reentrant": False})
    options = peft.LoraConfig(
        r=16, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, options, autocast_adapter_dtype=False)


def decoder(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without its head and adapters."""
    return getattr(model, "get_base_model", lambda: model)().model


def flash_path(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_ids: Tensor,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of a packed row as transformers' flash path does.

    It tests whether the row is packed, derives lengths, and passes the longest as an int: three
    waits in every layer. Over FlashAttention 4 it calls that package's function, since PyTorch's
    has no backward there.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers import modeling_flash_attention_utils as flash

    states = [rows.transpose(1, 2) for rows in (query, key, value)]
    if not flash._is_packed_sequence(position_ids, batch_size=len(query)):
        raise ValueError("the row of this benchmark is packed")
    *rows, offsets, longest = flash._prepare_from_posids(*states, position_ids)
    longest = [int(length) for length in longest]
    if current_flash_attention_impl() == "FA4":
        from flash_attn.cute import flash_attn_varlen_func

        out, _ = flash_attn_varlen_func(
            *rows, *offsets, *longest, softmax_scale=scaling, causal=True
        )
        return out.unsqueeze(0), None
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(*rows, *offsets, *longest, scale=scaling, window_size=window)
    return out.unsqueeze(0), None


def register_flash_path() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("varlen_path", flash_path)
    AttentionMaskInterface.register("varlen_path", flash_attention_mask)


def apply_liger(parts: tuple[str, ...], patch: str) -> None:
    """Patch the model classes with Liger; called before the model is built."""
    import_peer("liger_kernel")
    import liger_kernel.transformers

    chosen = {part: part in parts for part in ALL_OF_LIGER}
    apply = getattr(liger_kernel.transformers, patch)
    apply(cross_entropy=False, fused_linear_cross_entropy=False, **chosen)


def compile_parts(model: torch.nn.Module, what: str, tokens: int, fullgraph: bool = True) -> None:
    """Compile layers or the model; long rows call the decoder, whose loss is computed in parts."""
    parts = [model if tokens < LONG_ROW else decoder(model)]
    if what == "layers":
        parts = list(decoder(model).layers)
    for part in parts:
        part.compile(fullgraph=fullgraph, dynamic=False)


def packed_batch(
    variant: Variant, docs: list[list[int]], tokens: int, max_seqs: int | None = None
) -> list[MicroBatch]:
    """Return one row of all documents, which fill it exactly; `max_seqs` is its layout's room."""
    import cuseq

    row = cuseq.PackingCollator(total_tokens=tokens, max_seqs=max_seqs)(
        [{"input_ids": doc} for doc in docs]
    )
    if variant.lengths != "host":
        del row["packed"]
    if variant.lengths == "device":
        row["lengths"] = torch.tensor([len(doc) for doc in docs], dtype=torch.int32)
    return [MicroBatch(row, 1.0, variant.block_mask)]


def padded_batches(variant: Variant, docs: list[list[int]]) -> list[MicroBatch]:
    """Return micro-batches padded on the right, with a 2-D mask and label -100 on padding."""
    if variant.batching == "sorted":
        docs = sorted(docs, key=len)
    targets = sum(len(doc) - 1 for doc in docs)
    batches = []
    for first in range(0, len(docs), MICRO_BATCH):
        some = docs[first : first + MICRO_BATCH]
        shape = (len(some), max(map(len, some)))
        ids = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for i, doc in enumerate(some):
            ids[i, : len(doc)] = torch.tensor(doc)
            mask[i, : len(doc)] = 1
        labels = ids.masked_fill(mask == 0, -100)
        share = sum(len(doc) - 1 for doc in some) / targets
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batches.append(MicroBatch(inputs, share))
    return batches


def prepare(
    variant: Variant, tokens: int, seed: int, vocab_size: int, pin: bool
) -> list[MicroBatch]:
    """Return what a data loader would pass to the step, pinned if there is a GPU."""
    docs = documents(lognormal_lengths(tokens, MEAN_LENGTH, seed), vocab_size, seed)
    if variant.batching == "packed":
        batches = packed_batch(variant, docs, tokens)
    else:
        batches = padded_batches(variant, docs)
    if not pin:
        return batches
    return [
        replace(batch, inputs={name: x.pin_memory() for name, x in batch.inputs.items()})
        for batch in batches
    ]


def to_device(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Copy asynchronously; make layouts of device lengths, and masks of layouts, only here."""
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
    if batch.block_mask:
        moved["attention_mask"] = moved.pop("packed").block_mask()
    if "lengths" in moved:
        import cuseq

        total = moved["input_ids"].size(1)
        moved["packed"] = cuseq.PackedLayout.from_lengths(moved.pop("lengths"), total)
    return moved


class LossInParts(torch.autograd.Function):
    """Cross entropy whose forward computes the gradients part by part; nothing runs twice."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        targets = (labels != -100).sum()
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(labels), LOSS_PART):
            part = slice(start, start + LOSS_PART)
            leaves = [x.detach().requires_grad_() for x in (hidden[part], weight)]
            with torch.enable_grad():
                logits = torch.nn.functional.linear(*leaves).float()
                loss = torch.nn.functional.cross_entropy(logits, labels[part], reduction="sum")
                loss = loss / targets
            grad_hidden[part], grad_part = torch.autograd.grad(loss, leaves)
            grad_weight += grad_part
            total += loss.detach()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


def loss_of(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the model's own loss, or for long rows the same loss from parts of the logits."""
    if inputs["input_ids"].numel() < LONG_ROW:
        return model(**inputs, use_cache=False).loss
    labels = inputs.pop("labels")[:, 1:].flatten()
    hidden = decoder(model)(**inputs, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    return LossInParts.apply(hidden, model.lm_head.weight, labels)


def forward_backward(
    model: torch.nn.Module, batches: list[MicroBatch], device: torch.device, clock: StepClock
) -> Tensor:
    """Accumulate the gradients of one step; return its loss, still on the device."""
    total = torch.zeros((), device=device)
    for batch in batches:
        with clock.phase("to device"):
            inputs = to_device(batch, device)
        with clock.phase("forward"):
            # Without a cache: only then does transformers look for packed rows.
            loss = loss_of(model, inputs) * batch.share
        with clock.phase("backward"):
            loss.backward()
        total += loss.detach()
    return total


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[MicroBatch],
    device: torch.device,
) -> StepClock:
    """Run one whole step."""
    clock = StepClock(device)
    forward_backward(model, batches, device, clock)
    with clock.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return clock


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def compare_gradients(model: torch.nn.Module, reference: Path) -> float:
    """Return the relative L2 distance of all gradients from the saved ones."""
    saved = torch.load(reference, mmap=True, weights_only=True)
    apart = norm = 0.0
    for parameter, expected in zip(trained(model), saved, strict=True):
        expected = expected.to(parameter.device).float()
        apart += (parameter.grad.float() - expected).square().sum(dtype=torch.float64).item()
        norm += expected.square().sum(dtype=torch.float64).item()
    return (apart / norm) ** 0.5


def save_gradients(model: torch.nn.Module, path: Path) -> None:
    """Save the gradients for the other variants' processes."""
    torch.save([parameter.grad.cpu() for parameter in trained(model)], path)


def save_fp32_gradients(
    model: torch.nn.Module, batches: list[MicroBatch], device: torch.device, path: Path
) -> None:
    """Run the same step in fp32 and save its gradients; writes no file if memory is too small."""
    exact = copy.deepcopy(model).float()
    exact.zero_grad(set_to_none=True)
    try:
        forward_backward(exact, batches, device, StepClock(device))
        save_gradients(exact, path)
    except torch.OutOfMemoryError:
        print("fp32 gradients: out of memory, left out", flush=True)


def compare_first_step(
    variant: Variant,
    model: torch.nn.Module,
    batches: list[MicroBatch],
    device: torch.device,
    scratch: Path,
) -> dict[str, Any]:
    """Compare loss and gradients of the initial weights with the reference, or save them as it."""
    begun = time.perf_counter()
    loss = forward_backward(model, batches, device, StepClock(device)).item()
    found: dict[str, Any] = {"loss": loss, "first_s": time.perf_counter() - begun}
    same, exact = scratch / "gradients.pt", scratch / "gradients_fp32.pt"
    tokens = sum(batch.inputs["input_ids"].numel() for batch in batches)
    if variant.name == REFERENCE:
        save_gradients(model, same)
        if device.type == "cuda" and tokens <= FP32_TOKENS and not hasattr(model, "peft_config"):
            save_fp32_gradients(model, batches, device, exact)
            torch.cuda.empty_cache()
    elif same.exists():
        found["gradient_error"] = compare_gradients(model, same)
    if exact.exists():
        found["fp32_error"] = compare_gradients(model, exact)
    return found


def measure(
    variant: Variant,
    name: str,
    tokens: int,
    device: torch.device,
    plan: tuple[int, int, int | None],
    scratch: Path,
) -> dict[str, Any]:
    """Measure one variant; return its row of the table."""
    from torch._dynamo.utils import counters

    import cuseq
    from cuseq.integrations.transformers import register

    warmup, steps, distinct = plan
    on_gpu = device.type == "cuda"
    # transformers checks for a package if the name contains flash
    if variant.attention == "varlen_path":
        register_flash_path()
    if variant.liger:
        apply_liger(variant.liger, MODELS[name].liger)
    if variant.attention == "cuseq":
        register()
    model = build_model(variant, name, device)
    if variant.enabled:
        cuseq.enable(model, backend=variant.backend)
    packs = 1 + warmup + steps + int(on_gpu)
    if variant.compiled:
        packs = max(packs, COMPILED_PACKS)
    distinct = min(distinct or packs, packs)
    made = [
        prepare(variant, tokens, seed, model.config.vocab_size, on_gpu) for seed in range(distinct)
    ]
    prepared = itertools.islice(itertools.cycle(made), packs)
    if variant.compiled:
        compile_parts(model, variant.compiled, tokens)

    row: dict[str, Any] = {"variant": variant.name, "tokens": tokens}
    row |= compare_first_step(variant, model, next(prepared), device, scratch)
    compiled_at_first = counters["frames"]["ok"]

    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-5, fused=True)
    for _ in range(warmup):
        train_step(model, optimizer, next(prepared), device)
    timer.synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    clocks = [train_step(model, optimizer, next(prepared), device) for _ in range(steps)]
    timer.synchronize(device)
    row["wall_ms"] = (time.perf_counter() - begun) * 1e3 / steps
    times = [clock.milliseconds() for clock in clocks]
    for phase in (*PHASES, "step"):
        row[phase] = median(step[phase] for step in times)
    row["step_low"] = min(step["step"] for step in times)
    row["step_high"] = max(step["step"] for step in times)
    row["tokens_per_s"] = tokens / row["step"] * 1e3
    if on_gpu:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row |= count_waits(model, optimizer, next(prepared), device)
    for batches in prepared:
        train_step(model, optimizer, batches, device)
    timer.synchronize(device)
    if variant.compiled:
        row["packs"] = distinct
        row["graphs"] = counters["stats"]["unique_graphs"]
        row["recompiles"] = counters["frames"]["ok"] - compiled_at_first
    return row


def count_waits(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[MicroBatch],
    device: torch.device,
) -> dict[str, Any]:
    """Return the profiler's counts of one step: each phase, and forward and backward together."""
    note = timer.check_profiler(device)
    trace = timer.profile(lambda: train_step(model, optimizer, batches, device), device=device)
    both = trace.within("forward", "backward")
    counted: dict[str, Any] = {
        "stream_waits": both.syncs,
        "event_waits": both.event_waits,
        "dtoh_copies": both.dtoh_copies,
        "kernels": both.kernels,
        "activity": {phase: trace.within(phase).as_dict() for phase in PHASES},
    }
    if note:
        counted["profiler"] = note
    return counted


def work(name: str, tokens: int, args: argparse.Namespace, scratch: Path) -> None:
    """Run in a worker process: measure one variant and write its row as JSON."""
    variant = VARIANTS[name]
    try:
        device = torch.device(args.device)
        if variant.flash:
            activate_flash_attention_impl(variant.flash)
        row = measure(variant, args.model, tokens, device, plan(tokens, args), scratch)
    except torch.OutOfMemoryError:
        row = {"variant": variant.name, "tokens": tokens, "failed": "out of memory"}
    except Exception as failure:
        traceback.print_exc()
        first_line = (str(failure).splitlines() or [type(failure).__name__])[0]
        row = {"variant": variant.name, "tokens": tokens, "failed": first_line}
    (scratch / "row.json").write_text(json.dumps(row), encoding="utf-8")


def needs_fa4(variant: Variant) -> bool:
    """Return whether a variant runs only where flash-attn-4 is installed."""
    return variant.flash == "FA4" or variant.backend == "fa4"


def plan(tokens: int, args: argparse.Namespace) -> tuple[int, int, int | None]:
    """Return warm-up steps, timed steps and packs: fewer if they are slow, or as given."""
    # Short rows run as fast as the host launches them, which varies.
    default = MODELS[args.model].steps or (3, 8 if tokens > SHORT_ROW else 16)
    if tokens >= LONG_ROW or args.device == "cpu":
        default = (2, 4)
    return (
        default[0] if args.warmup is None else args.warmup,
        default[1] if args.steps is None else args.steps,
        args.packs,
    )


def process_maker() -> Any:
    """Return a maker of processes that have imported everything. Forking needs unused CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    maker = multiprocessing.get_context("forkserver")
    models = ["qwen3.modeling_qwen3", "qwen3_moe.modeling_qwen3_moe", "gemma3.modeling_gemma3"]
    models += ["gemma4.modeling_gemma4", "deepseek_v3.modeling_deepseek_v3"]
    maker.set_forkserver_preload(
        ["__main__", "peft", "cuseq.integrations.transformers"]
        + [f"transformers.models.{model}" for model in models]
    )
    return maker


def run_worker(
    maker: Any, name: str, tokens: int, args: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Measure one variant in a process of its own; if the process dies, return a failed row."""
    row_file = scratch / "row.json"
    row_file.unlink(missing_ok=True)
    begun = time.perf_counter()
    process = maker.Process(target=work, args=(name, tokens, args, scratch))
    process.start()
    failed = None
    try:
        process.join(WORKER_LIMIT_S)
    finally:
        late = process.is_alive()
        process.kill()
    if late:
        failed = f"not done after {WORKER_LIMIT_S} s"
    elif process.exitcode:
        failed = f"the process ended with {process.exitcode}"
    row: dict[str, Any] = {"variant": name, "tokens": tokens, "failed": failed}
    if row_file.exists():
        row = json.loads(row_file.read_text(encoding="utf-8"))
    took = time.perf_counter() - begun
    state = row.get("failed") or f"{row['step']:.1f} ms a step"
    print(f"{tokens:,} tokens, {name}: {state} ({took:.0f} s)", flush=True)
    return row


def add_comparisons(rows: list[dict[str, Any]]) -> None:
    """Add speed and loss relative to the reference."""
    reference = next((row for row in rows if row["variant"] == REFERENCE), {})
    for row in rows:
        if "step" in row and "step" in reference:
            row["speedup"] = reference["step"] / row["step"]
        if "loss" in row and "loss" in reference:
            row["loss_error"] = abs(row["loss"] - reference["loss"]) / abs(reference["loss"])


def report_size(tokens: int, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the report of one row length."""
    on_gpu = args.device == "cuda"
    add_comparisons(rows)
    size = tokens if args.model == "0.6b" else f"{args.model}_{tokens}"
    report = Report(f"training_step_{size}", environment(args.device))
    lengths = lognormal_lengths(tokens, MEAN_LENGTH, seed=0)
    if on_gpu:
        report.notes.append(f"{MODELS[args.model].describe}, bf16, random weights.")
    report.notes.append(
        f"{tokens:,} real tokens a step, about {len(lengths)} documents (first pack: longest "
        f"{max(lengths):,}); medians over {plan(tokens, args)[1]} steps."
    )
    report.notes += sorted({row["profiler"] for row in rows if "profiler" in row})
    headings = {"variant": "variant", "step": "step ms", "step_low": "least", "step_high": "most"}
    headings |= {phase: f"{phase} ms" for phase in PHASES[1:]}
    headings |= {"tokens_per_s": "tokens/s", "speedup": "times packed_sdpa"}
    if on_gpu:
        headings |= {
            "peak_gib": "peak GiB",
            "stream_waits": "stream waits",
            "event_waits": "event waits",
            "dtoh_copies": "copies to host",
            "kernels": "kernels",
        }
    if any("graphs" in row for row in rows):
        headings |= {"packs": "packs", "graphs": "graphs", "recompiles": "recompiles"}
        headings["first_s"] = "first step s"
    if any("failed" in row for row in rows):
        headings["failed"] = "failed"
    what = "Training step; waits, copies and kernels of forward and backward"
    report.tables.append(Table(what if on_gpu else "Training step", headings, rows))
    headings = {
        "variant": "variant",
        "loss": "loss",
        "loss_error": "loss, relative",
        "gradient_error": "gradients, relative L2",
    }
    if any("fp32_error" in row for row in rows):
        headings["fp32_error"] = "gradients against fp32"
    report.tables.append(Table("First step against packed_sdpa", headings, rows))
    sites = [
        {"variant": row["variant"], "phase": phase, "site": site, "count": count}
        for row in rows
        for phase, activity in row.get("activity", {}).items()
        for site, count in activity["sites"].items()
    ]
    if sites:
        headings = {"variant": "variant", "phase": "phase", "site": "wait", "count": "count"}
        report.tables.append(Table("Where a step waits", headings, sites))
    report.write(args.out)
    shown = (*PHASES[1:], "step")
    draw_bars(
        args.out / f"{report.name}.png",
        f"Training step, {tokens:,} tokens",
        "ms",
        list(shown),
        {row["variant"]: [row.get(phase) for phase in shown] for row in rows},
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="default depends on the device")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--model", choices=MODELS, default="0.6b", help="the shape on CUDA")
    parser.add_argument("--warmup", type=int, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, help="timed steps")
    parser.add_argument("--packs", type=int, help="different packs; default one for each step")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped, failed = False, []
    # Liger's kernels are Triton's, which do not run on a CPU.
    liger = on_gpu and MODELS[args.model].liger and import_peer("liger_kernel")
    maker = process_maker()
    for tokens in args.tokens or ([2048, 8192, LONG_ROW] if on_gpu else [2048, 4096]):
        names = args.variants
        if names is None:
            names = LONG_VARIANTS if tokens >= LONG_ROW else list(VARIANTS)
            if args.model != "0.6b":
                names = OTHER_MODELS_VARIANTS
            if not on_gpu:
                names = [
                    name
                    for name in names
                    if not VARIANTS[name].compiled
                    and VARIANTS[name].attention not in ATTENTION_OF_GPUS
                ]
            if not liger:
                names = [name for name in names if not VARIANTS[name].liger]
            if not (on_gpu and has_flash_attention_4()):
                names = [name for name in names if not needs_fa4(VARIANTS[name])]
        with tempfile.TemporaryDirectory() as scratch:
            # The reference first, whatever the order on the command line.
            order = sorted(names, key=list(VARIANTS).index)
            rows = []
            with suppress(KeyboardInterrupt):  # an interrupted run still reports its results so far
                for name in order:
                    rows.append(run_worker(maker, name, tokens, args, Path(scratch)))
        report_size(tokens, rows, args)
        stopped = len(rows) < len(order)
        if stopped:
            break
        failed += [row for row in rows if row.get("failed") not in (None, "out of memory")]
    if failed or stopped:
        sys.exit("stopped early" if stopped else f"{len(failed)} variants failed, see the tables")


if __name__ == "__main__":
    main()
