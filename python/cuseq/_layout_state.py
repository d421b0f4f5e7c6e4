"""The state of a `PackedLayout`, and a map over its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from cuseq import _C
from cuseq._transfer import copy_pair

# Slots of host_meta.
NUM_SEQS: int = _C.HostMeta.NUM_SEQS
MAX_SEQLEN: int = _C.HostMeta.MAX_SEQLEN
TOTAL_TOKENS: int = _C.HostMeta.TOTAL_TOKENS
NUM_REAL_TOKENS: int = _C.HostMeta.NUM_REAL_TOKENS
LENGTH_DIVISOR: int = _C.HostMeta.LENGTH_DIVISOR

# These tensors have one size for all rows of a kind, so that CUDA graphs can read them.
_STATIC = ("cu_seqlens_static", "host_meta", "slots", "tokens")
_STATIC_OF_PART = ("rank_positions", "rank_rows", "rank_meta")
_STATIC_OF_TREE = ("tree_positions", "tree_rows", "tree_meta")

_SHAPED = (*_STATIC_OF_PART, *_STATIC_OF_TREE)

# Names, for errors, of the facts in which two layouts must agree, in the order of `_form`.
_FORM = (
    "total_tokens", "max_seqs", "kind", "padding between sequences", "padded batch",
    "process group", *(f"shape of {name}" for name in _SHAPED),
)  # fmt: skip

# These tensors are on the layout's device; `_copied` copies two of them at a time.
_ON_DEVICE = (
    "cu_seqlens_static", "lengths", "slots", "tokens", "rank_positions", "rank_rows",
    "tree_positions", "tree_rows",
)  # fmt: skip
_TENSORS = (*_ON_DEVICE, "host_meta", "host_lengths", "rank_meta", "tree_meta")

_MOST_KEPT = 16

Tensors = dict[str, Any]
Key = TypeVar("Key")
Value = TypeVar("Value")
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]


class Part(Protocol):
    """What a rank's part of a row was made of."""

    def recipe(self, total_tokens: int, group: str | None, device: str) -> Recipe:
        """Return a function that makes the part again, and its arguments, which can be pickled.

        Args:
            total_tokens: tokens of the part, which may have got longer.
            group: name of the process group.
            device: device of the layout.
        """


