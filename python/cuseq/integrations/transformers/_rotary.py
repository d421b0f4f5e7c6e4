"""The kinds of rotation that models have, each with its replacement by `cuseq.apply_rope`.

A `Kind` is an adapter: it says which function of a modeling module it can replace (by name and
parameters), finds out on a small input how that function reads its table (`match`), and makes the
replacement (`replace`). CONTRIBUTING, "Add a model family", says when another one is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuseq
from cuseq.cache import remember
from cuseq.integrations.transformers.names import ROTATE

Rotate = Callable[..., Any]
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """How a model's rotation reads its tables of cosines and sines.

    Attributes:
        interleaved: as in `cuseq.apply_rope`.
        turns: number of rotated elements of a head for each column of the table, 1 or 2.
        first_half: whether only the first half of the columns is read.
        backwards: whether the angles turn the other way (NanoChat).
    """

    interleaved: bool
    turns: int
    first_half: bool
    backwards: bool = False

    def arguments(self, cos: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of `apply_rope` for a table with one row per token."""
        width = cos.shape[-1]
        return dict(table="token", interleaved=self.interleaved, rotary_dim=width * self.turns)

    def columns(self, table: Tensor) -> Tensor:
        """Return the columns of a table that are read, contiguous in their last dimension."""
        if self.first_half:
            return table[..., : table.shape[-1] // 2]
        # GPT-OSS has a transposed table.
        return table if table.stride(-1) == 1 else table.contiguous()

    def sines(self, table: Tensor) -> Tensor:
        """Return the columns of a table of sines, with the sign that `apply_rope` takes."""
        if self.backwards:  # once per forward, because all layers get the same table
            return remember(table, "rope_backwards", lambda: -self.columns(table))
        return self.columns(table)

    def rotated(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor | None]:
        """Return query and key rotated by a table of the model."""
        return cuseq.apply_rope(
            q,
            k,
            self.columns(cos),
            self.sines(sin),
            qkv_format=qkv_format,
            **self.arguments(cos),
        )


# In order: halves with a full table, halves with a half table, neighbours with a full table,
# neighbours that read the first half of a full table (GLM), neighbours with a half table, halves
# with a full table and angles that turn the other way (NanoChat).
_ROTARIES = (
    Rotary(False, 1, False),
    Rotary(False, 2, False),
    Rotary(True, 1, False),
    Rotary(True, 1, True),
    Rotary(True, 2, False),
    Rotary(False, 1, False, backwards=True),
)


@dataclass(frozen=True)
class Kind:
    """An adapter for one kind of function that rotates.

    Attributes:
        name: the function's name in its modeling module.
        parameters: the names of its parameters.
        match: called with the function, head sizes that it may be given and what the model's rotary
            embedding returns; returns how the function reads that, or None.
        replace: called with the function and the result of `match`; returns the replacement.
    """

    name: str
    parameters: tuple[str, ...]
    match: Callable[[Rotate, list[int], Any], Rotary | None]
    replace: Callable[[Rotate, Rotary], Rotate]


def _is_known(cos: Tensor, unsqueeze_dim: int, *states: Tensor) -> bool:
    """Return whether `apply_rope` takes the tensors of a call."""
    first = states[0]
    return (
        first.device.type in ("cpu", "cuda")
        and first.dim() == 4
        and cos.dim() == 3
        and unsqueeze_dim in (1, 2)
        and all(one.stride(-1) == 1 and one.dtype == first.dtype for one in states)
    )


def _format(unsqueeze_dim: int) -> str:
    return "bhsd" if unsqueeze_dim == 1 else "bshd"


def _matching(
    widths: list[int],
    tables: Tables,
    expected: Callable[[Tensor, Tensor, Tensor, Tensor], Iterable[Tensor]],
    ours: Callable[[Rotary, Tensor, Tensor, Tensor, Tensor], Iterable[Tensor | None]],
) -> Rotary | None:
    """Return the rotary with which `ours` equals `expected` on random heads, or None.

    Models hand whole heads to their rotation, or only what it rotates (Phi, MLA): then whole heads
    do not fit the table.
    """
    cos, sin = tables
    error = None
    for width in dict.fromkeys((*widths, cos.shape[-1], 2 * cos.shape[-1])):
        q = random_numbers(1, 3, cos.shape[1], width)
        k = random_numbers(1, 2, cos.shape[1], width)
        try:
            rotated = list(expected(q, k, cos, sin))
        except RuntimeError as not_fitting:
            error = error or not_fitting
            continue
        for rotary in _ROTARIES:
            if rotary.turns * cos.shape[-1] > width:
                continue
            try:
                found = list(ours(rotary, q, k, cos, sin))
            except ValueError:
                continue  # the shape of the table does not fit this kind
            if agree(found, rotated):
                return rotary
        return None
    assert error is not None
    raise error


# ------------------------------------------------------------- query and key, cosines and sines


def _match_pair(rotate: Rotate, widths: list[int], tables: Tables) -> Rotary | None:
    return _matching(widths, tables, rotate, lambda r, q, k, c, s: r.rotated(q, k, c, s, "bhsd"))


def _replace_pair(original: Rotate, rotary: Rotary) -> Rotate:
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if k is None or not _is_known(cos, unsqueeze_dim, q, k):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotary.rotated(q, k, cos, sin, _format(unsqueeze_dim))

    def apply_to_one_or_both(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    # Qwen4-Exp's indexer rotates queries alone.
    takes_one = inspect.signature(original).parameters["k"].default is None
    return apply_to_one_or_both if takes_one else apply_rotary_pos_emb


def _replace_pair_with_positions(original: Rotate, rotary: Rotary) -> Rotate:
    rotated = _replace_pair(original, rotary)

    def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        if position_ids is not None:
            return original(q, k, cos, sin, position_ids, unsqueeze_dim)
        return rotated(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


# ------------------------------------------------------------------------- one tensor at a time


def _match_single(rotate: Rotate, widths: list[int], tables: Tables) -> Rotary | None:
    return _matching(
        widths,
        tables,
        lambda q, k, c, s: [rotate(q, c, s)],
        lambda r, q, k, c, s: r.rotated(q, None, c, s, "bhsd")[:1],
    )


def _replace_single(original: Rotate, rotary: Rotary) -> Rotate:
    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
        if not _is_known(cos, unsqueeze_dim, x):
            return original(x, cos, sin, unsqueeze_dim)
        return rotary.rotated(x, None, cos, sin, _format(unsqueeze_dim))[0]

    return apply_rotary_pos_emb


# ------------------------------------- one tensor at a time, heads behind tokens, sines first


def _match_sines_first(rotate: Rotate, widths: list[int], tables: Tables) -> Rotary | None:
    return _matching(
        widths,
        tables[::-1],
        lambda q, k, c, s: [rotate(q.transpose(1, 2), s, c)],
        lambda r, q, k, c, s: r.rotated(q.transpose(1, 2), None, c, s, "bshd")[:1],
    )


def _replace_sines_first(original: Rotate, rotary: Rotary) -> Rotate:
    def apply_rotary_pos_emb(tensor, sin, cos):
        if not _is_known(cos, 2, tensor):
            return original(tensor, sin, cos)
        return rotary.rotated(tensor, None, cos, sin, "bshd")[0]

    return apply_rotary_pos_emb


# ------------------------------------------------- neighbours whose result is reordered to halves


def _halves(x: Tensor | None) -> Tensor:
    assert x is not None
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def _match_reordered(rotate: Rotate, widths: list[int], tables: Tables) -> Rotary | None:
    return _matching(
        widths,
        tables,
        rotate,
        lambda r, q, k, c, s: map(_halves, r.rotated(q, k, c, s, "bhsd")),
    )


def _replace_reordered(original: Rotate, rotary: Rotary) -> Rotate:
    # The elements of query and key stay where they are. The order is the same in both, so all
    # scores are those of the original, which moves the first of each pair in front.
    def apply_rotary_pos_emb_interleave(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        if not _is_known(cos, unsqueeze_dim, q, k):
            q, k = original(q, k, cos, sin, position_ids, unsqueeze_dim)
            return _neighbours(q), _neighbours(k)
        return rotary.rotated(q, k, cos, sin, _format(unsqueeze_dim))

    return apply_rotary_pos_emb_interleave


def _neighbours(x: Tensor) -> Tensor:
    """Undo `_halves`, so that keys of all calls have one order in a cache."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


# -------------------------------------------------------------------------------- complex angles

_HEADS_AT = {"bhsd": 1, "bshd": 2}


def _parts(angles: Tensor) -> Tables:
    """Return cosines and sines `[batch, seqlen, pairs]` of complex angles, once per forward."""

    def make() -> Tables:
        return angles.real.contiguous(), angles.imag.contiguous()

    return remember(angles, "rope_parts", make)


def _match_complex(rotate: Rotate, widths: list[int], angles: Tensor) -> Rotary | None:
    rotary = Rotary(True, 2, False)
    width = 2 * angles.shape[-1]
    for qkv_format, heads in _HEADS_AT.items():
        q, k = (random_numbers(1, n, angles.shape[1], width) for n in (3, 2))
        if heads == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        try:
            expected = rotate(q, k, angles)
        except RuntimeError:
            continue
        cos, sin = angles.real.contiguous(), angles.imag.contiguous()
        if agree(rotary.rotated(q, k, cos, sin, qkv_format), expected):
            return rotary
    return None


def _complex_format(rotate: Rotate) -> str:
    """Return where a function of complex angles has its heads: in DeepSeek V2 before the tokens."""
    q, k = random_numbers(1, 3, 7, 4), random_numbers(1, 2, 7, 4)
    angles = torch.polar(torch.ones(1, 7, 2), random_numbers(1, 7, 2))
    try:
        rotate(q, k, angles)
    except RuntimeError:
        return "bshd"
    return "bhsd"


def _replace_complex(original: Rotate, rotary: Rotary) -> Rotate:
    qkv_format = _complex_format(original)

    def apply_rotary_emb(xq, xk, freqs_cis):
        if not _is_known(freqs_cis, 1, xq, xk):
            return original(xq, xk, freqs_cis)
        return rotary.rotated(xq, xk, *_parts(freqs_cis), qkv_format)

    return apply_rotary_emb


# ------------------------------------------------------------------------- rows of a vision tower


def _match_rows(rotate: Rotate, widths: list[int], angles: Any) -> Rotary | None:
    """Compare on a table of a whole head, or of a part of it."""
    (width,) = widths
    for rotary_dim in (width, width // 4 * 2):
        angle = random_numbers(7, rotary_dim // 2)
        for table, interleaved in (
            (torch.cat([angle, angle], dim=-1), False),
            (angle.repeat_interleave(2, dim=-1), True),
        ):
            q, k = random_numbers(7, 3, width), random_numbers(7, 3, width).flip(0)
            cos, sin = table.cos(), table.sin()
            rotary = Rotary(interleaved, 1, False)
            try:
                if agree(rotary.rotated(q, k, cos, sin, "thd"), rotate(q, k, cos, sin)):
                    return rotary
            except RuntimeError:
                continue  # the function takes tables of whole heads
    return None


def _replace_rows(original: Rotate, rotary: Rotary) -> Rotate:
    def apply_rotary_pos_emb_vision(q, k, cos, sin):
        is_known = q.dim() in (3, 4) and cos.dim() == 2 and q.device.type in ("cpu", "cuda")
        if not is_known or any(one.stride(-1) != 1 or one.dtype != q.dtype for one in (q, k)):
            return original(q, k, cos, sin)
        if q.dim() == 3:
            return rotary.rotated(q, k, cos, sin, "thd")
        return rotary.rotated(q, k, cos[None], sin[None], "bshd")  # Kimi's row is a batch of one

    return apply_rotary_pos_emb_vision


# ------------------------------------------------------------------------------------- the registry

_PAIR = ("q", "k", "cos", "sin", "unsqueeze_dim")

KINDS = (
    Kind(ROTATE, _PAIR, _match_pair, _replace_pair),
    # GPT-OSS before transformers 5.13.
    Kind(
        ROTATE,
        ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
        _match_pair,
        _replace_pair_with_positions,
    ),
    Kind(ROTATE, ("x", "cos", "sin", "unsqueeze_dim"), _match_single, _replace_single),
    Kind(ROTATE, ("tensor", "sin", "cos"), _match_sines_first, _replace_sines_first),
    Kind(
        f"{ROTATE}_interleave",
        ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
        _match_reordered,
        _replace_reordered,
    ),
    Kind("apply_rotary_emb", ("xq", "xk", "freqs_cis"), _match_complex, _replace_complex),
)
NAMES = tuple(dict.fromkeys(kind.name for kind in KINDS))
IN_TOWER = Kind(f"{ROTATE}_vision", ("q", "k", "cos", "sin"), _match_rows, _replace_rows)


def random_numbers(*shape: int) -> Tensor:
    """Return fixed normal fp32 numbers without a change of the user's random state."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator)


def agree(found: Iterable[Tensor | None], expected: Iterable[Tensor]) -> bool:
    """Return whether each tensor equals the expected one up to fp32 rounding."""
    return all(
        one is not None
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(found, expected, strict=True)
    )
