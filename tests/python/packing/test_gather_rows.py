"""Test gather_rows: rows of many tensors taken or filled, and the gradients of their slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_no_sync import waits
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import cuseq  # noqa: F401  loads the op

op = torch.ops.cuseq.gather_rows

INT32_MAX = 2**31 - 1
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]
TRAILING = [(), (1,), (3,), (5, 7), (2, 3, 8), (5120,)]
FILLS = {torch.bool: True, torch.uint8: 255, torch.int32: -100, torch.int64: -(2**63)}


def fill_of(dtype: torch.dtype) -> complex:
    return FILLS.get(dtype, 1.5 - 2j if dtype.is_complex else 0.75)


def make(shape: Sequence[int], dtype: torch.dtype, device, seed: int = 0) -> Tensor:
    """Return random bits; a copy must keep every NaN as it is."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool().view(shape).to(device)
    values = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
    return values.to(torch.uint8).view(dtype).view(shape).to(device)


def ints(device, values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Rows(NamedTuple):
    """Which slots the rows take, each at most once, and the inverse."""

    index: list[int]
    inverse: list[int]

    def on(self, device) -> tuple[Tensor, Tensor]:
        return ints(device, self.index), ints(device, self.inverse)

    @staticmethod
    def draw(n_rows: int, slots: int, seed: int = 0) -> Rows:
        generator = torch.Generator().manual_seed(seed)
        index = torch.randperm(slots, generator=generator)[: n_rows * 2 // 3].tolist()
        nothing = (-1, -5, slots, INT32_MAX, -INT32_MAX - 1)
        index += [nothing[i % len(nothing)] for i in range(n_rows - len(index))]
        order = torch.randperm(n_rows, generator=generator).tolist()
        return Rows.of([index[i] for i in order], slots)

    @staticmethod
    def of(index: list[int], slots: int) -> Rows:
        inverse = [-1] * slots
        for row, slot in enumerate(index):
            if 0 <= slot < slots:
                inverse[slot] = row
        return Rows(index, inverse)


def check_same(actual: Tensor, expected: Tensor):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.is_contiguous()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def check(tensors, rows: Rows, shape, leading, fills=None):
    fills = [fill_of(t.dtype) for t in tensors] if fills is None else fills
    device = tensors[0].device
    outs = op(tensors, *rows.on(device), shape, leading, fills)
    assert len(outs) == len(tensors)
    for out, tensor, fill in zip(outs, tensors, fills, strict=True):
        check_same(out, reference.gather_rows(tensor, rows.index, shape, leading, fill))


# Views of the shape [*leading, *trailing], each of memory that it does not fill; None if there is
# no such view.


def sliced(lead, trail):
    if not trail:
        return None
    return (*lead, *trail[:-1], trail[-1] + 3), lambda t: t[..., : trail[-1]]


def lines_apart(lead, trail):
    line = (*lead[1:], *trail, 1)
    shape = (lead[0], math.prod(line) + 1)
    return shape, lambda t: t[:, :-1].unflatten(1, line).squeeze(-1)


def turned(lead, trail):
    if len(trail) < 3:
        return None
    shape = (*lead, trail[1], trail[0], *trail[2:])
    return shape, lambda t: t.transpose(len(lead), len(lead) + 1)


def sliced_inside(lead, trail):
    """Return a view of which no two trailing dimensions collapse."""
    if len(trail) < 2:
        return None
    cut = tuple(slice(1, 1 + size) for size in trail[1:])
    return (*lead, trail[0], *(size + 2 for size in trail[1:])), lambda t: t[(..., *cut)]


def aligned_slices(lead, trail):
    """Return slices of heads from a fused row, in units of 16 bytes."""
    if len(trail) < 2:
        return None
    return (*lead, *trail[:-1], trail[-1] + 16), lambda t: t[..., 16:]


LAYOUTS: dict[str, Callable] = {
    "whole": lambda lead, trail: ((*lead, *trail), lambda t: t),
    "expanded": lambda lead, trail: (
        (1, *lead[1:], *trail),
        lambda t: t.expand(*lead, *trail),
    ),
    "expanded in the last": lambda lead, trail: (
        (*lead[:-1], 1, *trail),
        lambda t: t.expand(*lead, *trail),
    ),
    "transposed": lambda lead, trail: (
        (*lead[::-1], *trail),
        lambda t: t.transpose(0, len(lead) - 1),
    ),
    "every other": lambda lead, trail: ((2 * lead[0], *lead[1:], *trail), lambda t: t[1::2]),
    "odd address": lambda lead, trail: (
        (math.prod((*lead, *trail)) + 1,),
        lambda t: t[1:].view(*lead, *trail),
    ),
    "lines apart": lines_apart,
    "sliced": sliced,
    "sliced inside": sliced_inside,
    "aligned slices": aligned_slices,
    "turned": turned,
}


def lay_out(name: str, lead, trail, dtype, device, seed: int = 0) -> Tensor | None:
    layout = LAYOUTS[name](lead, trail)
    if layout is None:
        return None
    shape, view = layout
    tensor = view(make(shape, dtype, device, seed))
    assert tensor.shape == (*lead, *trail)
    return tensor


# --------------------------------------------------------------------------------- values


def test_two_sequences_move_into_one_row(device):
    """Lengths [2, 3], padded to [2, 4], packed into 6 tokens and back."""
    index = ints(device, [0, 1, 4, 5, 6, -1])
    inverse = ints(device, [0, 1, -1, -1, 2, 3, 4, -1])
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]], device=device)
    hidden = ids[..., None] + torch.tensor([0.0, 0.5], device=device)
    packed_ids, packed = op([ids, hidden], index, inverse, [6], 2, [-100, 0.25])
    assert packed_ids.tolist() == [5, 6, 7, 8, 9, -100]
    assert packed[:, 1].tolist() == [5.5, 6.5, 7.5, 8.5, 9.5, 0.25]
    back, padded = op([packed_ids, packed], inverse, index, [2, 4], 1, [0, -1])
    assert back.tolist() == ids.tolist()
    assert padded[..., 0].tolist() == [[5, 6, -1, -1], [7, 8, 9, -1]]


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype, trailing, device):
    rows = Rows.draw(15, 12)
    for name in LAYOUTS:
        for lead in ((12,), (3, 4)):
            tensor = lay_out(name, lead, trailing, dtype, device)
            if tensor is None:
                continue
            for shape in ([15], [5, 3]):
                check([tensor], rows, shape, len(lead))