class LayoutState(NamedTuple):
    """The fields that a layout cannot derive. It derives everything else from them on demand.

    This is a named tuple and not a dataclass, because Dynamo reads all fields of a dataclass and
    would guard on its ints.
    """

    lengths: Tensor  # int32, n_seqs elements or more
    cu_seqlens_static: Tensor  # int32 [max_seqs + 1]
    host_meta: Tensor  # int32 [6] on the CPU
    total_tokens: int
    num_sequences: int | None  # None if only host_meta holds it
    # Host copy of the lengths of a layout on a GPU. Valid after wait().
    host_lengths: Tensor | None = None
    # Whether the lengths came from the GPU, so that the host has to wait for its copy of them.
    from_device: bool = False
    # The layout of the segments, if they are longer than their sequences.
    segments: LayoutState | None = None
    # For a padded batch: the slot of each token [total_tokens], the token of each slot [B, S].
    slots: Tensor | None = None
    tokens: Tensor | None = None
    # For a rank's part of a row: positions in the whole sequences, [total_tokens], and the rank's
    # share of the plan: rank_rows and, on the CPU, rank_meta (csrc/context_parallel/share.h).
    rank_positions: Tensor | None = None
    rank_rows: Tensor | None = None
    rank_meta: Tensor | None = None
    # Name of the process group whose ranks hold the other parts; None: the default group.
    rank_group: str | None = None
    # What the part was made of, for pickling.
    part: Part | None = None
    # For a tree: positions on the paths, [total_tokens], and what attention reads: tree_rows and,
    # on the CPU, tree_meta (csrc/trees/tree_meta.h).
    tree_positions: Tensor | None = None
    tree_rows: Tensor | None = None
    tree_meta: Tensor | None = None
    tree: _C.Tree | None = None

    @property
    def max_seqs(self) -> int:
        """Capacity for sequences."""
        return self.cu_seqlens_static.shape[0] - 1

    @property
    def max_depth(self) -> int:
        """Capacity of a tree for the ancestors of a node."""
        assert self.tree_meta is not None
        return int(self.tree_meta[_C.TreeMeta.MAX_DEPTH])

    def map(self, change: Callable[[Tensors], Tensors], **fields: Any) -> LayoutState:
        """Return a state with changed tensors and fields, and change its segments alike.

        Args:
            change: called once for the layout and once for its segments, with a dict of the tensors
                that are not None, by name. Returns a dict of replacements; None removes a tensor.
            fields: new values of fields that are not tensors.
        """
        tensors = {name: getattr(self, name) for name in _TENSORS}
        changed = change({name: value for name, value in tensors.items() if value is not None})
        segments = None if self.segments is None else self.segments.map(change, **fields)
        return self._replace(segments=segments, **fields, **changed)

    def moved(self, device: torch.device) -> LayoutState:
        """Return the state on another device; `host_meta` stays on the host."""
        on_host = self.lengths.device.type == "cpu"

        def change(tensors: Tensors) -> Tensors:
            moved = _copied({n: tensors[n] for n in _ON_DEVICE if n in tensors}, device)
            if device.type == "cpu":
                moved["host_lengths"] = None
            elif on_host:
                moved["host_lengths"] = tensors["lengths"]
            return moved

        return self.map(change, from_device=self.from_device and not on_host)

    def pinned(self) -> LayoutState:
        """Return the state, which must be on the host, in pinned memory."""
        return self.map(
            lambda tensors: {n: tensors[n].pin_memory() for n in _ON_DEVICE if n in tensors}
        )

    def lengthened(self, total_tokens: int) -> LayoutState:
        """Return the state of a longer row, no tree; the added tokens are tail."""
        more = total_tokens - self.total_tokens

        def change(tensors: Tensors) -> Tensors:
            lengths, meta = tensors["lengths"], tensors["host_meta"].clone()
            meta[TOTAL_TOKENS] = total_tokens
            # A new tensor object, because the cache keys xformers' bias by `lengths`, and that bias
            # covers the tail.
            longer = {"host_meta": meta, "lengths": lengths.view_as(lengths)}
            # copy_ of one layout must not edit the other.
            for name in ("cu_seqlens_static", "tokens", "rank_rows"):
                if name in tensors:
                    longer[name] = tensors[name].clone()
            if "slots" in tensors:
                longer["slots"] = torch.nn.functional.pad(tensors["slots"], (0, more), value=-1)
            if "rank_positions" in tensors:
                tail = torch.arange(more, dtype=torch.int32, device=lengths.device)
                longer["rank_positions"] = torch.cat([tensors["rank_positions"], tail])
            return longer

        return self.map(change, total_tokens=total_tokens)

    def cloned(self) -> LayoutState:
        """Return the state with tensors of its own."""
        return self.map(lambda tensors: {name: tensor.clone() for name, tensor in tensors.items()})

    def static_tensors(self) -> list[Tensor]:
        """Return the tensors whose sizes do not depend on the lengths, without the segments'."""
        tensors = (getattr(self, name) for name in (*_STATIC, *_STATIC_OF_PART, *_STATIC_OF_TREE))
        return [tensor for tensor in tensors if tensor is not None]

    def check_like(self, other: LayoutState) -> None:
        """Raise ValueError unless `filled_from(other)` is possible."""
        mine, given = self._form(), other._form()
        if mine != given:
            for what, value, theirs in zip(_FORM, mine, given, strict=True):
                may_lack = what == "padded batch" and None in (value, theirs)
                if value != theirs and not may_lack:
                    raise ValueError(f"other must have the same {what}: {value}, got {theirs}")
        if self.segments is not None and other.segments is not None:
            self.segments.check_like(other.segments)

    def _form(self) -> tuple[Any, ...]:
        """Return what all rows of a kind have alike, as `_FORM` names it."""
        return (
            self.total_tokens,
            self.cu_seqlens_static.shape[0] - 1,
            self._kind(),
            self.segments is not None,
            _shape(self.tokens),
            self.rank_group,
            *(_shape(getattr(self, name)) for name in _SHAPED),
        )

    def _kind(self) -> str:
        if self.tree_positions is not None:
            return "a tree"
        return "a row" if self.rank_meta is None else "a rank's part of a row"

    def filled_from(self, other: LayoutState) -> LayoutState:
        """Copy another state's static tensors on the device into this state's, and return a state
        of these and of the rest of `other`, on this device but for the segments.

        Tensors on the host are replaced: copies of a layout on other devices share them, and no
        graph reads them.

        Args:
            other: on this state's device or, for a state on a GPU, on the host.
        """
        device = self.cu_seqlens_static.device
        tensors = other._on_device()
        if other.lengths.device != device and not all(map(Tensor.is_pinned, tensors.values())):
            other = other._replace(segments=None).moved(device)._replace(segments=other.segments)
            tensors = other._on_device()
        kept = {}
        for name in (*_STATIC, *_STATIC_OF_PART, *_STATIC_OF_TREE):
            mine = getattr(self, name)
            if name in tensors and mine is not None:
                kept[name] = mine.copy_(tensors.pop(name), non_blocking=True)
            elif name in tensors and other.lengths.device == device:
                # The next fill writes into it, so it must not be the other layout's too.
                kept[name] = tensors.pop(name).clone()
        if other.lengths.device != device:
            kept |= {n: tensor.to(device, non_blocking=True) for n, tensor in tensors.items()}
            kept |= {"host_lengths": other.lengths, "from_device": False}
        return other._replace(**kept)

    def _on_device(self) -> Tensors:
        """Return the tensors that are on the layout's device, by name."""
        tensors = {name: getattr(self, name) for name in _ON_DEVICE}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def keep(kept: dict[Key, Value], key: Key, value: Value) -> Value:
    """Keep a value that a layout makes of an argument, beside the newest few of its kind.

    Return the value of the key: another thread may have kept one before.
    """
    value = kept.setdefault(key, value)
    for oldest in list(kept)[:-_MOST_KEPT]:
        kept.pop(oldest, None)
    return value


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _copied(tensors: Tensors, device: torch.device) -> Tensors:
    names = list(tensors)
    if len(names) % 2 == 1:
        tensors = tensors | {"": torch.empty(0, dtype=torch.int32, device="cpu")}
        names.append("")
    copied: Tensors = {}
    for first, second in zip(names[::2], names[1::2], strict=True):
        copied[first], copied[second] = copy_pair(tensors[first], tensors[second], device)
    copied.pop("", None)
    return copied
