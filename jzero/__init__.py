"""jzero: the distributed fused Adam of Apex and NeMo (ZeRO) for JAX, and the GPT training built on it."""

from jzero.errors import JzeroError
from jzero.mesh import AXES, batch_spec, make_mesh
from jzero.optim import (
    DynamicLossScale,
    ZeroState,
    ZeroTransformation,
    clip_by_global_norm,
    convert,
    distributed_fused_adam,
    from_optax,
    scatter_gradients,
    to_optax,
    zero,
)

__version__ = "0.1.0"

__all__ = [
    "AXES",
    "DynamicLossScale",
    "JzeroError",
    "ZeroState",
    "ZeroTransformation",
    "__version__",
    "batch_spec",
    "clip_by_global_norm",
    "convert",
    "distributed_fused_adam",
    "from_optax",
    "make_mesh",
    "scatter_gradients",
    "to_optax",
    "zero",
]