@st.composite
def calls(draw):
    lead = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    trailing = st.lists(st.integers(0, 9), max_size=4).map(tuple)
    tensors = draw(
        st.lists(st.tuples(st.sampled_from(DTYPES), trailing, st.sampled_from([*LAYOUTS])))
    )
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    return lead, tensors, shape, draw(st.integers(0, 99))


@given(call=calls())
def test_any_tensors_together(call, device):
    lead, drawn, shape, seed = call
    tensors = [
        lay_out(name, lead, trail, dtype, device, seed + i)
        for i, (dtype, trail, name) in enumerate(drawn)
    ]
    tensors = [tensor for tensor in tensors if tensor is not None]
    if tensors:
        rows = Rows.draw(math.prod(shape), math.prod(lead), seed)
        check(tensors, rows, shape, len(lead))


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("count", [2, 15, 16, 17, 40])
def test_many_tensors(count, device):
    """More tensors than one launch takes; rows of all lengths together, some of no bytes."""
    kinds = [(dtype, trail) for dtype in DTYPES for trail in [*TRAILING, (0,)]]
    chosen = [kinds[(i * 29) % len(kinds)] for i in range(count)]
    tensors = [make((20, 30, *trail), dtype, device, i) for i, (dtype, trail) in enumerate(chosen)]
    check(tensors, Rows.draw(700, 600), [700], 2)


@pytest.mark.kernels
@pytest.mark.parametrize("elements", [1, 2, 3, 4, 8, 9, 16, 17, 31, 32, 33, 128, 129, 1024, 1025])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex128], ids=str)
def test_rows_around_every_size_that_changes_the_work(elements, dtype, device):
    for name in ("whole", "odd address", "aligned slices"):
        trail = (elements, 16) if name == "aligned slices" else (elements,)
        tensor = lay_out(name, (37,), trail, dtype, device)
        check([tensor, tensor[:, :0]], Rows.draw(53, 37), [53], 1)


