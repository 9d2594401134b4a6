"""jzero: the distributed fused Adam of Apex and NeMo (ZeRO) for JAX, and the GPT training built on it."""

from jzero.errors import JzeroError
from jzero.mesh import AXES, batch_spec, make_mesh
from jzero.optim import (
    ZeroState,
    ZeroTransformation,
    clip_by_global_norm,
    distributed_fused_adam,
    scatter_gradients,
    zero,
)

__version__ = "0.1.0"

__all__ = [
    "AXES",
    "JzeroError",
    "ZeroState",
    "ZeroTransformation",
    "__version__",
    "batch_spec",
    "clip_by_global_norm",
    "distributed_fused_adam",
    "make_mesh",
    "scatter_gradients",
    "zero",
]
