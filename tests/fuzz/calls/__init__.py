"""What is called: every schema of torch.ops.cuseq and every public function, with right arguments."""

from tests.fuzz.calls.target import TARGETS, Target

# isort: split
from tests.fuzz.calls import data, functions, layouts, schemas  # they fill TARGETS

__all__ = ["TARGETS", "Target", "data", "functions", "layouts", "schemas"]
