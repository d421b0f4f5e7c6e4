"""The records that a layout holds: its row, and where there is one its batch, part or tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from cuseq import _C
from cuseq._base.arguments import power_of_two
from cuseq._base.transfer import copy_pair

# Slots of host_meta.
NUM_SEQS: int = _C.HostMeta.NUM_SEQS
MAX_SEQLEN: int = _C.HostMeta.MAX_SEQLEN
TOTAL_TOKENS: int = _C.HostMeta.TOTAL_TOKENS
NUM_REAL_TOKENS: int = _C.HostMeta.NUM_REAL_TOKENS

Recipe = tuple[Callable[..., Any], tuple[Any, ...]]

NUMBERS_OF_ROOM = 5  # that `Part.needed_room` returns

# The least room of a graph for a rank's part; less gains nothing.
_LEAST_PIECES = 8
_LEAST_ROWS = 256

# Named tuples and no dataclasses: Dynamo reads all fields of a dataclass and would guard on its
# ints.


class Row(NamedTuple):
    """Where the sequences of a row lie. A layout derives everything else from these on demand."""

    # `moved` copies tensors in pairs, and the second lies behind the first in memory. Compiled code
    # guards on where this one begins, so it comes before the lengths.
    cu_seqlens_static: Tensor  # int32 [max_seqs + 1]
    lengths: Tensor  # int32, n_seqs elements or more
    host_meta: Tensor  # int32 [6] on the CPU
    total_tokens: int
    num_sequences: int | None  # None if only host_meta holds it
    # Host copy of the lengths of a layout on a GPU. Valid after wait().
    host_lengths: Tensor | None = None
    # Whether the lengths came from the GPU, so that the host has to wait for its copy of them.
    from_device: bool = False
    # The row of the segments, if they are longer than their sequences.
    segments: Row | None = None

    @property
    def max_seqs(self) -> int:
        """Capacity for sequences."""
        return self.cu_seqlens_static.shape[0] - 1


class Batch(NamedTuple):
    """Where the tokens of a row lie in the padded batch that it was made of."""

    slots: Tensor  # int32 [total_tokens], the slot of each token
    tokens: Tensor  # int32 [batch, seqlen], the token of each slot

    def form(self) -> dict[str, Any]:
        """Return what all rows of a kind have alike, by what it is called in errors."""
        return {"padded batch": tuple(self.tokens.shape)}

    def lengthened(self, more: int) -> Batch:
        """Return the record of a row with so many more tokens of tail."""
        slots = torch.nn.functional.pad(self.slots, (0, more), value=-1)
        return Batch(slots, self.tokens.clone())


class PartSource(Protocol):
    """What a rank's part of a row was made of."""

    @property
    def own_tokens(self) -> int:
        """Tokens of the part as it was dealt."""

    def share_of_room(self, room: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return `Part.rows` and `Part.meta` on the host, for a graph that has this room."""

    def most_room(self) -> list[int]:
        """Return the most room that `share_of_room` takes."""

    def recipe(self, total_tokens: int, group: str | None, device: str) -> Recipe:
        """Return a function that makes the part again, and its arguments, which can be pickled.

        Args:
            total_tokens: tokens of the part, which may have got longer.
            group: name of the process group.
            device: device of the layout.
        """


class Part(NamedTuple):
    """What makes a row one rank's part of a longer one (csrc/context_parallel/share.h)."""

    positions: Tensor  # int32 [total_tokens], positions in the whole sequences
    rows: Tensor  # int32, the rank's share of the plan
    meta: Tensor  # int32 on the CPU, the numbers of the share
    group: str | None  # name of the ranks' process group; None: the default group
    source: PartSource

    @property
    def kind(self) -> str:
        """Its name in errors."""
        return "a rank's part of a row"

    @property
    def refusal(self) -> str:
        """The error message of functions that refuse a rank's part of a row."""
        return (
            "packed must describe a whole row here, got the part of it that cp_partition gave to "
            "one rank: its tokens have neighbours on other ranks"
        )

    def form(self) -> dict[str, Any]:
        """As `Batch.form`."""
        numbers = self.meta.tolist()  # of these a CUDA graph makes constants
        slots = {
            "rank": _C.RankMeta.RANK,
            "cp_size": _C.RankMeta.CP_SIZE,
            "exchange of heads": _C.RankMeta.ULYSSES,
            "window of the plan": _C.RankMeta.WINDOW,
        }
        facts = {name: numbers[slot] for name, slot in slots.items()}
        return {"process group": self.group, **facts, **_shapes("part", self)}

    @property
    def cp_size(self) -> int:
        """How many ranks share the row."""
        return int(self.meta[_C.RankMeta.CP_SIZE])

    def lengthened(self, more: int) -> Part:
        """As `Batch.lengthened`."""
        # Go on from what an earlier call added: a row has the same positions in one step or many.
        added = self.positions.shape[0] - self.source.own_tokens
        tail = torch.arange(added, added + more, dtype=torch.int32, device=self.positions.device)
        positions = torch.cat([self.positions, tail])
        return self._replace(positions=positions, rows=self.rows.clone())

    def needed_room(self) -> list[int]:
        """Return what a graph needs room for: whole pieces, cut ones, their tokens and keys, and
        rows that one rank sends to another (csrc/context_parallel/share.h).

        Powers of two, so that few rows need more and a new graph.
        """
        numbers = self.meta.tolist()
        cut = numbers[_C.RankMeta.NUM_CUT]
        needed = (
            (numbers[_C.RankMeta.NUM_PIECES] - cut, _LEAST_PIECES),
            (cut, _LEAST_PIECES),
            (numbers[_C.RankMeta.NUM_CUT_TOKENS], _LEAST_ROWS),
            (numbers[_C.RankMeta.NUM_KEY_ROWS], _LEAST_ROWS),
            (max(numbers[_C.RankMeta.SIZE :]), _LEAST_ROWS),
        )
        rounded = [power_of_two(number, least) if number else 0 for number, least in needed]
        return list(map(min, rounded, self.source.most_room()))


class Tree(NamedTuple):
    """What makes the sequences of a row the nodes of a tree (csrc/trees/tree_meta.h)."""

    positions: Tensor  # int32 [total_tokens], number of tokens before each on its path
    rows: Tensor  # int32, what attention reads of the tree
    meta: Tensor  # int32 on the CPU, its numbers
    nodes: _C.Tree

    @property
    def kind(self) -> str:
        """As `Part.kind`."""
        return "a tree"

    @property
    def refusal(self) -> str:
        """The error message of functions that refuse a tree."""
        return (
            "packed must hold its documents one after the other here, got the layout of a tree, in "
            "which a token may continue one that is not beside it"
        )

    def form(self) -> dict[str, Any]:
        """As `Batch.form`."""
        return _shapes("tree", self)

    @property
    def max_depth(self) -> int:
        """Capacity for the ancestors of a node."""
        return int(self.meta[_C.TreeMeta.MAX_DEPTH])


def _shapes(kind: str, record: Part | Tree) -> dict[str, Any]:
    tensors = {name: getattr(record, name) for name in ("positions", "rows", "meta")}
    return {f"shape of {kind}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}


class Records(NamedTuple):
    """All that a layout holds. At most one of the optional records is there."""

    row: Row
    batch: Batch | None = None
    part: Part | None = None
    tree: Tree | None = None

    @property
    def optional(self) -> dict[str, Batch | Part | Tree]:
        """The optional record by its name, if there is one."""
        fields = zip(self._fields[1:], self[1:], strict=True)
        return {name: record for name, record in fields if record is not None}

    @property
    def special(self) -> Part | Tree | None:
        """The record of a rank's part or of a tree; None for documents one after the other."""
        return self.part or self.tree

    @property
    def special_kind(self) -> str | None:
        """The name of `special` in errors."""
        return getattr(self.special, "kind", None)

    def form(self) -> dict[str, Any]:
        """As `Batch.form`."""
        form = {
            "total_tokens": self.row.total_tokens,
            "max_seqs": self.row.max_seqs,
            "kind": self.special_kind or "a row",
            "padding between sequences": self.row.segments is not None,
        }
        for record in self.optional.values():
            form |= record.form()
        return form


# ------------------------------------------------------------------------------- tensors

Path = tuple[str, ...]  # of a field: ("row", "segments", "lengths")
AnyRecord = TypeVar("AnyRecord", Records, Row, Batch, Part, Tree)

_ON_HOST = ("host_meta", "host_lengths", "meta")
# Their size depends on the number of sequences; the others have one size for all rows of a kind.
_OF_LENGTHS = ("lengths", "host_lengths")


def tensors_of(record: NamedTuple, above: Path = ()) -> dict[Path, Tensor]:
    """Return the tensors of a record and of the records in it, by path."""
    found: dict[Path, Tensor] = {}
    for name, value in zip(record._fields, record, strict=True):
        if isinstance(value, Tensor):
            found[(*above, name)] = value
        elif isinstance(value, Row | Batch | Part | Tree):
            found |= tensors_of(value, (*above, name))
    return found


def _on_device(tensors: dict[Path, Tensor]) -> dict[Path, Tensor]:
    return {path: tensor for path, tensor in tensors.items() if path[-1] not in _ON_HOST}


def _with(record: AnyRecord, changed: dict[Path, Any]) -> AnyRecord:
    """Return the record with other values of some fields, its own or those of records in it."""
    inside: dict[str, dict[Path, Any]] = {}
    own = {}
    for (name, *rest), value in changed.items():
        if rest:
            inside.setdefault(name, {})[tuple(rest)] = value
        else:
            own[name] = value
    own |= {name: _with(getattr(record, name), fields) for name, fields in inside.items()}
    return record._replace(**own)


def _rows(records: Records) -> Iterable[tuple[Path, Row]]:
    """Return the row and, if it has one, the row of its segments, with their paths."""
    yield ("row",), records.row
    if records.row.segments is not None:
        yield ("row", "segments"), records.row.segments


def moved(records: Records, device: torch.device) -> Records:
    """Return the records on another device; what is on the host stays there."""
    changed: dict[Path, Any] = dict(_copied(_on_device(tensors_of(records)), device))
    for path, row in _rows(records):
        on_host = row.lengths.device.type == "cpu"
        changed[(*path, "from_device")] = row.from_device and not on_host
        if device.type == "cpu":
            changed[(*path, "host_lengths")] = None
        elif on_host:
            changed[(*path, "host_lengths")] = row.lengths
    return _with(records, changed)


def pinned(records: Records) -> Records:
    """Return the records, which must be on the host, in pinned memory."""
    tensors = _on_device(tensors_of(records))
    return _with(records, {path: tensor.pin_memory() for path, tensor in tensors.items()})


def cloned(records: Records) -> Records:
    """Return the records with tensors of their own."""
    return _with(records, {path: tensor.clone() for path, tensor in tensors_of(records).items()})


def lengthened(records: Records, total_tokens: int) -> Records:
    """Return the records of a longer row, no tree; the added tokens are tail."""
    more = total_tokens - records.row.total_tokens
    changed: dict[Path, Any] = {}
    for path, row in _rows(records):
        meta = row.host_meta.clone()
        meta[TOTAL_TOKENS] = total_tokens
        # A new tensor object of the lengths, because the cache keys xformers' bias by them, and
        # that bias covers the tail. copy_ of one layout must not edit the other's offsets.
        changed |= {
            (*path, "total_tokens"): total_tokens,
            (*path, "host_meta"): meta,
            (*path, "lengths"): row.lengths.view_as(row.lengths),
            (*path, "cu_seqlens_static"): row.cu_seqlens_static.clone(),
        }
    return _with(records, changed)._replace(
        batch=records.batch and records.batch.lengthened(more),
        part=records.part and records.part.lengthened(more),
    )


def static_tensors(records: Records) -> list[Tensor]:
    """Return the tensors whose sizes do not depend on the lengths, without the segments'."""
    own = records._replace(row=records.row._replace(segments=None))
    return [tensor for path, tensor in tensors_of(own).items() if path[-1] not in _OF_LENGTHS]


class OtherSize(ValueError):
    """Two values are of one form but for their sizes."""


def _is_size(fact: str) -> bool:
    sizes = ("total_tokens", "max_seqs", "padded batch")
    return fact in sizes or fact.startswith("shape of ")


def check_like(mine: Records, other: Records) -> None:
    """Raise ValueError unless `filled(mine, other)` is possible: OtherSize if only sizes differ."""
    facts = other.form()
    # One may lack the padded batch that it was made of.
    apart = {what: value for what, value in mine.form().items() if facts.get(what, value) != value}
    if apart:
        what = min(apart, key=_is_size)  # the first that is not a size, if there is one
        error = OtherSize if _is_size(what) else ValueError
        raise error(f"other must have the same {what}: {apart[what]}, got {facts[what]}")
    if mine.row.segments is not None and other.row.segments is not None:
        check_like(Records(mine.row.segments), Records(other.row.segments))


def filled(mine: Records, other: Records) -> Records:
    """Copy others' static tensors on the device into these, and return records of these and of the
    rest of `other`, on this device but for the row of the segments.

    Tensors on the host are replaced: copies of a layout on other devices share them, and no graph
    reads them.

    Args:
        other: on the device of `mine` or, for records on a GPU, on the host.
    """
    device = mine.row.cu_seqlens_static.device
    segments, other = other.row.segments, other._replace(row=other.row._replace(segments=None))
    tensors = _on_device(tensors_of(other))
    is_here = other.row.lengths.device == device
    if not is_here and not all(map(Tensor.is_pinned, tensors.values())):
        other = moved(other, device)
        tensors, is_here = _on_device(tensors_of(other)), True
    targets = tensors_of(mine)
    changed: dict[Path, Any] = {("row", "segments"): segments}
    for path, tensor in tensors.items():
        if path[-1] not in _OF_LENGTHS and path in targets:
            changed[path] = targets[path].copy_(tensor, non_blocking=True)
        elif not is_here:
            changed[path] = tensor.to(device, non_blocking=True)
        elif path[-1] not in _OF_LENGTHS:
            # The next fill writes into it, so it must not be the other layout's too.
            changed[path] = tensor.clone()
    if not is_here:
        changed |= {("row", "host_lengths"): other.row.lengths, ("row", "from_device"): False}
    return _with(other, changed)


def _copied(tensors: dict[Path, Tensor], device: torch.device) -> dict[Path, Tensor]:
    """Return copies on a device, made two at a time."""
    paths, values = list(tensors), list(tensors.values())
    if len(values) % 2 == 1:
        values.append(torch.empty(0, dtype=torch.int32, device="cpu"))
    copies: list[Tensor] = []
    for first, second in zip(values[::2], values[1::2], strict=True):
        copies += copy_pair(first, second, device)
    return cast("dict[Path, Tensor]", dict(zip(paths, copies, strict=False)))
