"""ZeRO as an optax transformation. Usable alone: imports jax, numpy and optax only. Read `zero.py` first."""

from jzero.optim.adam import distributed_fused_adam
from jzero.optim.chain import clip_by_global_norm, scatter_gradients
from jzero.optim.zero import ZeroState, ZeroTransformation, zero

__all__ = [
    "ZeroState",
    "ZeroTransformation",
    "clip_by_global_norm",
    "distributed_fused_adam",
    "scatter_gradients",
    "zero",
]
