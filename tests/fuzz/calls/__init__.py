"""What is called, with right arguments: every op and every public function."""

from tests.fuzz.calls.target import TARGETS, Target

# isort: split
from tests.fuzz.calls import (
    data,
    functions,
    layouts,
    lives,
    pickles,
    schemas,
    trees,
    vision,
)  # fill TARGETS

__all__ = ["TARGETS", "Target", "data", "functions", "layouts", "lives", "pickles", "schemas"]
__all__ += ["trees", "vision"]