@pytest.mark.kernels
def test_eight_trailing_dimensions_that_do_not_collapse(device):
    inside = (2,) * 9
    tensor = make((3, *(4,) * 9), torch.uint8, device)[(slice(None), *(slice(0, 3, 2),) * 8)]
    tensor = tensor[..., :2]
    assert tensor.shape == (3, *inside)
    check([tensor], Rows.of([2, -1, 0], 3), [3], 1)
    deeper = make((3, *(4,) * 10), torch.uint8, device)[(..., *(slice(0, 3, 2),) * 9, slice(2))]
    with pytest.raises(ValueError, match="at most 8 trailing dimensions"):
        op([deeper], *Rows.of([0], 3).on(device), [1], 1, [0])
    check([deeper.contiguous()], Rows.of([2, -1, 0], 3), [3], 1)


@pytest.mark.kernels
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_elements_between_their_own_addresses(offset, device):
    """Vectors narrower than an element: each has its part of the fill."""
    shape = (5, 3)
    bits = make((16 * 15 + offset,), torch.uint8, device)
    tensor = torch.empty(0, dtype=torch.complex128, device=device)
    tensor.set_(bits.untyped_storage()[offset:], 0, shape, (3, 1))
    assert tensor.data_ptr() % 16 == offset
    rows = Rows.draw(7, 5)
    (out,) = op([tensor], *rows.on(device), [7], 1, [1.5 - 2j])
    aligned = bits[offset:].clone().view(torch.complex128).view(shape)
    check_same(out, reference.gather_rows(aligned, rows.index, [7], 1, 1.5 - 2j))


@pytest.mark.kernels
def test_an_index_may_repeat_and_lead_nowhere(device):
    tensor = make((4, 5), torch.float32, device)
    index = [3, 3, 0, 4, -1, -5, INT32_MAX, -INT32_MAX - 1, 3]
    check([tensor], Rows(index, [2, -1, -1, 0]), [9], 1, [-7])


def test_no_tensors(device):
    assert op([], *Rows.draw(3, 4).on(device), [3], 1, []) == []


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_to_take_or_to_write(device):
    sizes = [((0,), [3]), ((0, 4), [1, 3]), ((2, 0), [3]), ((4,), [0]), ((2, 2), [0, 5])]
    for lead, shape in sizes:
        rows = Rows.draw(math.prod(shape), math.prod(lead))
        tensors = [make((*lead, *trail), torch.int64, device) for trail in ((), (3,), (40,), (0,))]
        check(tensors, rows, shape, len(lead))


def test_lazy_conjugates_and_negatives(device):
    tensor = torch.view_as_complex(torch.arange(24.0, device=device).view(3, 4, 2))
    for lazy in (tensor.conj(), tensor.conj().imag):
        (out,) = op([lazy], *Rows.of([2, 0], 3).on(device), [2], 1, [0])
        assert torch.equal(out, lazy.resolve_conj().resolve_neg()[[2, 0]])


@pytest.mark.slow
def test_past_2_to_the_31_elements(cuda):
    source = torch.empty(65600, 32776, dtype=torch.uint8, device=cuda)
    source.random_(0, 256)
    index = torch.arange(65600, dtype=torch.int32, device=cuda)
    (out,) = op([source], index, index, [65600], 1, [0])
    assert torch.equal(out, source)
    (few,) = op([source], index[-3:].contiguous(), index, [3], 1, [0])
    assert torch.equal(few, source[-3:])


# ---------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, False),
        (torch.bool, 1),
        (torch.uint8, 255),
        (torch.int64, -(2**63)),
        (torch.int64, 2.0),
        (torch.float16, 65504),
        (torch.float16, math.inf),
        (torch.bfloat16, 0.1),  # rounded
        (torch.float32, math.nan),
        (torch.float64, True),
        (torch.float8_e4m3fn, -448),
        (torch.complex64, 1 - 2j),
        (torch.complex64, 3),
        (torch.uint16, 65535),
        (torch.complex32, 1j),
    ],
    ids=str,
)
def test_fills(dtype, fill, device):
    tensor = make((2, 3), dtype, device)
    (out,) = op([tensor], *Rows.of([-1, 1], 2).on(device), [2], 1, [fill])
    expected = torch.full((3,), fill, dtype=dtype, device=device)
    check_same(
        out, torch.stack((expected.view(torch.uint8), tensor[1].view(torch.uint8))).view(dtype)
    )


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, 2),
        (torch.bool, -1),
        (torch.bool, 0.5),
        (torch.uint8, 256),
        (torch.uint8, -1),
        (torch.int32, 2**31),
        (torch.int64, 0.5),
        (torch.int64, 2.0**63),
        (torch.int64, math.nan),
        (torch.int64, math.inf),
        (torch.int64, 1j),
        (torch.float16, 1e5),
        (torch.float32, -1e39),
        (torch.float32, 1j),
        (torch.float8_e4m3fn, 449),
        (torch.float8_e4m3fn, math.inf),
        (torch.complex64, 1e39j),
    ],
    ids=str,
)
def test_a_fill_that_the_dtype_does_not_hold(dtype, fill, device):
    tensors = [torch.zeros(2, device=device), make((2,), dtype, device)]
    with pytest.raises(ValueError, match=rf"fill\[1\].*representable.*{dtype}, got "):
        op(tensors, *Rows.of([0], 2).on(device), [1], 1, [0, fill])


