"""Values to call with: right ones, bent ones and wild ones, all chosen by one seed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

import cuseq

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
)
HUGE = (2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)


class Draw(Random):
    """Random choices of one call. What it draws depends on the seed and the call's number alone."""

    def __init__(self, device: str):
        super().__init__(0)
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(1 << 15, generator=generator, dtype=torch.float64)

    def begin(self, seed: int, number: int) -> None:
        self.seed(seed << 40 | number)
        self.restless = False  # whether an argument changes while it is read

    def fork(self) -> Draw:
        """Return another one that draws the same from now on."""
        forked = Draw.__new__(Draw)
        forked.__dict__.update(self.__dict__)
        forked.setstate(self.getstate())
        return forked

    def chance(self, share: float) -> bool:
        return self.random() < share

    def ints(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype or self.choice(INTEGERS), device=self.device)

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        begin = self.randrange((1 << 15) - count)
        noise = self._noise[begin : begin + count].view(shape)
        return noise.to(self.device, dtype or self.choice(FLOATS), copy=True)


@dataclass
class Row:
    """A packed row: lengths of its sequences and the tokens in memory."""

    lengths: list[int]
    total: int

    @property
    def offsets(self) -> list[int]:
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets


def a_row(draw: Draw, multiple: int = 1) -> Row:
    lengths = [
        multiple * draw.choice((0, 1, 2, 3, 5, 7)) for _ in range(draw.choice((0, 1, 2, 3, 5)))
    ]
    return Row(lengths, sum(lengths) + multiple * draw.choice((0, 0, 1, 3)))


def a_layout(draw: Draw, row: Row, segment_multiple: int = 1) -> cuseq.PackedLayout:
    total = None if segment_multiple > 1 else row.total
    return cuseq.PackedLayout.from_lengths(
        row.lengths, total, segment_multiple=segment_multiple, device=draw.device
    )


