"""Which samples of a step of GRPO or RLOO go into which micro-batch.

TRL shuffles the samples that it has generated and cuts them into micro-batches, which tears groups
apart: their prompt is then computed in each. Here the samples of one optimizer step are dealt to
its micro-batches again, as many to each as before, groups together and of even numbers of tokens.
The gradient of the step is the same sum over the same samples.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from cuseq._base.foreign import private

_PREPARE, _BUFFER, _STEP = "_prepare_inputs", "_buffered_inputs", "_step"
_KEYS = ("prompt_ids", "prompt_mask", "completion_mask")

Batch = dict[str, Any]


def check_dealing(trainer: Any) -> None:
    """Raise ValueError if a loss depends on which samples of a step share a micro-batch, or steps
    do not begin with a generated batch.
    """
    args = trainer.args
    steps, window = args.steps_per_generation, args.gradient_accumulation_steps
    rules = {
        "loss_type other than 'bnpo', which divides by the tokens of a micro-batch": (
            getattr(trainer, "loss_type", None) != "bnpo"
        ),
        "top_entropy_quantile=1.0, which is of the tokens of a micro-batch": (
            getattr(args, "top_entropy_quantile", 1.0) >= 1.0
        ),
        f"steps_per_generation a multiple of gradient_accumulation_steps = {window}, got {steps}": (
            steps % window == 0
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"trainer must have {rule}, for regroup=True")
    for name in (_BUFFER, _STEP):
        private(trainer, name)


def install_dealing(trainer: Any, tree: bool) -> None:
    """Deal the samples of each optimizer step to its micro-batches; `check_dealing` came before.

    Args:
        trainer: a GRPOTrainer or an RLOOTrainer.
        tree: whether a micro-batch computes a prompt once.
    """
    window = trainer.args.gradient_accumulation_steps
    prepare, own = getattr(type(trainer), _PREPARE), weakref.ref(trainer)

    def prepared(batch: Any) -> Any:
        trainer = own()
        before = getattr(trainer, _BUFFER)
        inputs = prepare(trainer, batch)
        made = getattr(trainer, _BUFFER)
        if made is before:
            return inputs
        dealt = [
            one
            for begin in range(0, len(made), window)
            for one in deal(made[begin : begin + window], tree)
        ]
        setattr(trainer, _BUFFER, dealt)
        return dealt[getattr(trainer, _STEP) % len(dealt)]

    setattr(trainer, _PREPARE, prepared)


def remove_dealing(trainer: Any) -> None:
    """Undo `install_dealing`."""
    vars(trainer).pop(_PREPARE, None)


def deal(batches: list[Batch], tree: bool) -> list[Batch]:
    """Return micro-batches of the same samples, as many in each, groups together.

    Waits for a copy of ids and masks to the host.
    """
    if any(not isinstance(one.get(name), Tensor) for one in batches for name in _KEYS):
        return batches
    count = len(batches[0][_KEYS[0]])
    if any(len(one[_KEYS[0]]) != count for one in batches):
        return batches
    ids, prompts, completions = (torch.cat([one[name] for one in batches]).cpu() for name in _KEYS)
    order = dealt_samples(
        [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, prompts, strict=True)],
        completions.sum(1).tolist(),
        len(batches),
        tree,
    )
    joined = {name: _joined([one[name] for one in batches], count) for name in batches[0]}
    return [
        {name: _chosen(value, len(batches) * count, samples) for name, value in joined.items()}
        for samples in order
    ]


def dealt_samples(
    prompts: list[tuple[int, ...]], completions: list[int], batches: int, tree: bool
) -> list[list[int]]:
    """Return the samples of each micro-batch, by number.

    The samples of a prompt are one piece, cut where it is larger than a micro-batch. Pieces go, the
    costliest first, to the cheapest micro-batch with room; where none has room for all of a piece
    it is cut again.

    Args:
        prompts: the tokens of each sample's prompt.
        completions: tokens of each sample's completion.
        batches: how many micro-batches, a divisor of the samples.
        tree: whether a micro-batch computes a prompt once.
    """
    room = len(prompts) // batches
    groups: dict[Any, list[int]] = {}
    for sample, prompt in enumerate(prompts):
        groups.setdefault(prompt if tree else sample, []).append(sample)

    def cost(piece: list[int]) -> int:
        shared = len(prompts[piece[0]]) * (1 if tree else len(piece))
        return shared + sum(completions[sample] for sample in piece)

    pieces = [
        group[begin : begin + room]
        for group in groups.values()
        for begin in range(0, len(group), room)
    ]
    pieces.sort(key=cost)
    dealt: list[list[int]] = [[] for _ in range(batches)]
    costs = [0] * batches
    while pieces:
        piece = pieces.pop()
        fitting = [i for i in range(batches) if len(dealt[i]) + len(piece) <= room]
        if not fitting:
            most = max(range(batches), key=lambda i: room - len(dealt[i]))
            rest = room - len(dealt[most])
            pieces += [piece[rest:], piece[:rest]]
            continue
        to = min(fitting, key=lambda i: costs[i])
        dealt[to] += piece
        costs[to] += cost(piece)
    return dealt


def _joined(parts: list[Any], count: int) -> Any:
    """Return values of all micro-batches' samples, `count` in each; one that is not of samples."""
    first = parts[0]
    if isinstance(first, Tensor) and first.dim() > 0 and len(first) == count:
        return torch.cat(parts)
    if isinstance(first, list) and len(first) == count:
        return [item for part in parts for item in part]
    return first


def _chosen(value: Any, total: int, samples: list[int]) -> Any:
    """Return the values of these samples, of `total`; a value that is not of samples stays."""
    if isinstance(value, Tensor) and value.dim() > 0 and len(value) == total:
        return value[samples]
    if isinstance(value, list) and len(value) == total:
        return [value[sample] for sample in samples]
    return value