def test_arguments_are_checked(device):
    index, inverse = Rows.of([0, 3, -1], 4).on(device)
    x = torch.zeros(4, 6, device=device)

    def refused(error, message, tensors=(x,), **changed):
        arguments = dict(index=index, inverse=inverse, rows=[3], leading=1, fill=[0] * len(tensors))
        for tensor in tensors, [t.detach().float().requires_grad_() for t in tensors]:
            with pytest.raises(error, match=message):
                op(list(tensor), **{**arguments, **changed})

    refused(TypeError, "index must be int32, got torch.int64", index=index.long())
    refused(TypeError, "inverse must be int32, got torch.float32", inverse=inverse.float())
    refused(ValueError, "index must be contiguous with one dim", index=index[None])
    refused(ValueError, "inverse must be contiguous", inverse=ints(device, [0] * 8)[::2])
    refused(ValueError, "leading must be 1 or 2, got 0", leading=0)
    refused(ValueError, "leading must be 1 or 2, got 3", leading=3)
    for rows in ([], [2], [3, 2], [-3], [-1, -3], [1, 1, 3], [2**40, 2**40]):
        refused(ValueError, "rows must be one or two sizes.*= 3, got", rows=rows)
    refused(ValueError, "fill must hold one number for each of 1 tensors, got 2", fill=[0, 0])
    refused(ValueError, r"tensors\[0\] must have inverse.numel\(\) = 4 slots.*\[4, 6\]", leading=2)
    refused(ValueError, r"tensors\[1\] must have inverse.numel\(\) = 4 slots", (x, x[:3]))
    refused(ValueError, r"tensors\[0\] must have at least leading = 2", (x[:, 0],), leading=2)
    refused(ValueError, r"tensors\[0\] must be contiguous in its last", (x[:, ::2],))
    refused(ValueError, r"tensors\[0\] must be contiguous in its last", (x[:, :1].expand(4, 6),))
    flat = x.new_zeros(2, 2)
    refused(
        ValueError,
        r"tensors\[1\] must have the leading.*\[2, 2\], got \[1, 4\]",
        (flat, flat.view(1, 4)),
        leading=2,
    )
    huge = x.new_zeros(4, 1, dtype=torch.uint8).expand(4, 2**31).unsqueeze(-1)
    with pytest.raises(ValueError, match=r"tensors\[0\].*fewer than 2\^31 bytes"):
        op([huge], index, inverse, [3], 1, [0])


def test_one_device(cuda):
    index, inverse = Rows.of([0], 2).on(cuda)
    x = torch.zeros(2, device=cuda)
    with pytest.raises(ValueError, match=r"tensors\[1\] must lie where index does"):
        op([x, x.cpu()], index, inverse, [1], 1, [0, 0])
    with pytest.raises(ValueError, match="inverse must lie where index does"):
        op([x], index, inverse.cpu(), [1], 1, [0])


def test_the_second_gpu(second_gpu):
    check([make((12, 40), torch.float32, second_gpu)], Rows.draw(9, 12), [9], 1)


# -------------------------------------------------------------------------------- gradients


def leaves(device, lead=(3, 4), trails=((), (5,), (2, 3)), dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(*lead, *trail, dtype=dtype, generator=generator).to(device).requires_grad_()
        for trail in trails
    ]


def gather(rows: Rows, tensors, shape=(7,), leading=2) -> list[Tensor]:
    index, inverse = rows.on(tensors[0].device)
    return op(tensors, index, inverse, list(shape), leading, [0.5] * len(tensors))


