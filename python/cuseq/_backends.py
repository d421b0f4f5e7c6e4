"""Python's part in the choice of an attention backend.

The choice itself is C++ (`csrc/attention/choice.cpp`) and is made when the op runs. Python loads
the measurements that it follows and the packages whose kernels are launched from Python, both at
the first call on a GPU. The one backend that C++ cannot run is flex, which becomes a part of
compiled code: Python decides whether to use it, before the op runs.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C, _fa3, _fa4, _packages
from cuseq._attention_table import BACKENDS, COMMAND, Facts, Times, read_own_table, read_table
from cuseq._modes import is_capturing
from cuseq.layout import PackedLayout, StaticLayout

PACKAGES = {"fa4": _fa4.register, "fa3": _fa3.register}

_WIDEST_FLASH = 256  # head_dim
_WIDEST_FLEX = 512
# Bytes of shared memory that a block can have. Triton supports sm_80 and newer (its README), where
# it is 99 KiB (sm_86, 89, 120) or more (163 on sm_80, 227 on sm_90 and 100: CUDA C++ Programming
# Guide, "Compute Capabilities"); older GPUs have 96 KiB at most.
_LEAST_FLEX_MEMORY = 99 * 1024
# The tiles for wide heads were tried on an H200, which has 227 KiB.
_WIDE_FLEX_MEMORY = 224 * 1024
# Below this many tokens flex is not chosen: compiling it takes longer than it ever saves.
LEAST_TOKENS_FOR_FLEX = 512
# How far flex must be ahead where another backend has one kernel too: layers that are compiled one
# by one each make the block mask again, and their kernels take longer to compile.
_HANDICAP = 1.05
_POWERS = tuple(2**power for power in range(6, 21))
_SHORT_DOCUMENT = 256  # tokens; rows of compiled code are judged from one document to these

registered: set[str] = set()  # the packages that are there
_ignored = ""
_loaded = False


class Question(NamedTuple):
    """What a call asks of attention, as far as the choice depends on it."""

    causal: bool
    window: int | None
    spans: Any
    softcap: float | None
    backend: str


def check_backend(backend: object) -> None:
    """Raise ValueError unless `backend` is a name of a backend or "auto"."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in BACKENDS)
        raise ValueError(f"backend must be one of {names}, got {backend!r}")


def check_installed(backend: object) -> None:
    """Raise ValueError unless `backend` is a name and, if a package, is installed."""
    check_backend(backend)
    if backend in PACKAGES:
        if not torch.cuda.is_available():
            raise ValueError(
                f'backend="{backend}" runs on CUDA, and torch finds no GPU: choose "auto", which '
                "takes what runs"
            )
        load_backends()
        if backend not in registered:
            raise ValueError(f'backend="{backend}" cannot be used: {_C.missing_attention(backend)}')


def load_backends() -> None:
    """Load the measurements and the installed packages, once per process.

    In code that torch.compile traces, load during tracing, before the compiled code runs.
    """
    if is_compiling():
        from cuseq._compile_time import load_now  # imports torch._dynamo, which is there by now

        load_now()
    elif not _loaded:
        load()


def load() -> None:
    """Load the measurements and packages, unless they are loaded.

    Raises:
        ValueError: the user's own table is not one; see `_attention_table.read_own_table`.
    """
    global _loaded, _ignored
    if not _loaded and torch.cuda.is_available():  # tensors may be fakes of a GPU elsewhere
        own = read_own_table()
        _loaded = True
        _ignored = own.ignored
        _C.set_measured_attention([row for row in measurements(own.rows) if row[1]])
        capability = torch.cuda.get_device_capability()
        for name, register in PACKAGES.items():
            why = register(capability)
            _C.set_missing_attention(name, why)
            if not why:
                registered.add(name)
        if own.ignored and not own.rows:
            warnings.warn(f"cuseq: {own.ignored}. To measure here: {COMMAND}", stacklevel=2)


