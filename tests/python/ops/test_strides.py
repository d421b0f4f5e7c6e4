"""Test that tensors mean the same however they lie in memory, in results and in checks.

Views of memory whose gaps hold other numbers: an op gives what it gives for a contiguous copy, the
error too, or refuses the view by name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuseq

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# isort: split
from tests.fuzz.calls import TARGETS  # noqa: E402
from tests.fuzz.values import Draw  # noqa: E402
from tests.fuzz.ways import JUNK, VIEWS  # noqa: E402

OPS = [name for name in TARGETS if name.startswith("torch.ops.cuseq.")]


def is_floating(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def outcome(target, arguments: dict, name: str):
    """Return what a call gives, or the text of its error. The call gets copies of rows, but the
    argument `name` itself.
    """

    def copied(value):
        if isinstance(value, list):
            return [copied(one) for one in value]
        return value.clone() if is_floating(value) else value

    given = {key: value if key == name else copied(value) for key, value in arguments.items()}
    try:
        found = target.call(given)
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return found if found is not None else given["tensors"]  # written in place


def check(target, arguments: dict, name: str, value: Tensor | list[Tensor]) -> None:
    """Compare all views of an argument's value with a contiguous copy of it."""
    values = value if isinstance(value, list) else [value]
    # Kernels of PyTorch may add in another order where rows lie otherwise.
    exact = {} if is_floating(values[0]) else {"rtol": 0, "atol": 0}
    copies = [one.clone(memory_format=torch.contiguous_format) for one in values]
    given = copies if isinstance(value, list) else copies[0]
    expected = outcome(target, arguments | {name: given}, name)
    for view in VIEWS:
        made = [view(one) for one in values]
        assert all(map(torch.equal, made, values))
        given = made if isinstance(value, list) else made[0]
        found = outcome(target, arguments | {name: given}, name)
        what = f"{target.name}: {view.__name__} {name} = {[one.tolist() for one in values]}"
        refusal = rf"\b({'|'.join(target.names)})\b.* (contiguous|single memory location)"
        if any(isinstance(one, str) and re.search(refusal, one) for one in (expected, found)):
            continue  # or the copy is refused, as a gradient that lies otherwise than its x
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected, f"{what}: {found}, not {expected}"
        else:
            torch.testing.assert_close(
                found, expected, **exact, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )


@pytest.mark.parametrize("name", OPS)
def test_a_view_means_what_it_shows(name):
    target, checked = TARGETS[name], 0
    for seed in range(12):
        draw = Draw("cpu")
        draw.begin(seed, 0)
        arguments = target.make(draw)
        for key, value in arguments.items():
            is_ints = isinstance(value, Tensor) and not value.is_floating_point()
            if not is_ints or value.numel() == 0 or value.dim() == 0:
                continue
            value = value.contiguous()
            check(target, arguments, key, value)
            checked += 1
            if value.dtype == torch.bool:
                continue
            for wrong in (-7, torch.iinfo(value.dtype).max // 2):
                changed = value.clone()
                changed.view(-1)[draw.randrange(value.numel())] = wrong
                check(target, arguments, key, changed)
    integers = [
        argument
        for argument in getattr(torch.ops.cuseq, name.split(".")[-1]).default._schema.arguments
        if argument.name in arguments
        and isinstance(arguments[argument.name], Tensor)
        and not arguments[argument.name].is_floating_point()
    ]
    assert checked or not integers


@pytest.mark.parametrize("name", OPS)
def test_a_view_of_rows_means_what_it_shows(name):
    target = TARGETS[name]
    for seed in range(12):
        draw = Draw("cpu")
        draw.begin(seed, 1)
        arguments = target.make(draw)
        for key, value in arguments.items():
            values = value if isinstance(value, list) else [value]
            have_rows = all(is_floating(one) and one.numel() and one.dim() for one in values)
            if values and have_rows:
                check(target, arguments, key, value)


def test_targets_may_lie_anywhere():
    weight, hidden = torch.randn(7, 4), torch.randn(3, 4)
    matrix = torch.tensor([[1, JUNK], [-100, JUNK], [6, JUNK]])
    for targets in (matrix[:, 0], torch.tensor(3).expand(3), matrix.flatten()[::2]):
        found = cuseq.token_logprobs(hidden, weight, targets)
        assert torch.equal(found, cuseq.token_logprobs(hidden, weight, targets.contiguous()))
    with pytest.raises(ValueError, match=rf"got targets\[1\] = {JUNK}"):
        cuseq.token_logprobs(hidden[:2], weight, torch.tensor([[1, 0], [JUNK, 0]])[:, 0])