def expected_gradient(rows: Rows, tensor: Tensor, grad: Tensor, rows_dims: int = 1) -> Tensor:
    leading = tensor.dim() - (grad.dim() - rows_dims)
    return reference.gather_rows(grad, rows.inverse, tensor.shape[:leading], rows_dims, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("lead", "shape"), [((12,), (7,)), ((3, 4), (7,)), ((12,), (4, 2))])
def test_gradcheck(lead, shape, dtype, device):
    tensors = leaves(device, lead, dtype=dtype)
    rows = Rows.draw(math.prod(shape), 12)

    def function(*tensors):
        return tuple(gather(rows, tensors, shape, len(lead)))

    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


STRIDES = {
    "zero": lambda g: g[(slice(1),) * g.dim()].expand_as(g),
    "zero in rows": lambda g: g[:1].expand_as(g),
    "zero in the last": lambda g: g[..., :1].expand_as(g),
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda g: torch.cat((g, g), -1)[..., : g.shape[-1]],
    "every other": lambda g: g.repeat_interleave(2, -1)[..., ::2],
    "odd address": lambda g: torch.cat((g.new_zeros(1), g.flatten()))[1:].view_as(g),
}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_incoming_gradients_of_any_strides(strides, dtype, device):
    tensors = leaves(device, trails=((), (1,), (5,), (2, 3), (600,)), dtype=dtype)
    for shape in ((8,), (2, 4)):
        rows = Rows.draw(8, 12)
        outs = gather(rows, tensors, shape)
        grads = [STRIDES[strides](torch.randn_like(out)) for out in outs]
        before = [grad.clone() for grad in grads]
        actual = torch.autograd.grad(outs, tensors, grads)
        for tensor, grad, kept, result in zip(tensors, grads, before, actual, strict=True):
            assert torch.equal(grad, kept), "backward must leave the incoming gradient alone"
            assert torch.equal(result, expected_gradient(rows, tensor, grad, len(shape)))


def test_gradients_of_a_sum(device):
    tensors, rows = leaves(device), Rows.draw(7, 12)
    sum(out.sum() for out in gather(rows, tensors)).backward()
    taken = torch.tensor([float(row >= 0) for row in rows.inverse], device=device)
    for tensor in tensors:
        shape = (3, 4, *[1] * (tensor.dim() - 2))
        assert torch.equal(tensor.grad, taken.view(shape).expand_as(tensor))


@pytest.mark.usefixtures("poisoned_memory")
def test_floats_and_integers_together(device):
    """Only floats that require grad get a gradient, whatever they are combined with."""
    trained, frozen, other = leaves(device)
    frozen = frozen.detach()
    ids = torch.arange(12, device=device).view(3, 4)
    rows = Rows.draw(7, 12)
    tensors = [ids, trained, frozen, ids > 4, other]
    index, inverse = rows.on(device)
    outs = op(tensors, index, inverse, [7], 2, [-100, 0, 0, True, 0])
    assert [out.requires_grad for out in outs] == [False, True, False, False, True]
    grads = [torch.randn_like(outs[1]), torch.randn_like(outs[4])]
    actual = torch.autograd.grad([outs[1], outs[4]], [trained, other], grads, retain_graph=True)
    for tensor, grad, result in zip((trained, other), grads, actual, strict=True):
        assert torch.equal(result, expected_gradient(rows, tensor, grad))
    # Only one result used, or only one gradient requested.
    (only,) = torch.autograd.grad([outs[1], outs[4]], other, grads, retain_graph=True)
    assert torch.equal(only, actual[1])
    used, unused = torch.autograd.grad(outs[1], [trained, other], grads[0], allow_unused=True)
    assert torch.equal(used, actual[0]) and unused is None


def test_only_the_indices_are_saved(device):
    tensors = leaves(device)
    index, inverse = Rows.draw(7, 12).on(device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()), lambda t: t
    ):
        op(tensors, index, inverse, [7], 2, [0] * 3)
    assert sorted(saved) == sorted([index.data_ptr(), inverse.data_ptr()])


def test_an_edit_of_the_indices_is_detected(device):
    for edited in range(2):
        tensors, indices = leaves(device), Rows.draw(7, 12).on(device)
        outs = op(tensors, *indices, [7], 2, [0] * 3)
        indices[edited].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outs[0].sum().backward()


