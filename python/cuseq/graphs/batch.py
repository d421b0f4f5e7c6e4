"""A batch whose tensors stay where they are, for a CUDA graph to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cuseq._base.arguments import check_tensor, shown
from cuseq.data._lengths import is_array
from cuseq.layout import OtherSize, PackedLayout, StaticLayout, needed_room
from cuseq.vision import VisionLayout
from cuseq.vision.static import StaticVisionLayout

# Bytes of a tensor on the host whose copy takes longer than two events and a copy on the GPU.
_LARGE = 1 << 20

_STATIC = (Tensor, StaticLayout, StaticVisionLayout)


def _in_order(value: Any) -> Any:
    """Return a batch whose mappings are dicts in the order of their keys.

    The order of keys says nothing, and pytree takes a subclass of dict, such as transformers'
    BatchEncoding, for one leaf.
    """
    if isinstance(value, Mapping):
        return {key: _in_order(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_in_order, value))
    if type(value) in (list, tuple):
        return type(value)(map(_in_order, value))
    return value


def _leaves(batch: object) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a batch with their places (`['labels']`), and its structure."""
    paths, structure = pytree.tree_flatten_with_path(_in_order(batch))
    return [(pytree.keystr(path), leaf) for path, leaf in paths], structure


def _listed(places: list[str]) -> str:
    return ", ".join(filter(None, places)) or f"{len(places)} values without names"


def _check_capacity(packed: PackedLayout, name: str) -> None:
    max_seqs = packed.row.max_seqs
    if max_seqs >= packed.total_tokens and packed.part is not None:
        raise ValueError(
            f"{name} must be a part of a row with 2 * max_seqs below its total_tokens / cp_size = "
            f"{packed.total_tokens}, got room for {max_seqs} pieces: give "
            "PackedLayout.from_lengths or PackingCollator a smaller max_seqs"
        )
    if max_seqs >= packed.total_tokens:
        raise ValueError(
            f"{name} must have max_seqs below total_tokens = {packed.total_tokens}, its default, "
            f"got {max_seqs}: give PackedLayout.from_lengths or PackingCollator a smaller max_seqs"
        )


def _layouts_of(leaves: Iterable[Any]) -> list[PackedLayout]:
    """Return the layouts of sequences of a batch, those of towers among them."""
    found: list[PackedLayout] = []
    for leaf in leaves:
        if isinstance(leaf, PackedLayout):
            found.append(leaf)
        elif isinstance(leaf, VisionLayout | StaticVisionLayout):
            found += (one for one in (leaf.images, leaf.windows) if one is not None)
    return found


