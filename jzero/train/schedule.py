"""NeMo's learning-rate schedules as optax schedules: functions of the number of finished steps.

Source: NVIDIA/NeMo nemo/core/optim/lr_scheduler.py, the classes CosineAnnealing and WarmupPolicy. Legend: s finished
steps (0 for the first), W warmup_steps, C constant_steps, N max_steps, D = N − W − C.

    CosineAnnealing, C = 0:   s ≤ W, W > 0   lr · (s + 1) / (W + 1)
                              s ≤ N          min_lr + (lr − min_lr) · ½ (1 + cos(π (s − W) / (N − W)))
                              later          min_lr
    CosineAnnealing, C > 0:   s ≤ W, W > 0   lr · s / W                         (0 in the first step, as Megatron's)
                              s ≤ W + D      min_lr + (lr − min_lr) · ½ (1 + cos(π (s − W) / D))
                              later          min_lr
    WarmupPolicy:             s ≤ W, W > 0   lr · (s + 1) / (W + 1)
                              s ≤ N          lr
                              later          min_lr

A run that ends before W steps never leaves the warm-up, as in NeMo.
"""

import jax
import jax.numpy as jnp
import optax

from jzero.errors import JzeroError
from jzero.train.config import Config


def schedule(config: Config) -> optax.Schedule:
    """The learning rate of a run, for optax (`optax.adamw(schedule(config))`) and for logs.

    Args:
        config: Read are `model.optim.lr`, `model.optim.sched` and, where `sched.max_steps` is null,
            `trainer.max_steps`.

    Returns:
        A function from the number of finished steps (an int or a traced integer of any shape) to a float32.

    Raises:
        JzeroError: An unknown name, lr below min_lr, or constant_steps where the shape has none.

    Example:
        >>> from jzero.train.config import load_config
        >>> keys = ["model.optim.lr=1", "model.optim.sched={warmup_steps: 3, min_lr: 0}", "trainer.max_steps=7"]
        >>> rate = schedule(load_config(None, keys))
        >>> [round(float(rate(s)), 3) for s in range(9)]
        [0.25, 0.5, 0.75, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    optim, sched = config.model.optim, config.model.optim.sched
    if sched.name not in SHAPES:
        raise JzeroError(f"model.optim.sched.name: expected one of {', '.join(SHAPES)}, found {sched.name}")
    if optim.lr < sched.min_lr:
        raise JzeroError(
            f"model.optim.lr: {optim.lr:g} is below model.optim.sched.min_lr {sched.min_lr:g}; lower min_lr or raise lr"
        )
    if sched.constant_steps and sched.name == "WarmupPolicy":
        raise JzeroError(
            "model.optim.sched.constant_steps: WarmupPolicy has no last steps at min_lr, "
            f"found {sched.constant_steps}; set 0"
        )
    return SHAPES[sched.name](
        optim.lr, sched.min_lr, sched.warmup_steps, sched.constant_steps, sched.max_steps or config.trainer.max_steps
    )


def _cosine_annealing(lr: float, low: float, warmup: int, constant: int, last: int) -> optax.Schedule:
    decay = last - warmup - constant

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        rising = lr * s / max(warmup, 1) if constant else lr * (s + 1) / (warmup + 1)
        # Where the cosine is not taken its denominator may be 0 or negative.
        falling = low + (lr - low) * 0.5 * (1 + jnp.cos(jnp.pi * (s - warmup) / max(decay, 1)))
        return _pieces(s, warmup, rising, warmup + decay, falling, low)

    return rate


def _warmup_policy(lr: float, low: float, warmup: int, constant: int, last: int) -> optax.Schedule:
    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        return _pieces(s, warmup, lr * (s + 1) / (warmup + 1), last, jnp.full_like(s, lr), low)

    return rate


def _pieces(s: jax.Array, warmup: int, rising: jax.Array, end: int, main: jax.Array, low: float) -> jax.Array:
    """`rising` up to and with step `warmup` (never if that is 0), `main` up to and with `end`, then `low`."""
    later = jnp.where(s > end, jnp.float32(low), main)
    return jnp.where(s <= warmup, rising, later) if warmup else later


SHAPES = {"CosineAnnealing": _cosine_annealing, "WarmupPolicy": _warmup_policy}
