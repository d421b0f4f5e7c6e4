"""Test derivatives of every op with autograd: right, or an error that names the op.

Silence is the fault: an op without a formula for forward mode or for second derivatives would give
zero.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import cuseq

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# isort: split
from tests.fuzz.calls import TARGETS  # noqa: E402
from tests.fuzz.values import Draw  # noqa: E402

PREFIX = "torch.ops.cuseq."


def has_autograd(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"cuseq::{name}", "Autograd")


WITH_AUTOGRAD = [
    name.removeprefix(PREFIX)
    for name in TARGETS
    if name.startswith(PREFIX) and has_autograd(name.removeprefix(PREFIX))
]
IN_PLACE = [name for name in WITH_AUTOGRAD if name.endswith("_")]
PURE = [name for name in WITH_AUTOGRAD if not name.endswith("_")]


def test_ops_with_autograd_are_found():
    known = {"gather_rows", "varlen_attention", "apply_rope", "causal_conv1d", "segment_reduce"}
    known |= {"token_logprobs", "apply_qk_norm_rope"}
    assert known <= set(WITH_AUTOGRAD)
    assert {f"{name}_backward" for name in known} & set(TARGETS) <= set(WITH_AUTOGRAD)


class Call:
    """Right arguments of an op in fp64, and the op as a function of those that are rows."""

    # Tables, and what a forward saved: they have no derivatives, and ops may refuse them.
    CONSTANT = ("cos", "sin", "out", "logsumexp", "rstd", "mean", "far_rows")

    def __init__(self, name: str, seed: int):
        draw = Draw("cpu")
        draw.begin(seed, 0)
        self.op = getattr(torch.ops.cuseq, name).default
        made = TARGETS[PREFIX + name].make(draw)
        if "dtype" in made:
            made["dtype"] = torch.float64
        self.arguments = [as_double(value) for value in made.values()]
        self.places = [
            (i, None) if torch.is_tensor(value) else (i, j)
            for i, (key, value) in enumerate(zip(made, self.arguments, strict=True))
            if key not in self.CONSTANT
            for j, one in enumerate(value if isinstance(value, list) else [value])
            if torch.is_tensor(one) and one.is_floating_point() and one.numel() > 0
        ]
        self.inputs = [
            (self.arguments[i] if j is None else self.arguments[i][j]) for i, j in self.places
        ]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = [list(one) if isinstance(one, list) else one for one in self.arguments]
        for (i, j), value in zip(self.places, inputs, strict=True):
            if j is None:
                arguments[i] = value
            else:
                arguments[i][j] = value
        found = self.op(*arguments)
        return tuple(
            one
            for one in torch.utils._pytree.tree_leaves(found)
            if torch.is_tensor(one) and one.is_floating_point() and one.requires_grad
        )


def as_double(value):
    if isinstance(value, list):
        return [as_double(one) for one in value]
    if torch.is_tensor(value) and value.is_floating_point():
        return value.double()
    return value


def some_call(name: str, seed: int) -> Call:
    """Return a call that takes rows of numbers."""
    for attempt in range(50):
        try:
            call = Call(name, 100 * seed + attempt)
            leaves = [one.clone().requires_grad_() for one in call.inputs]
            if leaves and (name in IN_PLACE or any(one.numel() for one in call(*leaves))):
                return call
        except (TypeError, ValueError):  # not of fp64
            continue
    raise AssertionError(f"no right call of {name} was made")


@pytest.mark.parametrize("name", WITH_AUTOGRAD)
def test_forward_mode_is_right_or_refused(name):
    call = some_call(name, 0)
    of = name.removesuffix("_backward")
    refused = pytest.raises(NotImplementedError, match=f"cuseq::{of}.* forward-mode")
    for i in range(len(call.inputs)):
        tangents = [torch.ones_like(one) if i == j else one for j, one in enumerate(call.inputs)]
        with forward_ad.dual_level():
            duals = list(call.inputs)
            duals[i] = forward_ad.make_dual(duals[i].clone(), tangents[i])
            with refused:
                call(*duals)

        def of_one(value, i=i):
            given = list(call.inputs)
            given[i] = value
            return call(*given)

        with refused:
            torch.func.jvp(of_one, (call.inputs[i].clone(),), (tangents[i],))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PURE)
def test_first_and_second_derivatives_are_right_or_refused(name, seed):
    call = some_call(name, seed)
    inputs = [one.clone().requires_grad_() for one in call.inputs]
    try:
        assert gradcheck(call, inputs, atol=1e-4)
    except NotImplementedError as error:  # a backward op
        assert name.endswith("_backward") and "cuseq::" in str(error)
        return
    try:
        assert gradgradcheck(call, inputs, atol=1e-4)
    except NotImplementedError as error:
        assert f"cuseq::{name.removesuffix('_backward')}" in str(error)


# --------------------------------------------------------------------------- functions in Python

PACKED = cuseq.PackedLayout.from_lengths([2, 3])
TREE = cuseq.PackedTree.from_groups([[1, 2]], [[[3], [4]]])
ROWS = torch.randn(5, 2, 8, dtype=torch.float64)
FUNCTIONS = {
    "segment_reduce": lambda x: cuseq.ops.segment_sum(x[:, 0] ** 2, PACKED),
    "segment_reduce ": lambda x: cuseq.ops.segment_max(x[:, 0] ** 2, PACKED),
    "varlen_attention": lambda x: cuseq.varlen_attention(x, x, x, PACKED),
    "varlen_attention ": lambda x: cuseq.varlen_attention(
        x, x, x, PACKED, sinks=torch.zeros(2, dtype=x.dtype)
    ),
    "token_logprobs": lambda x: cuseq.token_logprobs(
        x[:, 0], torch.ones(3, 8, dtype=x.dtype), torch.tensor([0, 1, 2, -100, 1])
    ),
    "PackedTree.gather": lambda x: TREE.gather(x[:4] ** 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right_or_refused(name):
    function, named = FUNCTIONS[name], name.strip()
    x = ROWS.clone().requires_grad_()
    assert gradcheck(function, x)
    try:
        assert gradgradcheck(function, x)
    except NotImplementedError as error:
        assert named in str(error)
    with pytest.raises(NotImplementedError, match=f"{named} has no forward-mode"):
        with forward_ad.dual_level():
            function(forward_ad.make_dual(ROWS, torch.ones_like(ROWS)))
    with pytest.raises(NotImplementedError):
        torch.func.jvp(function, (ROWS,), (torch.ones_like(ROWS),))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused():
    batch = torch.stack([ROWS, -ROWS])
    for name, function in FUNCTIONS.items():
        try:
            found = torch.vmap(function)(batch)
        except NotImplementedError as error:
            assert "torch.vmap" in str(error), name
            continue
        torch.testing.assert_close(found, torch.stack([function(rows) for rows in batch]))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: cuseq.PackedLayout.from_lengths(x, 9), "lengths"),
        (lambda x: cuseq.PackedLayout.from_cu_seqlens(x, 9), "cu_seqlens"),
        (lambda x: cuseq.PackedLayout.from_padding_mask(x[None] > 0), "mask"),
        (lambda x: cuseq.PackedLayout.from_position_ids(x), "position_ids"),
    ],
)
def test_a_layout_of_a_batch_in_vmap_is_refused(make, name):
    with pytest.raises(NotImplementedError, match=f"{name} must not be a tensor of torch.vmap"):
        torch.vmap(lambda x: make(x).position_ids)(torch.tensor([[0, 1], [0, 2]]))
    inside = torch.vmap(lambda x: x + cuseq.PackedLayout.from_lengths([2, 3]).position_ids)
    assert inside(torch.zeros(2, 5)).tolist() == [[0, 1, 0, 1, 2]] * 2


# --------------------------------------------------------------------------- inside transforms

FACTS = ("position_ids", "seq_ids", "seq_idx", "lengths", "cu_seqlens", "cu_seqlens_recurrent")


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_what_is_made_inside_a_transform_stays_usable(transform):
    x = torch.ones(2, dtype=torch.float64)

    def inside(read):
        """Return what `read` gave inside the transform."""
        found = []

        def function(x):
            found.append(read())
            return x.sum()

        if transform == "jvp":
            torch.func.jvp(function, (x,), (x,))
        else:
            getattr(torch.func, transform)(function)(x)
        return found[0]

    def facts_of(packed):
        return {name: getattr(packed, name).tolist() for name in FACTS}

    expected = facts_of(cuseq.PackedLayout.from_lengths([2, 0, 3], 6))
    packed = cuseq.PackedLayout.from_lengths([2, 0, 3], 6)  # its facts are first read inside
    inside(lambda: (facts_of(packed), packed.chunked(2), packed.batch_rows(), packed.dense_mask()))
    for one in (packed, packed.chunked(9), *map(inside, MADE_INSIDE)):
        tensors = [getattr(one, name) for name in FACTS]
        assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
        assert (
            cuseq.varlen_attention(*[torch.ones(one.total_tokens, 1, 8)] * 3, one).isfinite().all()
        )
    assert facts_of(packed) == expected


MADE_INSIDE = (
    lambda: cuseq.PackedLayout.from_lengths([2, 3]),
    lambda: cuseq.PackedLayout.from_lengths([2, 3], segment_multiple=4),
    lambda: cuseq.PackedLayout.from_lengths([]),
    lambda: cuseq.PackedLayout.from_cu_seqlens([0, 2]).with_total_tokens(3),
)


def test_trees_inside_a_transform():
    def function(x):
        tree = cuseq.PackedTree.from_sequences([[1, 2], [1, 3]])
        groups = cuseq.PackedTree.from_groups([[1]], [[[2], [3]]])
        assert tree.layout.position_ids.tolist() == groups.layout.position_ids.tolist() == [0, 1, 1]
        return x.sum()

    torch.func.grad(function)(torch.ones(2))


def test_a_choice_for_a_batch_in_vmap_is_refused():
    packed = cuseq.PackedTree.from_groups([[1, 2]], [[[3], [4]]]).layout
    rows = torch.ones(2, 4, 2, 8)
    for function in (
        lambda x: cuseq.varlen_attention(x, x, x, packed, window=2),
        lambda x: (cuseq.attention_backend(x, x, x, PACKED), x)[1],
    ):
        with pytest.raises(NotImplementedError, match="q must not be a tensor of torch.vmap"):
            torch.vmap(function)(rows)


def test_masks_of_blocks_have_no_batching_rule():
    ranges = torch.ops.cuseq.mask_ranges(torch.tensor([2, 3]), 5)
    with pytest.raises(NotImplementedError, match="cuseq::block_mask has no batching rule"):
        torch.vmap(lambda one: tuple(torch.ops.cuseq.block_mask(one)))(torch.stack([ranges] * 2))


WITH_TABLES = [
    name for name in WITH_AUTOGRAD if "cos" in str(getattr(torch.ops.cuseq, name).default._schema)
]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("table", ["cos", "sin"])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_tables_of_rotations_have_no_derivative(name, table, mode):
    call = some_call(name, 0)
    schema = [one.name for one in call.op._schema.arguments]
    given = [one.detach() if torch.is_tensor(one) else one for one in call.arguments]
    at = schema.index(table)
    refused = pytest.raises(NotImplementedError, match="cos and sin must not require grad")
    if mode == "reverse":
        given[at] = given[at].clone().requires_grad_()
        with refused:
            call.op(*given)
    else:
        with forward_ad.dual_level(), refused:
            given[at] = forward_ad.make_dual(given[at].clone(), torch.ones_like(given[at]))
            call.op(*given)


def test_tables_have_no_derivative_in_any_mode():
    def table(inv_freq):
        return cuseq.rope_table(3, 4, inv_freq=inv_freq)[0]

    inv_freq, tangent = torch.tensor([1.0, 0.1]), torch.ones(2)
    refused = pytest.raises(ValueError, match="inv_freq must not require grad")
    with refused:
        table(inv_freq.clone().requires_grad_())
    with refused:
        torch.func.jvp(table, (inv_freq,), (tangent,))
    with refused, forward_ad.dual_level():
        table(forward_ad.make_dual(inv_freq, tangent))


@pytest.mark.parametrize("shape", [(), (2,), (0,)])
def test_gradients_of_a_tree_without_samples(shape):
    tree = cuseq.PackedTree.from_sequences([], total_tokens=2)
    values = torch.ones(2, *shape, requires_grad=True)
    tree.gather(values).sum().backward()
    assert torch.equal(values.grad, torch.zeros(2, *shape))
