"""The short causal convolution of hybrid models, inside the sequences of a packed row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from cuseq import _C
from cuseq._base.arguments import check_flag, check_tensor, shown
from cuseq.layout import PackedLayout, check_layout

_ops = torch.ops.cuseq

_ACTIVATIONS = ("silu", "swish")

_Tensors = tuple[Any, Any, Any, Any, Any, Any, Any]

# Names of a call's tensors in errors.
_PACKED = ("x", "weight", "bias", "cu_seqlens", "cu_seqlens_padded", "seq_idx", "initial_state")
_BATCH = (*_PACKED[:-1], "initial_states")
_STATE_OF_OP = "initial_states"  # as the op's errors name the last of them


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: PackedLayout | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel along the tokens, inside the sequences of a packed row.

    With `w = weight[c]` of width K, `y[t, c]` is `act(bias[c] + sum_i w[K - 1 - i] * x[t - i, c])`
    over the lags i in [0, K) that stay in the token's sequence. This is the short convolution of
    Mamba 2, gated delta nets, KDA and LFM2 (Dao and Gu 2024, arXiv:2405.21060). Convolution, bias
    and SiLU are one kernel. Sums are in float32, or in float64 for float64 inputs, and are rounded
    once.

    Equivalent to, for each sequence `s` of the layout:
        `conv1d(x[s].T, weight.unsqueeze(1), bias, padding=K - 1, groups=C)[:, : len(s)].T`
    The output and the gradient of x are zero on padding and tail, whose values reach no other token
    and no gradient, even if they are NaN.

    Args:
        x: `[total_tokens, channels]`, float32, float64, bfloat16 or float16, with any strides of
            which one is 1; the output has the same order in memory.
        weight: `[channels, K]` of any of these dtypes, K from 2 to 4.
        bias: `[channels]` of the dtype of `weight`, or None.
        packed: the row's layout, on the device of `x`. Default: the row is one sequence.
        activation: None, "silu" or "swish" (another name of silu).
        initial_state: `[n_seqs, channels, K - 1]`, the inputs in front of each sequence, oldest
            first, of any of these dtypes. Default: zeros.
        return_final_state: whether to return the last K - 1 inputs of each sequence too, as an
            initial state of what follows it. They have the dtype of `initial_state`, or of `x`.

    Returns:
        `[total_tokens, channels]`; with `return_final_state` a tuple of it and
        `[n_seqs, channels, K - 1]`. Differentiable once in `x`, `weight`, `bias` and the states;
        gradients are deterministic.

    Raises:
        ValueError, TypeError: shapes, dtypes, strides, devices or the layout do not fit.

    Never synchronises, except that states need the number of sequences, which a layout from
    positions on a GPU has to wait for. Under autocast `x` is cast to the region's dtype; weights
    and states keep theirs. Inside torch.compile one graph serves every pack with the same
    `total_tokens`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> x, weight = torch.ones(5, 1), torch.ones(1, 4)
        >>> cuseq.causal_conv1d(x, weight, packed=packed).flatten()
        tensor([1., 2., 1., 2., 3.])
    """
    check_flag(return_final_state, "return_final_state")
    offsets = padded = None
    if packed is not None:
        check_layout(packed, trees=False)
        padded = packed.cu_seqlens_padded_static
        offsets = packed.cu_seqlens_static
        if initial_state is not None or return_final_state:
            offsets = packed.cu_seqlens
            padded = None if padded is None else packed.cu_seqlens_padded
        has_rows = isinstance(x, Tensor) and not x.is_nested and x.dim() == 2
        if has_rows and x.shape[0] != packed.total_tokens:
            raise ValueError(
                f"x must have the layout's total_tokens = {packed.total_tokens} rows, got "
                f"{list(x.shape)}"
            )
    results = _convolve(
        (x, weight, bias, offsets, padded, None, initial_state),
        activation,
        return_final_state,
        _PACKED,
    )
    return (results[0], results[1]) if return_final_state else results[0]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve a batch as causal-conv1d's function of this name does, with its arguments.

    Args:
        x: `[batch, channels, seqlen]`, dtypes as in `cuseq.causal_conv1d`, contiguous in its last
            dimension or in its channels (a transposed `[batch, seqlen, channels]`).
        weight, bias, activation: as in `cuseq.causal_conv1d`.
        seq_idx: int32 `[batch, seqlen]`. A lag counts if it leads to a token of the same index.
            Tokens of a negative index are padding: their output is zero.
        initial_states: `[batch, channels, width - 1]`; must be None with `seq_idx`.
        return_final_states: whether to return the last `width - 1` inputs of each batch row too.
        final_states_out: where to write these, `[batch, channels, width - 1]`.

    Returns:
        As `x`; with `return_final_states` a tuple of it and `[batch, channels, width - 1]`.

    Raises:
        ValueError, TypeError: as `cuseq.causal_conv1d`.

    Never synchronises.

    Examples:
        >>> x, weight = torch.ones(1, 1, 5), torch.ones(1, 4)
        >>> seq_idx = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
        >>> cuseq.ops.causal_conv1d_fn(x, weight, seq_idx=seq_idx)
        tensor([[[1., 2., 1., 2., 3.]]])
    """
    check_tensor(x, "x")
    check_flag(return_final_states, "return_final_states")
    if x.dim() != 3:
        raise ValueError(f"x must have shape [batch, channels, seqlen], got {list(x.shape)}")
    if final_states_out is not None:
        check_tensor(final_states_out, "final_states_out")
    results = _convolve(
        (x.transpose(1, 2), weight, bias, None, None, seq_idx, initial_states),
        activation,
        return_final_states,
        _BATCH,
    )
    out = results[0].transpose(1, 2)
    if not return_final_states:
        return out
    if final_states_out is None:
        return out, results[1]
    _check_writable(final_states_out, results[1])
    return out, final_states_out.copy_(results[1])


def _check_writable(out: Tensor, states: Tensor) -> None:
    """Raise unless `final_states_out` can take the states."""
    if not out.is_floating_point():
        raise TypeError(f"final_states_out must be floating point, got {out.dtype}")
    owner = out if out._base is None else out._base
    if owner.is_leaf and owner.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "final_states_out must not be a leaf that requires gradients or a view of one, because "
            "autograd refuses to write to it"
        )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "final_states_out must not be an inference tensor outside of InferenceMode, which "
            "refuses to write to it"
        )
    if out.shape != states.shape or _overlaps_itself(out):
        raise ValueError(
            f"final_states_out must have shape {list(states.shape)} and not overlap itself, got "
            f"{list(out.shape)} with strides {out.stride()}"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a dimension steps into the elements of those with smaller strides."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0  # of the dimensions so far, in elements
    for stride, size in sorted((stride, size) for stride, size in sizes if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _convolve(
    tensors: _Tensors, activation: str | None, final_states: bool, names: tuple[str, ...]
) -> list[Tensor]:
    if activation is not None and not (isinstance(activation, str) and activation in _ACTIVATIONS):
        raise ValueError(f'activation must be None, "silu" or "swish", got {shown(activation)}')
    silu = activation is not None
    # The binding makes the same call as torch.ops, with less host time; tracing cannot see it.
    if is_compiling() or has_torch_function_variadic(*tensors[:2]):
        _check_tensors(tensors, names)
        return _ops.causal_conv1d(*tensors, silu, final_states)
    try:
        return _C.causal_conv1d(*tensors, silu, final_states)
    except Exception as error:
        # Replace the binding's error, which prints signatures. Checking before the call would cost
        # time in every call.
        _check_tensors(tensors, names)
        message = str(error)
        if message.startswith(_STATE_OF_OP) and isinstance(error, ValueError | TypeError):
            message = names[-1] + message.removeprefix(_STATE_OF_OP)
            raise type(error)(message) from None
        raise


def _check_tensors(tensors: _Tensors, names: tuple[str, ...]) -> None:
    """Raise a TypeError or ValueError that names the first argument of a wrong type."""
    for value, name in zip(tensors, names, strict=True):
        if value is not None or name in ("x", "weight"):
            check_tensor(value, name)
