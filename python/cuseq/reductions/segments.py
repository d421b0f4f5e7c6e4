"""Reductions over the sequences of a packed row, and log-probabilities of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq._base.arguments import as_float, as_int, check_flag, check_tensor
from cuseq.layout import PackedLayout, check_layout

_ops = torch.ops.cuseq


def segment_sum(values: Tensor, packed: PackedLayout) -> Tensor:
    """Return the sum of each sequence's values: of log-probabilities, the sequence's own.

    Sums are in fp32, or fp64 for fp64, in one kernel and always in the same order.

    Args:
        values: `[total_tokens, ...]`, floating point, on the layout's device.
        packed: the row's layout.

    Returns:
        `[n_seqs, ...]` in fp32, or fp64 for fp64; zero for an empty sequence. Padding and tail
        count nowhere, and their gradients are zero.

    Raises:
        ValueError: `packed` is a rank's part of a row, whose documents may continue on other ranks.
        ValueError, TypeError: shapes, dtypes, devices or the layout do not fit.

    Waits only for the number of sequences, if the layout's lengths came from a GPU. One compiled
    graph serves every number of sequences, for layouts of one `total_tokens` and `max_seqs`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> cuseq.ops.segment_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), packed)
        tensor([ 3., 12.])
    """
    return _reduced(values, packed, "sum")


def segment_mean(values: Tensor, packed: PackedLayout) -> Tensor:
    """Return the mean of each sequence's values; zero for an empty sequence.

    Arguments, errors and synchronisation are those of `segment_sum`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> cuseq.ops.segment_mean(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), packed)
        tensor([1.5000, 4.0000])
    """
    return _reduced(values, packed, "mean")


def segment_max(values: Tensor, packed: PackedLayout) -> Tensor:
    """Return the largest of each sequence's values; -inf for an empty sequence.

    The gradient goes to the first of several equal values. NaN counts as larger than any number.
    Arguments, errors and synchronisation are those of `segment_sum`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> cuseq.ops.segment_max(torch.tensor([1.0, 2.0, 5.0, 4.0, 3.0]), packed)
        tensor([2., 5.])
    """
    return _reduced(values, packed, "max")


def segment_last(values: Tensor, packed: PackedLayout) -> Tensor:
    """Return the value of each sequence's last token, where reward models score; zero for an empty
    sequence.

    Arguments, errors and synchronisation are those of `segment_sum`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> cuseq.ops.segment_last(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), packed)
        tensor([2., 5.])
    """
    return _reduced(values, packed, "last")


def _reduced(values: Tensor, packed: PackedLayout, kind: str) -> Tensor:
    check_tensor(values, "values")
    check_layout(packed, parts=False)  # whose sequences are pieces, not documents
    if values.dim() == 0 or values.shape[0] != packed.total_tokens:
        raise ValueError(
            f"values must have the layout's total_tokens = {packed.total_tokens} rows, got shape "
            f"{list(values.shape)}"
        )
    columns = values.shape[1:].numel()
    flat = values.reshape(values.shape[0], columns).contiguous()
    if is_compiling():
        offsets, padded = packed.cu_seqlens_static, packed.cu_seqlens_padded_static
        out, _ = _ops.segment_reduce(flat, offsets, kind, padded, packed.host_meta)
    else:
        padded = packed.cu_seqlens_padded if packed.pads_between_sequences else None
        out, _ = _ops.segment_reduce(flat, packed.cu_seqlens, kind, padded)
    return out.view(out.shape[0], *values.shape[1:])


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target under a language model's head.

    The logits of `chunk_size` tokens at a time are in memory, in forward and backward; those of all
    tokens never are. The backward computes them again.

    `model_logprobs` reads weight, bias, scale and softcap from a model.

    Equivalent to:
        `logits = (hidden @ weight.T + bias).float() * scale`, with `softcap` then
        `logits = softcap * tanh(logits / softcap)`, and
        `log_softmax(logits / temperature, 1)[arange(N), targets]`

    Args:
        hidden: `[N, features]`, floating point; of a tree the rows of `PackedTree.targets`.
        weight: `[vocabulary, features]` of the dtype of `hidden`.
        targets: int64 `[N]`; -100 gives 0 and no gradient. On a GPU they are not read by the host:
            one outside the vocabulary gives NaN there.
        bias: `[vocabulary]` of the dtype of `weight`.
        temperature: divides the logits, after `scale` and `softcap`; from 2^-60 to 2^60.
        chunk_size: tokens whose logits are in memory together. Default: as many as make half a
            gigabyte in bf16.
        entropy: whether to return the entropy of each token's distribution too.
        scale: multiplies the logits, bias included (Cohere's `logit_scale`, one over Granite's
            `logits_scaling`); from 2^-60 to 2^60.
        softcap: bound of the logits (Gemma's `final_logit_softcapping`), from 2^-60 to 2^60; None
            for none.

    Returns:
        `[N]` in fp32, or fp64 for fp64; with `entropy` a tuple of it and the entropies `[N]`. Both
        have gradients to `hidden`, `weight` and `bias`, once. Under autocast `hidden`, `weight` and
        `bias` are cast to the region's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, or a target on the host is
            outside the vocabulary.

    Never synchronises.

    Examples:
        >>> hidden, weight = torch.zeros(2, 4), torch.zeros(8, 4)
        >>> cuseq.token_logprobs(hidden, weight, torch.tensor([1, -100]))
        tensor([-2.0794,  0.0000])
    """
    check_tensor(hidden, "hidden")
    check_tensor(weight, "weight")
    check_tensor(targets, "targets")
    if bias is not None:
        check_tensor(bias, "bias")
    check_flag(entropy, "entropy")
    temperature = as_float(temperature, "temperature")
    scale = as_float(scale, "scale")
    if softcap is not None:
        softcap = as_float(softcap, "softcap")
    if chunk_size is not None:
        chunk_size = as_int(chunk_size, "chunk_size", least=1)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    logprobs, entropies, _, _ = _ops.token_logprobs(
        hidden, weight, targets, bias, temperature, chunk_size, entropy, scale, softcap
    )
    return (logprobs, entropies) if entropy else logprobs
