"""Test that integer arguments mean the same however they lie in memory, in results and in checks.

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


def outcome(target, arguments: dict):
    """Return what a call gives, or the text of its error. The call gets copies of rows."""

    def copied(value):
        if isinstance(value, list):
            return [copied(one) for one in value]
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.clone() if floating else value

    given = {name: copied(value) for name, value in arguments.items()}
    try:
        found = target.call(given)
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return found if found is not None else given["tensors"]  # written in place


def check(target, arguments: dict, name: str, value: Tensor) -> None:
    """Compare all views of an argument's value with a contiguous copy of it."""
    expected = outcome(target, arguments | {name: value})
    for view in VIEWS:
        made = view(value)
        assert torch.equal(made, value)
        found = outcome(target, arguments | {name: made})
        what = f"{target.name}: {view.__name__} {name} = {value.tolist()}"
        if isinstance(found, str) and re.search(
            rf"\b({'|'.join(target.names)})\b.* contiguous", found
        ):
            continue
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected, f"{what}: {found}, not {expected}"
        else:
            torch.testing.assert_close(
                found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
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


def test_targets_may_lie_anywhere():
    weight, hidden = torch.randn(7, 4), torch.randn(3, 4)
    matrix = torch.tensor([[1, JUNK], [-100, JUNK], [6, JUNK]])
    for targets in (matrix[:, 0], torch.tensor(3).expand(3), matrix.flatten()[::2]):
        found = cuseq.token_logprobs(hidden, weight, targets)
        assert torch.equal(found, cuseq.token_logprobs(hidden, weight, targets.contiguous()))
    with pytest.raises(ValueError, match=rf"got targets\[1\] = {JUNK}"):
        cuseq.token_logprobs(hidden[:2], weight, torch.tensor([[1, 0], [JUNK, 0]])[:, 0])
