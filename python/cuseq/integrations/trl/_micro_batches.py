"""Batches of GRPO and RLOO that are computed in pieces of a bounded number of tokens.

TRL bounds a micro-batch by its samples, whose lengths differ by a hundred times. Here the loss of a
batch is computed piece by piece, each backward before the next forward: as few pieces as the budget
allows, of even numbers of tokens, groups together. Ranks compute equally many. The pieces' losses
are weighted so that their sum, and each metric, is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from cuseq._base.arguments import ceil_div
from cuseq._base.foreign import private

_METRICS = "_metrics"
# TRL's types of loss. Each adds up the losses of a batch's tokens and divides that sum: _SUMS by a
# number that all batches of a step share, the others by the batch's own samples or tokens.
_SUMS = ("cispo", "dapo", "vespo")
_OF_SAMPLES = ("dr_grpo", "grpo", "luspo", "sapo")
_OF_TOKENS = ("bnpo",)

Batch = dict[str, Any]


def check_budget(trainer: Any) -> None:
    """Raise ValueError if the loss of a batch is not a weighted sum of its pieces' losses."""
    args = trainer.args
    known = (*_SUMS, *_OF_SAMPLES, *_OF_TOKENS)
    loss = _loss_type(trainer)
    rules = {
        f"a loss_type of {', '.join(sorted(known))}, got {loss!r}": loss in known,
        "TRL's own _compute_loss": type(trainer)._compute_loss.__module__.startswith("trl."),
        "use_liger_kernel=False": not getattr(trainer, "use_liger_kernel", False),
        "top_entropy_quantile=1.0, which is of the tokens of a batch": (
            getattr(args, "top_entropy_quantile", 1.0) >= 1.0
        ),
        "no entropy bonus, which is a mean over a batch": (
            not getattr(trainer, "_entropy_bonus_enabled", False)
        ),
        "router_aux_loss_coef=0.0: experts are balanced over a batch": (
            not getattr(trainer, "aux_loss_enabled", False)
        ),
        "no DeepSpeed and one GPU a process": (
            trainer.accelerator.distributed_type != DistributedType.DEEPSPEED and args.n_gpu <= 1
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"trainer must have {rule}, for micro_batch_tokens")
    private(trainer, _METRICS)


def _loss_type(trainer: Any) -> str:
    """Return the type of a trainer's loss; RLOO has one, a mean over samples as GRPO's "grpo"."""
    return getattr(trainer, "loss_type", "grpo")


def install_budget(trainer: Any, tokens: int, tree: bool) -> None:
    """Compute each batch in pieces of at most `tokens` tokens; `check_budget` came before.

    Args:
        trainer: a GRPOTrainer or an RLOOTrainer.
        tokens: the most tokens that a piece computes; a longer sample is a piece of its own.
        tree: whether a piece computes a prompt once.
    """
    of_class, own = type(trainer).compute_loss, weakref.ref(trainer)

    def compute_loss(
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        trainer = own()

        def loss_of(batch: Batch) -> Any:
            return of_class(trainer, model, batch, return_outputs, num_items_in_batch)

        if return_outputs or not torch.is_grad_enabled():
            return loss_of(inputs)
        pieces = _cut(trainer, inputs, tokens, tree)
        if len(pieces) == 1:
            return loss_of(inputs)
        # `Trainer.training_step` divides the loss by the batches of an accumulation if both hold.
        is_mean = not trainer.model_accepts_loss_kwargs or num_items_in_batch is None
        is_scaled = is_mean and trainer.compute_loss_func is None
        scale = 1 / trainer.current_gradient_accumulation_steps if is_scaled else 1.0
        return _by_pieces(trainer, model, loss_of, pieces, scale)

    trainer.compute_loss = compute_loss


def remove_budget(trainer: Any) -> None:
    """Undo `install_budget`."""
    vars(trainer).pop("compute_loss", None)


class _Piece(NamedTuple):
    batch: Batch
    samples: int
    learned: int  # tokens in the loss


def _cut(trainer: Any, batch: Batch, tokens: int, tree: bool) -> list[_Piece]:
    """Return a batch in pieces, as many on each rank. Waits for ids and masks."""
    ids, prompts, completions = (
        batch[name].cpu() for name in ("prompt_ids", "prompt_mask", "completion_mask")
    )
    learned = completions * batch["tool_mask"].cpu() if "tool_mask" in batch else completions
    samples = [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, prompts, strict=True)]
    lengths = completions.sum(1).tolist()
    groups = grouped(samples, lengths, tree)
    own = torch.tensor([len(_filled(groups, lengths, tokens))], device=batch["prompt_ids"].device)
    count = int(trainer.accelerator.gather(own).max())
    return [
        _Piece(
            {name: _chosen(value, len(ids), piece) for name, value in batch.items()},
            len(piece),
            int(learned[piece].sum()),
        )
        for piece in even_pieces(groups, lengths, count)
    ]


def _by_pieces(
    trainer: Any,
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    pieces: list[_Piece],
    scale: float,
) -> Tensor:
    """Return the loss of a batch, of which the last piece's backward is still to run.

    Args:
        scale: by which Trainer multiplies the loss before its backward.
    """
    accelerator, metrics = trainer.accelerator, getattr(trainer, _METRICS)["train"]
    before = {name: len(values) for name, values in metrics.items()}
    weights = _weights(trainer, pieces)
    # In an earlier batch of an accumulation Trainer itself does not synchronize.
    synced = accelerator.sync_gradients
    total: Any = 0.0
    for weight, piece in zip(weights[:-1], pieces[:-1], strict=True):
        with accelerator.no_sync(model) if synced else contextlib.nullcontext():
            loss = loss_of(piece.batch) * weight
            with torch.autocast(loss.device.type, enabled=False):
                accelerator.backward(loss * scale)
        total = total + loss.detach()
    total = total + loss_of(pieces[-1].batch) * weights[-1]
    _merge(trainer, metrics, before, pieces)
    return total


def _weights(trainer: Any, pieces: list[_Piece]) -> list[float]:
    """Return by what each piece's loss is multiplied, for the loss of all."""
    kind = _loss_type(trainer)
    if kind in _SUMS:
        return [1.0] * len(pieces)
    counts = [piece.learned if kind in _OF_TOKENS else piece.samples for piece in pieces]
    return [count / max(sum(counts), 1) for count in counts]


def _merge(
    trainer: Any, metrics: dict[str, list[float]], before: dict[str, int], pieces: list[_Piece]
) -> None:
    """Replace what TRL logged for each piece by what it logs for the batch.

    A metric is a mean over tokens or samples of all ranks, or the least or the largest of samples.
    """
    counts = torch.tensor([[piece.learned, piece.samples] for piece in pieces])
    counts = trainer.accelerator.reduce(counts.to(trainer.accelerator.device), reduction="sum")
    tokens, samples = counts.T.tolist()
    of_samples = getattr(trainer, "importance_sampling_level", "sequence") == "sequence"
    for name, values in metrics.items():
        logged = values[before.get(name, 0) :]
        if len(logged) != len(pieces):
            continue
        if name.endswith(("low_min", "high_max")):
            is_least = name.endswith("low_min")
            known = [value for value in logged if not math.isnan(value)]
            merged = (min if is_least else max)(known, default=math.nan)
        else:
            is_ratio = "clip_ratio" in name and of_samples
            counts_of = samples if is_ratio or name == "vespo/phi_seq_mean" else tokens
            parts = [value * count for value, count in zip(logged, counts_of, strict=True) if count]
            merged = sum(parts) / max(sum(counts_of), 1)
        values[before.get(name, 0) :] = [merged]


# ---------------------------------------------------------------------------------------- plans


class Group(NamedTuple):
    """Samples that share a prompt, those of the longest completions first."""

    prompt: int  # its tokens
    samples: list[int]
    tokens: int  # of the prompt and all completions


def grouped(prompts: list[tuple[int, ...]], completions: list[int], tree: bool) -> list[Group]:
    """Return the samples, by number, in groups of which a piece computes the prompt once.

    Args:
        prompts: the tokens of each sample's prompt.
        completions: tokens of each sample's completion.
        tree: whether equal prompts are shared; otherwise each sample is a group.
    """
    shared: dict[Any, list[int]] = {}
    for sample in sorted(range(len(prompts)), key=lambda i: -completions[i]):
        shared.setdefault(prompts[sample] if tree else sample, []).append(sample)
    groups = []
    for samples in shared.values():
        prompt = len(prompts[samples[0]])
        groups.append(Group(prompt, samples, prompt + sum(completions[i] for i in samples)))
    return groups


def even_pieces(groups: list[Group], completions: list[int], count: int) -> list[list[int]]:
    """Return the samples of `count` pieces of even numbers of tokens, by number.

    Args:
        groups: all samples.
        completions: tokens of each sample's completion.
        count: how many pieces, at most the samples.
    """
    pieces = [[sample for group in groups for sample in group.samples]]
    high = sum(group.tokens for group in groups)
    low = ceil_div(high, count)
    while high - low > low // 500:
        middle = (low + high) // 2
        found = _filled(groups, completions, middle)
        if len(found) <= count:
            pieces, high = found, middle
        else:
            low = middle + 1
    while len(pieces) < count:  # this rank needs fewer
        most = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        piece = pieces.pop(most)
        pieces += [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    return pieces


def _filled(groups: list[Group], completions: list[int], tokens: int) -> list[list[int]]:
    """Return pieces of at most `tokens` tokens, each filled before the next begins.

    A piece gets the largest groups that fit, and the largest samples that fit of one more. A sample
    that is longer is a piece of its own.
    """
    rest = list(groups)
    pieces: list[list[int]] = []
    while rest:
        piece: list[int] = []
        left: list[Group] = []
        room = tokens
        for group in sorted(rest, key=lambda group: -group.tokens):
            if group.tokens <= room:
                piece += group.samples
                room -= group.tokens
            else:
                left.append(group)
        for number, group in enumerate(left):
            part, others = _divided(group, completions, room)
            if not part and not piece:
                part, others = group.samples[:1], group.samples[1:]
            if part:
                piece += part
                taken = sum(completions[sample] for sample in part)
                left[number] = Group(group.prompt, others, group.tokens - taken)
                break
        pieces.append(piece)
        rest = [group for group in left if group.samples]
    return pieces


def _divided(group: Group, completions: list[int], room: int) -> tuple[list[int], list[int]]:
    """Return the largest samples of a group that fit, with its prompt, and those that do not."""
    part: list[int] = []
    others: list[int] = []
    room -= group.prompt
    for sample in group.samples:
        if completions[sample] <= room:
            part.append(sample)
            room -= completions[sample]
        else:
            others.append(sample)
    return part, others


def _chosen(value: Any, total: int, samples: list[int]) -> Any:
    """Return the values of these samples, of `total`; a value that is not of samples stays."""
    if isinstance(value, Tensor) and value.dim() > 0 and len(value) == total:
        return value[samples]
    if isinstance(value, list) and len(value) == total:
        return [value[sample] for sample in samples]
    return value
