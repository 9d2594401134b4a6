"""ZeRO as an optax transformation. Usable alone: imports jax, numpy, optax and `jzero.fp8`. Read `zero.py` first."""

from jzero.optim.adam import distributed_fused_adam
from jzero.optim.chain import clip_by_global_norm, scatter_gradients
from jzero.optim.convert import convert, from_optax, to_optax
from jzero.optim.loss_scale import DynamicLossScale
from jzero.optim.transformation import ZeroState, ZeroTransformation
from jzero.optim.zero import zero

__all__ = [
    "DynamicLossScale",
    "ZeroState",
    "ZeroTransformation",
    "clip_by_global_norm",
    "convert",
    "distributed_fused_adam",
    "from_optax",
    "scatter_gradients",
    "to_optax",
    "zero",
]
