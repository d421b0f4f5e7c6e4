"""The options and the result of `cuseq.enable`, for every integration."""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from cuseq.distributed import ContextParallel


class ModelOptions(TypedDict, total=False):
    """Options of `cuseq.enable` for a model; its docstring describes them."""

    rope: bool
    qk_norm: bool
    backend: str


class TrainerOptions(ModelOptions, total=False):
    """Options of `cuseq.enable` for a trainer."""

    bin_pack: bool | str
    capacity: int | None
    cp: ContextParallel | None
    graph: bool
    collator: Any
    tree: bool | None
    micro_batch_tokens: int | None


class UnslothOptions(TypedDict, total=False):
    """Options of `cuseq.enable` for the unsloth module."""

    compile_blocks: bool


class Options(TrainerOptions, UnslothOptions, total=False):
    """All options of `cuseq.enable`."""


DEFAULTS: Options = {
    "rope": True,
    "qk_norm": True,
    "backend": "auto",
    "bin_pack": False,
    "capacity": None,
    "cp": None,
    "graph": False,
    "collator": None,
    "tree": None,
    "micro_batch_tokens": None,
    "compile_blocks": False,
}


@dataclass(frozen=True)
class Enabled:
    """The result of `cuseq.enable` for a model, a trainer or the unsloth module.

    Attributes:
        kind: "model", "trainer" or "unsloth".
        replaced: the parts that now run through cuseq: "attention:CLASS" for a class of attention
            layers, "tower:CLASS" for those of a vision or audio tower, "rope:MODULE" for a modeling
            module whose rotation is cuseq's in this process,
            "qk_norm:CLASS" for a class whose query and key norms run in the rotation's kernel,
            "temperature:CLASS" for a class of attention layers that scales queries by their
            positions, which are now those inside each document,
            "indexer:CLASS" for a class that chooses keys, now inside each document,
            "conv:CLASS" and "recurrence:CLASS" for a class of recurrent layers whose convolution or
            recurrence starts each document anew,
            "collator:CLASS" for a trainer's data collator, "training_step:CLASS" for its step,
            "context_parallel:CLASS" for a trainer whose rows are shared by ranks,
            "planned_rows:CLASS" for one whose rows are planned, "rows:CLASS" and "trees:CLASS" for
            the body of a model that runs padded batches as packed rows or as trees,
            "micro_batches:CLASS" for a trainer whose samples are dealt to the micro-batches of a
            step.
        left_alone: the parts that were not replaced, with the reason.
        warnings: conditions that make training on packed rows wrong or slow. An entry that starts
            with "LEAKS" names layers through which documents of one row leak into each other. One
            that starts with "SLOW" names a recurrence that runs without one kernel. One that
            starts with "DROPOUT" names attention layers whose dropout packed rows refuse in
            training mode. One that starts with "PADDED" names a data collator that pads.
        attention: which backend computes the attention of packed rows, for which of them, and why;
            empty where that is not known. Not compared.

    `print` shows all of it, and what to do next.
    """

    kind: str
    replaced: tuple[str, ...]
    left_alone: tuple[str, ...]
    warnings: tuple[str, ...]
    attention: str = field(default="", compare=False)

    def __str__(self) -> str:
        parts: dict[str, list[str]] = {}
        for one in self.replaced:
            part, _, name = one.partition(":")
            parts.setdefault(part, []).append(name.rpartition(".")[2])
        sections = {
            "replaced": [
                f"{_PARTS.get(part, part)}: {', '.join(names)}" for part, names in parts.items()
            ],
            "attention": [self.attention or "not known before a row comes"],
            "left alone": list(self.left_alone),
            "warnings": list(self.warnings) or ["none"],
            "next": [_NEXT[self.kind]],
        }
        lines = [f"cuseq is enabled for this {self.kind}"]
        for title, entries in sections.items():
            first = f"  {title:<12}"
            for entry in entries or ["nothing"]:
                lines.append(
                    textwrap.fill(entry, 98, initial_indent=first, subsequent_indent=" " * 16)
                )
                first = " " * 14
        return "\n".join(lines)


_PARTS = {
    "qk_norm": "norm of queries and keys, in the rotation's kernel",
    "rope": "rotation",
    "tower": "attention of images or audio",
    "conv": "convolution",
    "collator": "data collator",
    "training_step": "training step, in a CUDA graph",
    "context_parallel": "rows, shared by ranks",
    "planned_rows": "rows, full ones of one cost on every rank",
    "rows": "padded batches, run as packed rows",
    "trees": "padded batches, run as trees",
    "micro_batches": "micro-batches, of as many tokens as were asked for",
}
_NEXT = {
    "model": (
        "give it rows of cuseq.PackingCollator(); cuseq.check_packing(model, documents) shows "
        "whether documents leak into each other"
    ),
    "trainer": (
        "trainer.train(); cuseq.check_packing(trainer.model, documents) shows whether documents "
        "leak into each other"
    ),
    "unsloth": "make the trainer, with packing=True; cuseq.enable(trainer) for one made before",
}


def check_same_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if an enabled object is enabled again with other options."""
    for name, value in now.items():
        if before[name] is not value and before[name] != value:
            raise ValueError(
                f"{name} must stay {before[name]!r} until cuseq.disable, got {value!r}: disable it "
                "first"
            )


def check_not_given(
    options: Mapping[str, Any], names: tuple[str, ...], trainer: object, why: str
) -> None:
    """Raise ValueError if a trainer got one of these options, which are not for it."""
    defaults: Mapping[str, Any] = DEFAULTS
    for name in names:
        if (value := options[name]) != defaults[name]:
            raise ValueError(
                f"{name} must not be given for a {type(trainer).__name__}, got {value!r}: {why}"
            )


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block, which would otherwise be half done."""
    before = signal.getsignal(signal.SIGINT)
    # Other threads get no signals; a handler that is not Python's cannot be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)
