"""The distributed fused Adam: `zero` around AdamW, with Apex's meaning of every option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jzero.optim.zero import ZeroTransformation, zero

_APEX_NAMES = {"lr": "learning_rate", "betas": "b1 and b2", "params": "the argument of init"}


def distributed_fused_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    mesh: Mesh,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    **options: Any,
) -> ZeroTransformation:
    r"""AdamW (or Adam with L2) whose masters and moments are sharded over the data axis.

    .. math::
        m &\leftarrow b_1 m + (1 - b_1) g \qquad v \leftarrow b_2 v + (1 - b_2) g^2 \\
        u &= \frac{m / (1 - b_1^t)}{\sqrt{v / (1 - b_2^t)} + \epsilon} + \lambda p \qquad p \leftarrow p - \eta u

    Args:
        learning_rate: a number or an optax schedule of the step count.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the square root.
        weight_decay: lambda; 0 as in Apex (optax's adamw has 1e-4).
        mask: tree of booleans (or a function from parameters to one): which leaves decay. A function sees the original,
            unsplit shapes as `jax.ShapeDtypeStruct`s.
        mesh: the device mesh.
        adam_w_mode: False adds lambda p to the gradient instead (Apex: the same name).
        bias_correction: False leaves out the two divisions by 1 - b^t (Apex: the same name).
        **options: every option of `zero`: axis, replica_axis, master, state_dtype, stochastic_rounding, gradients,
            grad_sync_dtype, param_sync_dtype, clip_norm, skip_nonfinite, loss_scale, param_specs, stacked,
            fp8_recipe. `state_dtype` by field names the moments `mu` and `nu`.

    Returns:
        An optax transformation with `step`, `state_specs` and `partition_report`, see `zero`.

    Raises:
        TypeError: an option of Apex's optimizer that has another name here; says which.
        ValueError: as `zero`.

    Example:
        >>> import jax, jax.numpy as jnp, jzero, optax
        >>> mesh = jzero.make_mesh(data=-1)
        >>> tx = jzero.distributed_fused_adam(1e-3, b2=0.95, weight_decay=0.1, mesh=mesh)
        >>> params = {"w": jnp.ones((8, 4), jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> updates, state = jax.jit(tx.update)({"w": jnp.ones((8, 4), jnp.bfloat16)}, state, params)
        >>> params = optax.apply_updates(params, updates)

    Sources: Kingma & Ba, arXiv 1412.6980; Loshchilov & Hutter, arXiv 1711.05101; Apex `DistributedFusedAdam`.
    """

    def inner(params: Any) -> optax.GradientTransformation:
        chosen = mask(params) if callable(mask) else mask
        moments = optax.scale_by_adam(b1, b2, eps) if bias_correction else _uncorrected(b1, b2, eps)
        decay, rate = optax.add_decayed_weights(weight_decay, chosen), optax.scale_by_learning_rate(learning_rate)
        return optax.chain(moments, decay, rate) if adam_w_mode else optax.chain(decay, moments, rate)

    for name, instead in _APEX_NAMES.items():
        if name in options:
            raise TypeError(f"distributed_fused_adam: unexpected option {name!r}; here it is {instead}")
    return zero(inner, mesh=mesh, **options)


def _uncorrected(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """m / (sqrt(v) + eps): `optax.scale_by_adam` without bias correction, with its state."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(state.count + 1, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, cast(Any, update))
