"""Warnings that are issued once per process."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Issue the warning, even if this message was issued before."""
    _given.add(message)
    warnings.warn(message, stacklevel=stacklevel + 1)


def warn_once(message: str) -> None:
    """Issue the warning unless this message was issued before."""
    if message not in _given:
        warn(message, stacklevel=2)


def forget_warnings() -> None:
    """Forget which messages were issued, so that they are issued again."""
    _given.clear()
