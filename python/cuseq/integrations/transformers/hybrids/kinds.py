"""The kinds of mixers that cuseq can make stop at the ends of documents, and the search for them.

A kind is recognised by the functions that a layer's forward calls, not by a class's name, so one
kind serves all families that share the code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from cuseq.integrations.transformers._functions import Function
from cuseq.integrations.transformers.hybrids import functions, layers
from cuseq.integrations.transformers.hybrids.kernels import (
    GATED_DELTA_RULE,
    GATED_LINEAR_ATTENTION,
    KIMI_DELTA_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA_SCAN,
    Kernel,
)

CONVOLUTION = "causal_conv1d_fn"

PARAMETERS = {
    CONVOLUTION: ["hidden_states", "weight", "bias", "activation", "kwargs"],
    "torch_chunk_gated_delta_rule": [
        "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "kwargs",
    ],
    "chunk_kimi_delta_attention": [
        "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "kwargs",
    ],
    "mamba2_chunk_scan": [
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states",
        "dt_softplus", "dt_limit", "return_final_states", "kwargs",
    ],
    "mamba2_split_conv1d_scan_combined": [
        "zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size",
        "initial_states", "dt_limit", "return_final_states", "activation", "rmsnorm_weight",
        "rmsnorm_eps", "outproj_weight", "outproj_bias", "headdim", "ngroups", "norm_before_gate",
        "kwargs",
    ],
}  # fmt: skip
"""The parameters of the functions in PyTorch, whichever package runs them."""


@dataclass(frozen=True)
class Kind:
    """A kind of mixer.

    Attributes:
        what: its recurrence, for messages; None for a convolution alone.
        calls: functions and attributes that its forward uses, by which it is recognised.
        lacks: what its forward must not use.
        replacements: the functions to replace, and what makes each replacement.
        forward: the forward that replaces the mixer's own, if functions are not enough.
        kernels: functions of other packages; without one of them the mixer is slow.
        remedy: how to get one, for a warning.
    """

    what: str | None
    calls: tuple[str, ...]
    replacements: dict[str, Callable[[Function], Function]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    forward: Callable[..., object] | None = None
    kernels: tuple[Kernel, ...] = ()
    remedy: str = ""


_CONVOLVED = {CONVOLUTION: functions.convolution}
KINDS = (
    Kind(
        "the gated delta rule",
        (CONVOLUTION, "torch_chunk_gated_delta_rule"),
        _CONVOLVED | {"torch_chunk_gated_delta_rule": functions.gated_delta_rule},
        kernels=(GATED_DELTA_RULE,),
        remedy=functions.WITH_GATED_FLA,
    ),
    Kind(
        "Kimi delta attention",
        (CONVOLUTION, "chunk_kimi_delta_attention"),
        _CONVOLVED | {"chunk_kimi_delta_attention": functions.kimi_delta_attention},
        kernels=(KIMI_DELTA_ATTENTION,),
        remedy=functions.WITH_FLA,
    ),
    Kind(
        "the Mamba-2 scan",
        (CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"),
        _CONVOLVED
        | {
            "mamba2_chunk_scan": functions.mamba2_scan,
            "mamba2_split_conv1d_scan_combined": functions.fused_mamba2,
        },
        kernels=(MAMBA_SCAN, GATED_LINEAR_ATTENTION),
        remedy=functions.WITH_MAMBA,
    ),
    Kind(
        "Mamba 1",
        (CONVOLUTION, "mamba_selective_scan"),
        forward=layers.mamba_forward,
        remedy=layers.NO_KERNEL,
    ),
    Kind(
        "lightning attention",
        ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "qkv_proj", "output_gate"),
        forward=layers.lightning_forward,
        kernels=(LINEAR_ATTENTION,),
        remedy=functions.WITH_FLA,
    ),
    # A convolution alone, as in LFM2.
    Kind(None, (CONVOLUTION,), _CONVOLVED, lacks=("recurrent_states", "update_recurrent_state")),
)


def kind_of(layer: nn.Module) -> Kind | None:
    """Return the kind of a mixer; None for another module."""
    used = set(inspect.unwrap(type(layer).forward).__code__.co_names)
    return next(
        (kind for kind in KINDS if used.issuperset(kind.calls) and used.isdisjoint(kind.lacks)),
        None,
    )
