"""One small training problem, and every context in which its gradient can reach the optimizer.

Row i of the batch is a number x_i with loss sum over leaves of (A p - x_i)^2 / 2, elementwise; the mean gradient is
A (A p - mean x), which NumPy knows as well.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

ROWS = 16
BATCH = np.linspace(-1.0, 2.0, ROWS).astype(np.float32)


def values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal values that depend on the name, not on the order."""
    draw = lambda name, shape: np.random.default_rng((seed, zlib.crc32(name.encode()))).normal(size=shape)
    return {name: np.asarray(draw(name, shape), np.float32) for name, shape in shapes.items()}


@functools.cache
def mesh(explicit: bool = False, **sizes: int) -> Mesh:
    """A mesh of the first devices; Auto axes unless told."""
    return jzero.make_mesh(
        **sizes,
        devices=jax.devices()[: math.prod(sizes.values())],
        axis_type=AxisType.Explicit if explicit else AxisType.Auto,
    )


class Problem(NamedTuple):
    """Parameters on a mesh, and the loss."""

    mesh: Mesh
    start: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]
    specs: dict[str, P]

    @property
    def params(self) -> dict[str, jax.Array]:
        return self.place(self.start)

    def place(self, tree: dict[str, np.ndarray], dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        put = lambda k, x: jax.device_put(jnp.asarray(x, dtype), NamedSharding(self.mesh, self.specs[k]))
        return {k: put(k, x) for k, x in tree.items()}

    def gradients(self, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The mean gradient in NumPy."""
        return {k: self.scales[k] * (self.scales[k] * p - BATCH.mean(dtype=np.float64)) for k, p in params.items()}


def problem(mesh: Mesh, shapes: dict[str, tuple[int, ...]], specs: dict[str, P] | None = None) -> Problem:
    """Specs written as `jit` writes them, so that a second compilation is never the test's own doing."""
    explicit = AxisType.Explicit in mesh.axis_types
    given = {name: (specs or {}).get(name, P()) for name in shapes}
    full = lambda name: P(*given[name], *[None] * (len(shapes[name]) - len(given[name])))
    written = {name: full(name) if explicit else given[name] for name in shapes}
    return Problem(mesh, values(shapes), values(shapes, 1), written)


def loss(params: dict, scales: dict, rows: jax.Array, summed: Callable = lambda name, x: x) -> jax.Array:
    """Mean over `rows`, summed over the leaves. `summed(name, x)` adds up the parts of a leaf that is split."""
    first, second = jnp.mean(rows), jnp.mean(jnp.square(rows))
    parts = [
        summed(k, jnp.sum(0.5 * jnp.square(scales[k] * p) - scales[k] * p * first)) + 0.5 * p.size * second
        for k, p in params.items()
    ]
    return sum(parts, jnp.float32(0))


Step = Callable[[Any, Any], tuple[Any, Any, Any]]
"""(params, state) -> (parameters by update, parameters by step, state)."""


def both(tx: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
    """The two forms of one step."""
    updates, after = tx.update(grads, state, params)
    by_update = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    if not hasattr(tx, "step"):
        return by_update, by_update, after
    by_step, _ = tx.step(grads, state, params)
    return by_update, by_step, after


def compiled(pr: Problem, step: Callable[..., Any], *args: Any) -> Step:
    """A step of parameters, state and `args`, as a function of the first two."""
    jitted = jax.jit(step)

    def run(params, state):
        with jax.set_mesh(pr.mesh):
            return jitted(params, state, *args)

    run.jitted, run.args = jitted, args
    return run


def jit_step(pr: Problem, tx: Any) -> Step:
    """Plain jit: XLA sums the gradient."""
    scales = pr.place(pr.scales)
    rows = jax.device_put(BATCH, NamedSharding(pr.mesh, P(batch_axes(pr.mesh))))

    def step(params, state, scales, rows):
        return both(tx, jax.grad(loss)(params, scales, rows), state, params)

    return compiled(pr, step, scales, rows)


def unreduced_step(pr: Problem, tx: Any, axes: tuple[str, ...]) -> Step:
    """Explicit axes, parameters typed as reduced: their gradients arrive as sums that are still to be taken."""

    def value(params, scales, rows):
        def per_leaf(k, p):
            copies = jnp.einsum("b,...->b...", jnp.ones_like(rows), p)
            return jnp.sum(0.5 * jnp.square(scales[k][None] * copies - rows.reshape(-1, *[1] * p.ndim))) / ROWS

        return sum((per_leaf(k, p) for k, p in params.items()), jnp.float32(0))

    def step(params, state, scales, rows):
        reduced = {k: jax.reshard(p, P(*pr.specs[k], reduced=set(axes))) for k, p in params.items()}
        grads = jax.grad(value)(reduced, scales, rows)
        assert all(set(axes) == jax.typeof(g).sharding.spec.unreduced for g in grads.values())
        return both(tx, grads, state, params)

    return compiled(pr, step, pr.place(pr.scales), jax.device_put(BATCH, NamedSharding(pr.mesh, P(axes))))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("replica", "data") if name in mesh.shape)


def manual_step(
    pr: Problem, tx: Any, *, axes: set[str] | None = None, local: bool = True, check_vma: bool = True, state_specs: Any
) -> Step:
    """Inside shard_map over `axes` (default all): gradients local to the rank, or already the mean over ranks."""
    axes = set(pr.mesh.axis_names) if axes is None else axes
    ours = tuple(name for name in batch_axes(pr.mesh) if name in axes)
    keep = functools.partial(within, axes=axes)

    def summed(name, x):
        split = tuple(n for names in keep(pr.specs[name]) for n in _group(names))
        return jax.lax.psum(x, split) if split and check_vma else x

    value = functools.partial(loss, summed=summed)

    def step(params, state, scales, rows):
        mean = lambda x: jax.lax.pmean(x, ours)
        if local:
            seen = jax.tree.map(lambda p: jax.lax.pcast(p, ours, to="varying"), params) if check_vma else params
            grads = jax.grad(value)(seen, scales, rows)
        elif check_vma:
            grads = jax.grad(lambda p: mean(value(p, scales, rows)))(params)  # autodiff sums over the ranks
        else:
            grads = jax.tree.map(mean, jax.grad(value)(params, scales, rows))
        return both(tx, grads, state, params)

    specs = {k: keep(spec) for k, spec in pr.specs.items()}
    state_specs = jax.tree.map(keep, state_specs, is_leaf=lambda x: isinstance(x, P))
    mapped = jax.shard_map(
        step, mesh=pr.mesh, axis_names=axes, in_specs=(specs, state_specs, specs, P(ours)),
        out_specs=(specs, specs, state_specs), check_vma=check_vma,
    )  # fmt: skip
    return compiled(pr, mapped, pr.place(pr.scales), jax.device_put(BATCH, NamedSharding(pr.mesh, P(ours))))


def _group(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def within(spec: P, axes: set[str]) -> P:
    """A spec with only those of its axes."""
    return P(*(tuple(n for n in _group(names) if n in axes) or None for names in spec))


def run(step: Step, params: Any, state: Any, steps: int) -> tuple[Any, Any, Any]:
    """Several steps by `update`; the last one by both forms. Blocks on each: virtual CPU devices must not queue."""
    for _ in range(steps):
        by_update, by_step, state = jax.block_until_ready(step(params, state))
        params = by_update
    return by_update, by_step, state


def assert_close(found: Any, expected: Any, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    for k, x in expected.items():
        np.testing.assert_allclose(np.asarray(found[k], np.float64), x, rtol=rtol, atol=atol, err_msg=k)


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)