class StaticBatch:
    """Static tensors and layouts of the form of an example batch.

    Args:
        example: a mapping, list, tuple or tensor; nested. Its tensors and layouts may be on the
            host or on the device. Other leaves are constants.
        device: where the static tensors are.
        name: what the batch is called in messages.

    Raises:
        ValueError: a layout's `max_seqs` is not below its `total_tokens`, or a tensor is on meta.
        TypeError: a tensor is sparse, nested or quantized, or an array is not a tensor.
    """

    def __init__(self, example: object, device: torch.device, name: str):
        self._device = device
        leaves, self._structure = _leaves(example)
        self._places = [place for place, _ in leaves]
        self._leaves: list[Any] = []
        for place, leaf in leaves:
            leaf_name = name + place
            if isinstance(leaf, PackedLayout):
                _check_capacity(leaf, leaf_name)
                leaf = StaticLayout.like(leaf, device)
            elif isinstance(leaf, VisionLayout):
                leaf = StaticVisionLayout(leaf, device, leaf_name)
            elif isinstance(leaf, Tensor):
                check_tensor(leaf, leaf_name)
                leaf = torch.empty_like(leaf, device=device).copy_(leaf)
            elif is_array(leaf):
                raise TypeError(
                    f"{leaf_name} must be a tensor, since a graph keeps everything else as a "
                    f"constant, got {type(leaf).__name__}"
                )
            self._leaves.append(leaf)
        self.value = pytree.tree_unflatten(self._leaves, self._structure)
        self._arrivals: dict[int, _Arrival] = {}  # of large tensors, by the number of the leaf

    def mark_plain(self) -> None:
        """Say that no graph will read the batch, so that its layouts give lengths to the host."""
        for packed in self._layouts():
            packed.stop_replays()

    def refill_block_masks(self) -> None:
        """Write what was loaded into the masks of flex attention that the layouts hold.

        Part of the step: in a graph it costs the host nothing.
        """
        for packed in self._layouts():
            packed.refill_block_masks()

    def needed_rooms(self, leaves: Sequence[Any] | None = None) -> list[int]:
        """Return what a graph needs room for in each layout, the sequences of each among it.

        Args:
            leaves: of a batch, as `check` returned them. Default: those of the example.
        """
        layouts = _layouts_of(self._leaves if leaves is None else leaves)
        return [number for packed in layouts for number in needed_room(packed)]

    def expect(self, rooms: list[int]) -> None:
        """Say how many sequences the layouts are expected to have: attention is chosen for them."""
        for packed, room in self._rooms_of(rooms):
            if not packed.is_tree:  # whose attention does not run sequence by sequence
                packed.expected_sequences = room[0]

    def fit(self, rooms: list[int]) -> None:
        """Bring the layouts to the form that a graph with these rooms reads."""
        for packed, room in self._rooms_of(rooms):
            packed.fit(room)

    @contextmanager
    def captured_for(self, rooms: list[int]) -> Iterator[None]:
        """Let a capture count on it that replays need at most this room in each layout."""
        with ExitStack() as promises:
            for packed, room in self._rooms_of(rooms):
                promises.enter_context(packed.captured_for(room))
            yield

    def _rooms_of(self, rooms: list[int]) -> Iterator[tuple[StaticLayout, list[int]]]:
        """Yield each layout with its own of the numbers that `needed_rooms` returned."""
        numbers = iter(rooms)
        for packed in self._layouts():
            yield packed, list(islice(numbers, packed.numbers_of_room))

    def groups(self) -> set[str | None]:
        """Return the names of the process groups that share rows; None is the default group."""
        parts = (packed.part for packed in self._layouts())
        return {part.group for part in parts if part is not None and part.cp_size > 1}

    def _layouts(self) -> list[StaticLayout]:
        """Return the layouts of sequences, those of towers among them."""
        found = _layouts_of(self._leaves)
        return [packed for packed in found if isinstance(packed, StaticLayout)]

    def check(self, batch: object, name: str) -> list[Any]:
        """Return the leaves of a batch; raise ValueError unless it has the form of the example.

        A tensor must have the example's shape and dtype, a layout its `total_tokens`, `max_seqs`
        and kind; any other value must be equal to the example's. The error is an OtherSize if
        everything is right but for sizes.
        """
        leaves, structure = pytree.tree_flatten(_in_order(batch))
        if structure != self._structure:
            given = [place for place, _ in _leaves(batch)[0]]
            raise ValueError(
                f"{name} must have the structure of example_batch, {_listed(self._places)}, got "
                f"{_listed(given)}"
            )
        # No exception is kept: with its traceback it would hold this and the graph.
        of_other_size: str | None = None
        for static, place, leaf in zip(self._leaves, self._places, leaves, strict=True):
            leaf_name = name + place
            if type(leaf) is not type(static) and not isinstance(static, _STATIC):
                raise ValueError(
                    f"{leaf_name} must be {static!r} as in example_batch, got {shown(leaf)}"
                )
            try:
                if isinstance(static, StaticLayout | StaticVisionLayout):
                    _check_layout(static, leaf, leaf_name)
                elif isinstance(static, Tensor):
                    _check_tensor(static, leaf, leaf_name)
                elif leaf is not static and leaf != static:
                    raise ValueError(
                        f"{leaf_name} must be {static!r} as in example_batch, since a graph keeps "
                        f"constants, got {shown(leaf)}"
                    )
            except OtherSize as error:
                of_other_size = of_other_size or str(error)
        if of_other_size is not None:
            raise OtherSize(of_other_size)
        return leaves

    def moved(self, batch: object) -> Any:
        """Return a batch of other sizes on the device, which waits for copies of its tensors."""
        leaves, structure = pytree.tree_flatten(_in_order(batch))
        kinds = (Tensor, PackedLayout, VisionLayout)
        moved = [one.to(self._device) if isinstance(one, kinds) else one for one in leaves]
        return pytree.tree_unflatten(moved, structure)

    def fill(self, leaves: list[Any]) -> None:
        """Copy leaves that `check` returned into the static tensors; asynchronous on a GPU."""
        for number, (static, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if isinstance(static, StaticLayout | StaticVisionLayout):
                static.load(leaf)
            elif isinstance(static, Tensor):
                to_gpu = static.is_cuda and leaf.device.type == "cpu"
                # Only a copy from pinned memory is asynchronous.
                source = leaf.pin_memory() if to_gpu and not leaf.is_pinned() else leaf
                if to_gpu and static.nbytes >= _LARGE:
                    if number not in self._arrivals:
                        self._arrivals[number] = _Arrival(static)
                    source = self._arrivals[number].of(source)
                static.copy_(source, non_blocking=True)
                if number in self._arrivals:
                    self._arrivals[number].note_read()


class _Arrival:
    """Where a large tensor arrives on the GPU while the step before still reads the static one."""

    def __init__(self, static: Tensor):
        self._tensor = torch.empty_like(static)
        self._stream = torch.cuda.Stream(static.device)
        self._was_read = torch.cuda.Event()
        self.note_read()

    def of(self, pinned: Tensor) -> Tensor:
        """Copy a tensor here, beside the current stream, which waits for it."""
        self._stream.wait_event(self._was_read)
        with torch.cuda.stream(self._stream):
            self._tensor.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream(self._tensor.device).wait_stream(self._stream)
        return self._tensor

    def note_read(self) -> None:
        """Say that what the current stream has so far reads this."""
        self._was_read.record(torch.cuda.current_stream(self._tensor.device))


def _check_layout(static: StaticLayout | StaticVisionLayout, packed: Any, name: str) -> None:
    kind = PackedLayout if isinstance(static, StaticLayout) else VisionLayout
    is_like = isinstance(packed, kind)
    if not is_like:
        raise ValueError(
            f"{name} must be a {kind.__name__} as in example_batch, got {shown(packed)}"
        )
    try:
        static.check_form(packed)
    except ValueError as error:
        raise type(error)(f"{name} must be like example_batch's layout: {error}") from None


def _check_tensor(static: Tensor, tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor as in example_batch, got {shown(tensor)}")
    if tensor.shape != static.shape or tensor.dtype != static.dtype:
        has_kind = tensor.dtype == static.dtype and tensor.dim() == static.dim()
        error = OtherSize if has_kind else ValueError
        raise error(
            f"{name} must be {static.dtype} {list(static.shape)} as in example_batch, got "
            f"{tensor.dtype} {list(tensor.shape)}"
        )