def test_forward_mode_is_refused(device):
    x = leaves(device)[0].detach()
    rows = Rows.draw(7, 12)
    with pytest.raises((NotImplementedError, RuntimeError), match="gather_rows.*forward-mode"):
        torch.func.jvp(lambda x: gather(rows, [x])[0], (x,), (x,))


def test_tensors_on_meta_beside_real_indices_are_refused(device):
    """The op would not run: its result would have the shape of rows, but no data."""
    index, inverse = Rows.draw(7, 12).on(device)
    shape = torch.empty(12, 5, device="meta")
    with pytest.raises(
        ValueError, match=rf"tensors\[0\] must lie where index does, on {device}.*got meta"
    ):
        op([shape], index, inverse, [7], 1, [0])
    with pytest.raises(ValueError, match=r"tensors\[0\] must lie where index does, on meta, got"):
        op([torch.zeros(12, 5, device=device)], index.to("meta"), inverse.to("meta"), [7], 1, [0])


# -------------------------------------------------------------------------------- compilers


def test_opcheck(device):
    index, inverse = Rows.draw(6, 12).on(device)
    ids = torch.arange(12, device=device)
    turned = leaves(device, (4, 3), ((5,),))[0].detach().transpose(0, 1)
    # opcheck sums the results in the dtype of the first one.
    cases = [
        ([*leaves(device), ids.view(3, 4)], index, inverse, [6], 2, [0, 0.5, 0, -100]),
        ([*leaves(device, (12,)), ids], index, inverse, [2, 3], 1, [0, 0.5, 0, -100]),
        ([turned.requires_grad_(), ids.view(4, 3).t()], index, inverse, [6, 1], 2, [0, 0]),
        ([], index, inverse, [6], 1, []),
    ]
    for case in cases:
        opcheck(op, case)


def test_the_fake_knows_the_strides():
    rows = Rows.draw(6, 12).on("cpu")
    x = make((4, 3, 5, 2), torch.float32, "cpu").transpose(0, 1)[..., :1]
    (real,) = op([x], *rows, [2, 3], 2, [0])
    (meta,) = op([x.to("meta")], *(t.to("meta") for t in rows), [2, 3], 2, [0])
    assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend, device):
    """One graph for every index, of any size."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)

    def function(x, ids, index, inverse):
        rows, others = op([x * 2, ids], index, inverse, [index.shape[0]], 2, [0, -100])
        return rows * 3, others + 1

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for (b, s), n_rows, seed in (((3, 4), 7, 0), ((3, 4), 7, 1), ((5, 6), 17, 2), ((4, 9), 29, 3)):
        rows = Rows.draw(n_rows, b * s, seed).on(device)
        (x,) = leaves(device, (b, s), ((8,),))
        ids = torch.arange(b * s, device=device).view(b, s)
        expected = function(x, ids, *rows)
        actual = compiled(x, ids, *rows)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        grads = [torch.autograd.grad(outs[0].sum(), x)[0] for outs in (actual, expected)]
        assert torch.equal(*grads)
    assert counter.frame_count == 1


def test_compiled_autograd(device):
    torch.compiler.reset()
    tensors, rows = leaves(device), Rows.draw(7, 12)
    eager = torch.autograd.grad(sum(o.sin().sum() for o in gather(rows, tensors)), tensors)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        sum(o.sin().sum() for o in gather(rows, tensors)).backward()
    for tensor, grad in zip(tensors, eager, strict=True):
        assert torch.equal(tensor.grad, grad)


# ------------------------------------------------------------------------------- on the GPU


def test_nothing_waits(cuda):
    tensors, (index, inverse) = leaves(cuda), Rows.draw(7, 12).on(cuda)

    def body():
        outs = op(tensors, index, inverse, [7], 2, [0] * 3)
        torch.autograd.grad([out.sum() for out in outs], tensors)

    assert not waits(body)


def test_a_captured_graph_reads_its_index(cuda):
    tensors = [leaf.detach() for leaf in leaves(cuda)]
    index, inverse = Rows.draw(7, 12).on(cuda)
    op(tensors, index, inverse, [7], 2, [0.5] * 3)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = op(tensors, index, inverse, [7], 2, [0.5] * 3)
    for seed in range(3):
        rows = Rows.draw(7, 12, seed)
        index.copy_(ints(cuda, rows.index))
        graph.replay()
        for out, tensor in zip(captured, tensors, strict=True):
            check_same(out, reference.gather_rows(tensor, rows.index, [7], 2, 0.5))