def tree_nodes(draw: Draw) -> tuple[list[int], list[int]]:
    """Draw lengths and parents of a tree's nodes, in the order of the row."""
    path: list[int] = []
    lengths, parents = [], []
    for node in range(draw.choice((0, 1, 2, 6))):
        path = path[: draw.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        lengths.append(draw.choice((0, 1, 2, 5)))
        path.append(node)
    return lengths, parents


def a_tree(draw: Draw) -> cuseq.PackedTree:
    lengths, parents = tree_nodes(draw)
    total = sum(lengths) + draw.choice((0, 0, 2))
    return cuseq.PackedTree.from_parents(lengths, parents, total_tokens=total, device=draw.device)


def some_spans(draw: Draw, row: Row) -> list[tuple[int, int]]:
    spans = []
    for begin, length in zip(row.offsets, row.lengths, strict=False):
        if length > 1 and draw.chance(0.5):
            start = draw.randrange(begin, begin + length - 1)
            spans.append((start, draw.randint(start + 1, begin + length)))
    return spans


# --------------------------------------------------------------------------- bent values


def bent_int(draw: Draw, value: int) -> int:
    return draw.choice(
        (0, -1, 1, -value, value + 1, value - 1, 2 * value, draw.choice(HUGE), -(2**63))
    )


def as_strange(draw: Draw, value: Tensor) -> Tensor:
    """Return the tensor in other memory, in another dtype or shape, or on another device."""
    return draw.choice(_STRANGE)(draw, value)


def _strided(draw: Draw, value: Tensor) -> Tensor:
    return torch.stack([value, value], dim=-1)[..., 0]


def _overlapping(draw: Draw, value: Tensor) -> Tensor:
    if value.dim() == 0 or value.shape[0] == 0:
        return value
    return value[:1].expand(value.shape)


def _sliding(draw: Draw, value: Tensor) -> Tensor:
    """Return a tensor of this shape whose elements all share one place in memory."""
    if value.numel() == 0:
        return value
    return value.clone().as_strided(value.shape, [0] * value.dim())


def _transposed(draw: Draw, value: Tensor) -> Tensor:
    return value.transpose(0, -1) if value.dim() > 1 else value


def _turned_in_memory(draw: Draw, value: Tensor) -> Tensor:
    return value.transpose(0, -1).contiguous().transpose(0, -1) if value.dim() > 1 else value


def _other_dtype(draw: Draw, value: Tensor) -> Tensor:
    return value.to(draw.choice(DTYPES))


def _longer(draw: Draw, value: Tensor) -> Tensor:
    return torch.cat([value, value]) if value.dim() else value.expand(3)


def _shorter(draw: Draw, value: Tensor) -> Tensor:
    return value[:-1] if value.dim() else value


def _empty(draw: Draw, value: Tensor) -> Tensor:
    return value[:0] if value.dim() else value


def _wild_elements(draw: Draw, value: Tensor) -> Tensor:
    value = value.clone()
    if value.numel() == 0 or value.is_complex():
        return value
    flat = value.view(-1)
    at = draw.randrange(flat.numel())
    if value.dtype.is_floating_point:
        flat[at] = draw.choice((float("nan"), float("inf"), float("-inf"), 0.0, -1.0))
    elif value.dtype == torch.bool:
        flat[at] = not bool(flat[at])
    else:
        limits = torch.iinfo(value.dtype)
        flat[at] = draw.choice(
            (limits.min, limits.max, 0, limits.max // 2 + 1, min(limits.max, 77))
        )
        if limits.min < 0 and draw.chance(0.3):
            flat[at] = -1
    return value


def _last_dimension_apart(draw: Draw, value: Tensor) -> Tensor:
    return torch.cat([value, value], dim=-1)[..., ::2] if value.dim() else value


def _inference(draw: Draw, value: Tensor) -> Tensor:
    with torch.inference_mode():
        return value.clone()


def _with_gradient(draw: Draw, value: Tensor) -> Tensor:
    floating = value.is_floating_point() and value.dtype.itemsize > 1
    return value.detach().requires_grad_() if floating else value


def _parameter(draw: Draw, value: Tensor) -> Tensor:
    return torch.nn.Parameter(value, requires_grad=False)


def _late_negation(draw: Draw, value: Tensor) -> Tensor:
    """Return an equal tensor whose memory holds the negated values (its negative bit is set)."""
    return torch._neg_view(value.neg()) if value.dtype in FLOATS + INTEGERS else value


def _one_dimension_more(draw: Draw, value: Tensor) -> Tensor:
    return value.unsqueeze(draw.choice((0, -1)))


def _one_dimension_less(draw: Draw, value: Tensor) -> Tensor:
    return value.flatten() if value.dim() > 1 else value.sum()


_STRANGE: tuple[Callable[[Draw, Tensor], Tensor], ...] = (
    *(_strided, _overlapping, _sliding, _transposed, _turned_in_memory, _other_dtype, _other_dtype),
    *(_longer, _shorter, _empty, _wild_elements, _wild_elements, _wild_elements),
    *(_last_dimension_apart, _inference, _with_gradient, _parameter, _late_negation),
    *(_one_dimension_more, _one_dimension_less),
)


def _not_dense(draw: Draw, value: Tensor) -> Any:
    kind = draw.randrange(5)
    if kind == 4:
        return value.to("meta")
    if kind == 0:
        return value.to_sparse() if value.dim() else value.expand(2).to_sparse()
    if kind == 1:
        return torch.nested.as_nested_tensor([value.float().expand(2, *value.shape)[0]] * 2)
    if kind == 2 and value.device.type == "cpu":
        return torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8)
    return torch.nested.nested_tensor([value.float().view(-1)], layout=torch.jagged)


def readable(value: Any) -> bool:
    """Return whether a value is a tensor whose numbers can be listed."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return dense and not value.is_meta


def same_kind(draw: Draw, value: Any) -> Any:
    """Return another value of the same type, which an op's schema accepts."""
    if isinstance(value, Tensor):
        return as_strange(draw, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return bent_int(draw, value) % 2**63
    if isinstance(value, float):
        return draw.choice((float("nan"), float("inf"), 0.0, -value, 1e300, 1e-300))
    if isinstance(value, str):
        return draw.choice(
            ("", "thd", "bshd", "token", "bfd", "nonzero", "additive", "\0", "é" * 99)
        )
    if isinstance(value, list) and value:
        at = draw.randrange(len(value))
        changed = [*value[:at], same_kind(draw, value[at]), *value[at + 1 :]]
        return draw.choice((changed, changed, value[:-1], value + value[:1], []))
    return value


def any_kind(draw: Draw, value: Any) -> Any:
    """Return what a user may pass by mistake instead of a value."""
    if isinstance(value, list) and value and draw.chance(0.3):
        return restless(draw, value)
    if draw.chance(0.5):
        if isinstance(value, cuseq.PackedLayout):
            return _other_layout(draw, value)
        return bent_int(draw, value) if type(value) is int else same_kind(draw, value)
    if isinstance(value, Tensor):
        return draw.choice((_not_dense, _listed, lambda *_: wild(draw)))(draw, value)
    if type(value) is int and draw.chance(0.5):
        return draw.choice(
            (float(value), value + 0.5, str(value), numpy.int64(value), draw.ints(value))
        )
    return wild(draw)


def _listed(draw: Draw, value: Tensor) -> Any:
    if not readable(value):
        return []
    return draw.choice(
        (value.tolist, lambda: tuple(value.flatten().tolist()), value.cpu().detach)
    )()


def _other_layout(draw: Draw, packed: cuseq.PackedLayout) -> Any:
    kind = draw.randrange(5)
    if kind == 0:
        return a_layout(draw, a_row(draw))
    if kind == 1:
        return a_layout(draw, a_row(draw), segment_multiple=4)
    if kind == 2:
        return packed.with_total_tokens(packed.total_tokens + draw.choice((1, 16)))
    if kind == 3:
        return packed.cu_seqlens
    return packed.lengths.tolist()


class Clearing:
    """An int that empties lists, mappings and tensors when it is read."""

    def __init__(self, of: list[Any], value: Any):
        self.of, self.value = of, value

    def __index__(self) -> Any:
        for one in self.of:
            if isinstance(one, Tensor):
                one.data = torch.empty(0, dtype=one.dtype)
            else:
                one.clear()
        return self.value


def clear_while_read(draw: Draw, arguments: dict[str, Any]) -> None:
    """Replace an int by one that empties the other arguments when it is read."""
    ints = [name for name, value in arguments.items() if type(value) is int]
    if ints:
        draw.restless = True
        name = draw.choice(ints)
        arguments[name] = Clearing(_clearable(list(arguments.values())), arguments[name])


def _clearable(value: Any) -> list[Any]:
    """Return the lists, mappings and tensors of a value, inner ones too."""
    if isinstance(value, Tensor):
        return [value] if type(value) is Tensor and not value.is_inference() else []
    if not isinstance(value, list | dict):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(one for item in inner for one in _clearable(item))]


def restless(draw: Draw, value: list[Any]) -> Any:
    """Return what gives the same items but changes, or frees them, while it is read."""
    draw.restless = True
    lists = [i for i, item in enumerate(value) if isinstance(item, list) and item]
    is_flat = all(type(one) is int for i in lists for one in value[i])
    if lists and draw.chance(0.3):
        at = draw.choice(lists)
        return [*value[:at], restless(draw, value[at]), *value[at + 1 :]]
    if not is_flat or len(lists) < len(value) or draw.chance(0.3):
        made: list[Any] = list(value)
        at = draw.randrange(len(made))
        made[at] = Clearing([made], made[at])
        return made
    return draw.choice((_refilled, _shrunk, _shrunk_in_numpy))(value)


def _refilled(lists: list[list[Any]]) -> Iterator[list[Any]]:
    one: list[Any] = []
    for items in lists:
        one[:] = items
        yield one


def _shrunk(lists: list[list[Any]]) -> Iterator[Any]:
    for items in lists:
        one = array("q", items)
        yield one
        del one[:]


def _shrunk_in_numpy(lists: list[list[Any]]) -> Iterator[Any]:
    for items in lists:
        one = numpy.array(items)
        yield one
        one.resize(0, refcheck=False)


class Odd:
    """An object of the user's own."""

    def __repr__(self) -> str:
        return "Odd()"


def wild(draw: Draw) -> Any:
    """Return a value of any type."""
    return draw.choice(_WILD)(draw)


_WILD: tuple[Callable[[Draw], Any], ...] = (
    lambda draw: None,
    lambda draw: draw.choice(HUGE),
    lambda draw: -draw.choice(HUGE),
    lambda draw: draw.choice((0, 1, -1, 3)),
    lambda draw: draw.choice((2.5, float("nan"), float("inf"), -0.0, 1e308)),
    lambda draw: draw.choice(("", "a", "cpu", "thd", "token", "bf16", "-1")),
    lambda draw: draw.choice((True, False)),
    lambda draw: draw.choice((b"ab", 1j, Odd(), {}, set(), range(3), ...)),
    lambda draw: draw.choice(([], [2, 3], (1,), [[1], [2, 3]], [None], ["a"], [2.5], [2**70])),
    lambda draw: draw.choice(({"a": 1}, {"input_ids": [1, 2]}, [{"input_ids": [1]}])),
    lambda draw: draw.choice((torch.float32, torch.bfloat16, torch.int32, torch.device("meta"))),
    lambda draw: numpy.array(draw.choice(([1, 2], [1.5], [[1]], 3, ["a"]))),
    lambda draw: as_strange(draw, draw.ints([2, 3])),
    lambda draw: as_strange(draw, draw.floats(2, 3)),
    lambda draw: _not_dense(draw, draw.floats(2, 3)),
    lambda draw: a_layout(draw, a_row(draw)),
)