def ignored_rows() -> str:
    """Return which rows of the user's own table are not used and why; empty if all are."""
    return _ignored


def measurements(own: dict[Facts, Times]) -> list[tuple[Facts, Times]]:
    """Return the rows that auto follows: the package's, with the user's own in their place."""
    return list((dict(read_table()) | own).items())


# ------------------------------------------------------------------------------------------- flex


def takes_flex(q: Tensor, v: Tensor, packed: PackedLayout, asked: Question) -> bool:
    """Return whether flex attention runs the call.

    Raises:
        ValueError: `asked.backend` is "flex", which cannot take the call.
    """
    if asked.backend == "flex":
        obstacle = _flex_obstacle(q, v)
        if obstacle:
            raise ValueError(
                f'backend="flex" cannot take this call: {obstacle}; backend="auto" chooses one '
                "that can"
            )
        return q.shape[0] > 0
    if asked.backend != "auto":
        return False
    if not computes_in_half(q) or _flex_obstacle(q, v):
        return False
    mask = _mask_run_one_by_one(asked)
    if packed.is_tree and mask is None:
        return False  # a tree's calls run on the other backends
    if packed.is_replayed and mask is None:
        return _replays_take_flex(q, v, packed, asked)
    if is_compiling():
        return mask is not None or _compiled_code_takes_flex(q, v, asked)
    if q.shape[0] < LEAST_TOKENS_FOR_FLEX:
        return False
    if packed.is_replayed or is_capturing(q.device):
        return mask is not None  # the capture cannot copy the offsets that segments need
    facts = _eager_facts(q, v, packed, asked)
    if facts[2] in ("causal", "full", "window") and not is_wide(q, v):
        return False
    # Not measured, a soft cap runs faster in one kernel than as five passes over the scores, and
    # spans than sequence by sequence.
    unknown = mask == "softcap" or (mask == "spans" and not is_wide(q, v))
    return _flex_was_fastest(facts, device=q.device, unknown=unknown)


def _eager_facts(
    q: Tensor, v: Tensor, packed: PackedLayout, asked: Question
) -> tuple[bool, int, str, int, str, int, int]:
    """Return the facts of a call in eager code, all but the first of `FACTS`."""
    window = asked.window or 0
    if window and window >= packed.max_seqlen:
        window = 0  # it hides nothing
    mask = _mask_run_one_by_one(asked) or _kind(asked.causal, window)
    head_dim = max(q.shape[2], v.shape[2])
    return True, head_dim, mask, window, "eager", packed.num_real_tokens, packed.num_sequences


def is_wide(q: Tensor, v: Tensor) -> bool:
    """Return whether heads are too wide for every flash kernel; False if q or v is not 3-D."""
    return q.dim() == v.dim() == 3 and max(q.shape[2], v.shape[2]) > _WIDEST_FLASH


def fits_flex(q: Tensor, v: Tensor) -> bool:
    """Return whether flex attention can take rows of these shapes and dtypes, with its own tiles.

    Heads that need other tiles were not measured where this is asked: with the masks of trees.
    """
    return q.shape[0] > 0 and _flex_obstacle(q, v) is None and not is_wide(q, v)


def why_flex(q: Tensor, v: Tensor, packed: PackedLayout, asked: Question) -> str:
    """Return why `takes_flex` said yes."""
    if asked.backend == "flex":
        return "it was asked for"
    one_by_one = "one kernel for all sequences, where the other backends run them one by one"
    if packed.is_replayed or is_capturing(q.device):
        if _mask_run_one_by_one(asked) is not None:
            return one_by_one
        return "the best in a CUDA graph, where the others pay for sequences that may come"
    if _flex_and_others(_eager_facts(q, v, packed, asked), q.device) is None:
        return (
            f"a rule, not a measurement: {one_by_one}, and nothing like this call was measured on "
            f"{gpu_kind(q.device)} (to measure it, in a clone of cuseq: {COMMAND})"
        )
    return "the fastest where it was measured"


