"""Checks of the keywords that describe sequences, without synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuseq._base.arguments import as_int
from cuseq.layout import PackedLayout, special_kind

LENGTHS = "packed_seq_lengths"
"""unsloth's name of the lengths of a row."""

OFFSETS = ("cu_seqlens_q", "cu_seqlens")
"""Other names of `cu_seq_lens_q`, the offsets of the sequences."""


def check_lengths(told: Mapping[str, Any]) -> None:
    """Raise TypeError if given offsets or lengths are not integer tensors."""
    for name in (
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        *OFFSETS,
        LENGTHS,
    ):  # those of keys may stand for both
        value = told.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):  # meta tensors are allowed: the model may be on meta
            raise TypeError(f"{name} must be a tensor of integers, got {type(value).__name__}")
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {value.dtype}")


def check_offsets(cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """Raise ValueError if the offsets cannot be those of one row.

    Values of offsets on a GPU are not checked.
    """
    if cu_q is not None and cu_k is not None and cu_q is not cu_k:
        if cu_q.shape != cu_k.shape:
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal in self-attention, got shapes "
                f"{list(cu_q.shape)} and {list(cu_k.shape)}"
            )
        if _on_host(cu_q) and _on_host(cu_k) and not torch.equal(cu_q, cu_k):
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal in self-attention, got "
                f"{_shown(cu_q)} and {_shown(cu_k)}"
            )
    cu_seqlens = cu_q if cu_q is not None else cu_k
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seq_lens_q must have shape [n_seqs + 1] with at least one sequence, got "
            f"{list(cu_seqlens.shape)} (some data loaders slice every tensor of a batch; "
            "they do not slice `packed`)"
        )


def longest_on_host(max_q: int | Tensor | None, max_k: int | Tensor | None) -> int | None:
    """Return the longest length in tokens; None if neither value is on the host.

    Raises:
        TypeError: a value is not an int.
        ValueError: the values differ.
    """
    given = {"max_length_q": max_q, "max_length_k": max_k}
    lengths = [as_int(value, name) for name, value in given.items() if _on_host(value)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "max_length_q and max_length_k must be equal in self-attention, got "
            f"{lengths[0]} and {lengths[1]}"
        )
    return lengths[0] if lengths else None


def check_agreement(packed: PackedLayout, told: Mapping[str, Any], name: str = "packed") -> None:
    """Raise ValueError if other lengths or offsets of a call contradict its layout.

    Args:
        packed: the layout.
        told: the call.
        name: the keyword that the layout was made of.

    Offsets and lengths may count the tail as further sequences, as TRL's collator does, and may
    omit sequences of length zero. Tensors on a GPU, layouts whose lengths came from a GPU, a rank's
    part of a row and trees are not compared.
    """
    if special_kind(packed) is not None or packed.known_lengths is None:
        return
    longest = longest_on_host(told.get("max_length_q"), told.get("max_length_k"))
    if longest is not None and longest < packed.max_seqlen:
        raise ValueError(
            f"max_length_q must not contradict {name}, got {longest} and a layout whose longest "
            f"sequence has {packed.max_seqlen} tokens"
        )
    for other in ("cu_seq_lens_q", "cu_seq_lens_k", *OFFSETS):
        offsets = told.get(other)
        # Some data loaders slice every tensor of a batch, so that only the offset 0 is left.
        if _on_host(offsets) and offsets is not packed.cu_seqlens and offsets.numel() > 1:
            _check_boundaries(packed, name, other, offsets, offsets)
    lengths = told.get(LENGTHS)
    if _on_host(lengths) and lengths is not packed.lengths:
        _check_boundaries(packed, name, LENGTHS, lengths, _offsets(lengths))


def _check_boundaries(
    packed: PackedLayout, name: str, other: str, given: Tensor, offsets: Tensor
) -> None:
    found = torch.unique_consecutive(offsets.reshape(-1).long())
    for layout in (packed, packed.segments):  # real lengths, then lengths with padding
        expected = torch.unique_consecutive(_offsets(layout.known_lengths))
        if torch.equal(found[: len(expected)], expected):
            return
    raise ValueError(
        f"{other} must not contradict {name}, got {_shown(given)} and a layout of lengths "
        f"{_shown(packed.known_lengths[: packed.num_sequences])}"
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.reshape(-1).long().cumsum(0), (1, 0))


def _on_host(value: Any) -> bool:
    return value.device.type == "cpu" if isinstance(value, Tensor) else value is not None


def _shown(values: Tensor) -> str:
    first = ", ".join(map(str, values.reshape(-1)[:8].tolist()))
    return f"[{first}{', ...' if values.numel() > 8 else ''}]"
