"""A call of `varlen_attention`: its tensors, its layout and its checked options."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.arguments import (
    as_float,
    as_window,
    check_flag,
    check_tensor,
    check_untransformed,
    shown,
)
from cuseq.layout import PackedLayout, Spans, check_layout
from cuseq.masks.trees import hides_nothing

BACKENDS = tuple(_C.attention_backend_names())
MASKS = ("causal", "full", "window", "two_sided", "spans", "softcap")
WIDEST_FLASH = 256  # head_dim


class Call(NamedTuple):
    """The tensors, layout and options of a call, the only argument of every Python backend."""

    q: Tensor
    k: Tensor
    v: Tensor
    packed: PackedLayout
    causal: bool
    window: int | None
    spans: Spans | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    backend: str

    def mask(self) -> str:
        """Return the kind of the mask, one of `MASKS`, as the measurements name it."""
        if self.softcap is not None:
            return "softcap"
        if self.spans is not None:
            return "spans"
        if self.window is not None:
            return "window" if self.causal else "two_sided"
        return "causal" if self.causal else "full"

    def lacks_varlen_kernel(self) -> bool:
        """Return whether no kernel but flex attention's has the mask for all sequences at once."""
        return self.softcap is not None or self.spans is not None

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores bounded by the soft cap, if there is one."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def is_plain(self) -> bool:
        """Return whether flash kernels take the mask and the heads; flex never wins there in eager
        code.
        """
        return (
            self.softcap is None
            and self.spans is None
            and (self.causal or self.window is None)
            and not is_wide(self.q, self.v)
        )


def is_wide(q: Tensor, v: Tensor) -> bool:
    """Return whether heads are too wide for every flash kernel; False if q or v is not 3-D."""
    return q.dim() == v.dim() == 3 and max(q.shape[2], v.shape[2]) > WIDEST_FLASH


def as_autocast(*rows: Tensor) -> tuple[Tensor, ...]:
    """Return rows in the dtype of an autocast region, as the op casts them; fp64 stays."""
    device = rows[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in rows)


def check_backend(backend: object) -> None:
    """Raise ValueError unless `backend` is a name of a backend or "auto"."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in BACKENDS)
        raise ValueError(f"backend must be one of {names}, got {shown(backend)}")


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Call:
    """Return the call, or raise ValueError or TypeError; the op checks the rest.

    A window over a tree that hides nothing is dropped.
    """
    # Every layer calls this: one look at all three, since calling a function for each takes longer.
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not are_tensors or q.is_meta or k.is_meta or v.is_meta:
        check_rows(q, k, v)
    check_layout(packed)
    if causal is not True and causal is not False:
        check_flag(causal, "causal")
    if window is not None:
        window = as_window(window)
    if scale is not None and not is_compiling():
        scale = as_float(scale, "scale")
        if 0 < scale < 2**-126 and q.dtype != torch.float64:  # zero times -inf would be NaN
            raise ValueError(f"scale must be at least 2^-126 for {q.dtype}, got {scale}")
    if softcap is not None and not is_compiling():
        softcap = as_float(softcap, "softcap")
        if not 2**-100 <= softcap <= 2**100:  # beyond, fp32 has no share of it
            raise ValueError(f"softcap must be None or from 2^-100 to 2^100, got {softcap}")
    if type(backend) is not str or backend != "auto":
        check_backend(backend)
    if sinks is not None:
        if not is_compiling():
            check_rows(q, k, v)
        _check_sinks(q, k, v, sinks)
    if (window is not None or spans is not None or not causal) and packed.tree is not None:
        window = _window_of_tree(packed, causal, window, spans, backend)
    return Call(q, k, v, packed, causal, window, spans, scale, softcap, sinks, backend)


def _window_of_tree(
    packed: PackedLayout, causal: bool, window: int | None, spans: Spans | None, backend: str
) -> int | None:
    if not causal:
        raise ValueError("causal must be True for a tree, got False")
    if spans is not None:
        raise ValueError("spans must be None for a tree")
    if window is None or hides_nothing(packed, window):
        return None
    if backend not in ("auto", "flex"):
        raise ValueError(
            f'backend="{backend}" cannot take this call: its window counts tokens of the '
            'row, not of a path; backend="auto" chooses one that can'
        )
    return window


def check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError unless all three are tensors."""
    for value, name in ((q, "q"), (k, "k"), (v, "v")):
        check_tensor(value, name)


def _check_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> None:
    check_tensor(sinks, "sinks")
    fits = sinks.shape == q.shape[1:2] and sinks.is_floating_point() and sinks.device == q.device
    if not fits and q.dim() == 3:  # the op itself refuses a q of other dimensions
        raise ValueError(
            f"sinks must be floating point [heads = {q.shape[1]}] on {q.device}, got "
            f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )
    for tensor, name in ((q, "q"), (k, "k"), (v, "v"), (sinks, "sinks")):
        check_untransformed(tensor, name, "with sinks, pass the batch as one packed row")