def gpu_kind(device: torch.device | None = None) -> str:
    """Return the compute capability of a GPU, such as "sm_90"."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _mask_run_one_by_one(asked: Question) -> str | None:
    """Return the kind of a mask that backends but flex run sequence by sequence, or None."""
    if asked.softcap is not None:
        return "softcap"
    return None if asked.spans is None else "spans"


def _compiled_code_takes_flex(q: Tensor, v: Tensor, asked: Question) -> bool:
    from cuseq._compile_time import least_tokens_for_flex

    least = least_tokens_for_flex(*_constants_of(q, v, asked))
    return least is not None and q.shape[0] >= least


def _replays_take_flex(q: Tensor, v: Tensor, packed: PackedLayout, asked: Question) -> bool:
    """Return whether flex is the fastest in a CUDA graph that replays other lengths.

    The graph's other kernels pay for each sequence that there is room for. All steps, and forwards
    that are computed again, ask the same, so that the first step compiles what is captured.
    """
    if q.shape[0] < LEAST_TOKENS_FOR_FLEX:
        return False
    tokens = _constant(q.shape[0], _POWERS)
    room = _constant(packed.cu_seqlens_static.shape[0] - 1, _POWERS)
    expected = packed.expected_sequences if isinstance(packed, StaticLayout) else 0
    facts = (*_constants_of(q, v, asked), tokens, room, expected)
    if not is_compiling():
        return flex_replays_fastest(*facts)
    from cuseq._compile_time import flex_replays_fastest as asked_once

    return asked_once(*facts)


def _constants_of(q: Tensor, v: Tensor, asked: Question) -> tuple[int, str, int]:
    """Return head_dim, kind of mask and window.

    Sizes may be symbolic in the code that is compiled, so constants stand for them.
    """
    head_dim = q.shape[2] if q.shape[2] >= v.shape[2] else v.shape[2]
    window = 0 if asked.window is None else _constant(asked.window, (128, 512, 1024, 4096))
    return _constant(head_dim, (64, 128, 192, _WIDEST_FLASH)), _kind(asked.causal, window), window


def _kind(causal: bool, window: int) -> str:
    """Return the kind of a mask without spans and soft cap; window 0 is none."""
    if causal:
        return "window" if window else "causal"
    return "two_sided" if window else "full"


def _constant(size: int, constants: tuple[int, ...]) -> int:
    """Return the smallest of the constants that is not below a size, or twice the largest."""
    for constant in constants:
        if size <= constant:
            return constant
    return 2 * constants[-1]


def tokens_from_which_flex_is_chosen(head_dim: int, mask: str, window: int) -> int | None:
    """Return the fewest tokens from which flex stays the best choice in compiled code, or None."""
    least = None
    for power in range(LEAST_TOKENS_FOR_FLEX.bit_length() - 1, 21):
        # One graph serves rows of few and of many documents.
        tokens = 2**power
        documents = range(max(1, tokens // _SHORT_DOCUMENT).bit_length())
        facts = (True, head_dim, mask, window, "compiled", tokens)
        if not _flex_loses_less([(*facts, 2**count) for count in documents], _HANDICAP):
            least = None
        elif least is None:
            least = tokens
    return least


def _flex_loses_less(rows: list[tuple[Any, ...]], handicap: float = 1.0) -> bool:
    """Return whether flex loses less than the other backends where each choice loses most.

    Args:
        rows: all but the first of `FACTS`, of the rows that one choice is for.
        handicap: by how much flex must be ahead.
    """
    flex_loss = others_loss = 0.0
    for facts in rows:
        times = _flex_and_others(facts)
        if times is None:
            return False
        flex, others = handicap * times[0], times[1]
        flex_loss, others_loss = max(flex_loss, flex / others), max(others_loss, others / flex)
    return flex_loss <= others_loss


def flex_replays_fastest(
    head_dim: int, mask: str, window: int, tokens: int, room: int, expected: int
) -> bool:
    """Return whether flex is the best choice in a CUDA graph whose offsets have room for sequences.

    Rows may come to have more sequences than the first ones, and the choice stays.

    Args:
        expected: sequences of the first rows; 0 if unknown.
    """
    facts = (True, head_dim, mask, window, "captured", tokens)
    return _flex_loses_less([(*facts, min(expected or room, room)), (*facts, room)])


def _flex_was_fastest(
    facts: tuple[Any, ...], *, device: torch.device | None = None, unknown: bool = False
) -> bool:
    """Return whether flex was the fastest backend where it was measured with facts like these.

    Args:
        facts: all but the first of `FACTS`.
        device: the GPU in question; None for the current one.
        unknown: what to return if flex was measured with nothing like them.
    """
    times = _flex_and_others(facts, device)
    return unknown if times is None else times[0] <= times[1]


def _flex_and_others(
    facts: tuple[Any, ...], device: torch.device | None = None
) -> tuple[float, float] | None:
    """Return the times of flex and of the fastest other backend where flex was measured, or None.

    In compiled code and in graphs, masks without measurements follow those of a causal mask, which
    are closer than none; soft caps and spans are not like it.
    """
    half, head_dim, mask, window, mode, *sizes = facts
    major, minor = torch.cuda.get_device_capability(device)
    kinds = [(mask, window)]
    if mode != "eager" and mask not in ("softcap", "spans"):
        kinds.append(("causal", 0))
    for kind in kinds:
        asked = (10 * major + minor, half, head_dim, *kind, mode, *sizes)
        times = _C.closest_measured_attention(asked, backend="flex")
        if times is not None:
            usable = registered - _packages.failed
            flex = times.pop("flex")
            there = (us for name, us in times.items() if name not in PACKAGES or name in usable)
            return flex, min(there, default=float("inf"))
    return None


def computes_in_half(q: Tensor) -> bool:
    """Return whether attention runs in fp16 or bf16; fp32 keeps its exact kernels."""
    autocast = torch.is_autocast_enabled(q.device.type)
    dtype = torch.get_autocast_dtype(q.device.type) if autocast else q.dtype
    return dtype in (torch.float16, torch.bfloat16)


def _flex_obstacle(q: Tensor, v: Tensor) -> str | None:
    if not q.is_cuda:
        return 'it runs on CUDA, since on a CPU it has no gradients; use backend="segments"'
    if q.dim() != 3 or v.dim() != 3:
        return "it takes q, k and v of shape [tokens, heads, head_dim]"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes fp16, bf16 and fp32, got {q.dtype}"
    widest = max(q.shape[2], v.shape[2])
    if min(q.shape[2], v.shape[2]) < 16 or widest > _WIDEST_FLEX:
        return f"it takes head_dim from 16 to {_WIDEST_FLEX}, got {q.shape[2]} and {v.shape[2]}"
    memory = shared_memory(q.device)
    if memory < _LEAST_FLEX_MEMORY:
        return (
            f"it runs on GPUs from sm_80 on, with at least {_LEAST_FLEX_MEMORY:,} bytes of shared "
            f"memory for a block, and this one has {memory:,}"
        )
    if not is_wide(q, v):
        return None
    if not computes_in_half(q):
        return f"it takes head_dim above {_WIDEST_FLASH} in fp16 and bf16 alone, got {q.dtype}"
    if memory < _WIDE_FLEX_MEMORY:
        return (
            f"head_dim above {_WIDEST_FLASH}, got {widest}, needs a GPU with {_WIDE_FLEX_MEMORY:,} "
            f"bytes of shared memory for a block, and this one has {memory:,}"
        )
    return None


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block of a GPU can have."""
    if not is_compiling():
        return shared_memory_of(device.index)
    from cuseq._compile_time import shared_memory_of as asked_once

    return asked_once(device.index)


def shared_memory_of(index: int | None) -> int:
    """Return the bytes of shared memory that a block of a GPU can have."""
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block_optin
