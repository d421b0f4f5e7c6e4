"""The label that a loss leaves out."""

IGNORE_INDEX = -100
