"""Warnings that are given once in a process."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Warn, whether or not this message was given before."""
    _given.add(message)
    warnings.warn(message, stacklevel=stacklevel + 1)


def warn_once(message: str) -> None:
    """Warn unless this message was given before."""
    if message not in _given:
        warn(message, stacklevel=2)


def forget_warnings() -> None:
    """Give every message again, for tests."""
    _given.clear()
