"""FP8: numerics, recipes, the product of a layer, parameters. Usable alone: imports jax and numpy only.

Read `numerics.py`, `recipes.py`, `dot.py`, then `parameters.py`; docs/fp8.md has the formulas and what was measured.
"""

from jzero.fp8.numerics import E4M3, E5M2, Quantised
from jzero.fp8.parameters import dequantise, quantise
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling, DelayedState
from jzero.fp8.slots import Slots

__all__ = [
    "E4M3",
    "E5M2",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "DelayedState",
    "Quantised",
    "Slots",
    "dequantise",
    "quantise",
]
