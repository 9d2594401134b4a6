"""Any elementwise optax transformation, on shards; whatever is not elementwise is refused, with the operation named.

`zero` runs its inner transformation on shards, flattened and padded ones among them. That is right only where the
result on a shard is the shard of the result, and where nothing depends on a shape (a mask by shape, a scale by the
number of rows). Both hold by construction here: `init` and `update` are traced on whole parameters, as abstract
arrays of their original shapes, and the traced program is replayed on shards (`replay.py`), which refuses operations
that mix positions. Nothing is sampled, and the compiled step has the same operations as if `inner` ran by itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jzero.optim import replay
from jzero.optim.partition import Plan
from jzero.optim.replay import MixesPositions, Shard, Uniform, Value, Whole

HINTS = {
    "reduce_": "; if it is a norm for clipping, use zero(..., clip_norm=...)",
    "random_": "; draw such numbers before zero in the chain",
}


def on_shards(inner: optax.GradientTransformation, plan: Plan) -> optax.GradientTransformationExtraArgs:
    """The transformation that does to shards what `inner` does to whole parameters.

    Args:
        inner: an elementwise transformation; it sees the original, unflattened shapes, in float32.
        plan: how the parameters are split.

    Returns:
        A transformation whose trees hold shards (`Leaf.shard_shape`, or on one device `Leaf.shard_local_shape`).

    Raises:
        ValueError: on init and update, where `inner` mixes positions of a leaf; names the leaf and the operation.

    Example:
        >>> from jzero import make_mesh
        >>> from jzero.optim.partition import make_plan
        >>> plan = make_plan({"w": jax.ShapeDtypeStruct((8, 4), "float32")}, make_mesh(data=-1), axis="data")
        >>> on_shards(optax.lamb(1e-3), plan).init({"w": jnp.ones((8, 4))})
        Traceback (most recent call last):
            ...
        ValueError: ['w']: zero needs an elementwise transformation, but `reduce_sum` of scale_by_trust_ratio ...
    """
    lifted = _Lifted(optax.with_extra_args_support(inner), plan)
    return optax.GradientTransformationExtraArgs(cast(Any, lifted.init), cast(Any, lifted.update))


class _Lifted:
    """`init` and `update` of one transformation for one plan."""

    def __init__(self, inner: optax.GradientTransformationExtraArgs, plan: Plan):
        self.inner, self.plan = inner, plan

    @functools.cached_property
    def whole(self) -> Any:
        """The parameters as the inner transformation sees them."""
        return self.plan.unflatten([jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self.plan.leaves])

    @functools.cached_property
    def owned(self) -> dict[str, int]:
        """Path of an array of the inner state -> index of the parameter that it belongs to."""
        return self._owned(jax.eval_shape(self.inner.init, self.whole))

    def _owned(self, state: Any) -> dict[str, int]:
        named = jax.tree_util.tree_leaves_with_path(self.whole)
        paths = {_plain(path): i for i, (path, _) in enumerate(named)}
        out = {}
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            ends = (paths.get(_plain(path[i:])) for i in range(len(path) + 1))
            found = next((i for i in ends if i is not None and self.plan.leaves[i].shape == x.shape), None)
            if found is not None:
                out[_plain(path)] = found
        return out

    def init(self, params: Any) -> Any:
        """The inner state, of shards; checks `update` too where its extra arguments are optional."""
        shards = self.plan.flatten(params, "params")
        closed, state = jax.make_jaxpr(self.inner.init, return_shape=True)(self.whole)
        values = self._replay(closed, [Shard(x, i) for i, x in enumerate(shards)])
        self._check_update(state)
        return self._state(state, values, shards)

    def _check_update(self, state: Any) -> None:
        """Trace and replay `update` on abstract shards, now rather than in the first step."""
        for extra in ({}, {"value": jax.ShapeDtypeStruct((), jnp.float32)}):
            try:
                self._trace(state, extra)
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                continue  # one that is required, and that only the caller of the first update knows
            shards = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self.plan.leaves]
            tree = self.plan.unflatten(shards)
            jax.eval_shape(lambda u, s, p, e: self.update(u, s, p, **e), tree, state, tree, extra)
            return

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The inner update, on shards."""
        grads, whole = (self.plan.flatten(tree, what) for tree, what in ((updates, "gradients"), (params, "params")))
        kept = [self._value(x, _plain(path)) for path, x in jax.tree_util.tree_leaves_with_path(state)]
        abstract = jax.tree.unflatten(jax.tree.structure(state), [self._original(v) for v in kept])
        closed, out = self._trace(abstract, jax.tree.map(_abstract, extra))
        values = [
            *(Shard(x, i) for i, x in enumerate(grads)),
            *kept,
            *(Shard(x, i) for i, x in enumerate(whole)),
            *(replay.plain(jnp.asarray(x), "an extra argument") for x in jax.tree.leaves(extra)),
        ]
        results = self._replay(closed, values)
        new = self._updates(results[: len(grads)], grads)
        return self.plan.unflatten(new), self._state(out[1], results[len(grads) :], grads)

    def _trace(self, state: Any, extra: dict[str, Any]) -> Any:
        run = lambda updates, state, params, extra: self.inner.update(updates, state, params, **extra)
        closed, out = jax.make_jaxpr(run, return_shape=True)(self.whole, state, self.whole, extra)
        self.plan.flatten(out[0], "updates of the inner transformation")
        return closed, out

    def _value(self, x: Any, path: str) -> Value:
        leaf = self.owned.get(path)
        return replay.plain(x, f"its state {path}") if leaf is None else Shard(x, leaf)

    def _original(self, value: Value) -> jax.ShapeDtypeStruct:
        """An array of the inner state, as the inner transformation made it."""
        shape = self.plan.leaves[value.leaf].shape if isinstance(value, Shard) else jnp.shape(value.value)
        return jax.ShapeDtypeStruct(shape, value.value.dtype)

    def _replay(self, closed: Any, values: list[Value]) -> list[Value]:
        try:
            return replay.evaluate(closed.jaxpr, closed.consts, values)
        except MixesPositions as found:
            names = " and ".join(self.plan.leaves[i].path for i in found.leaves)
            hint = next((text for start, text in HINTS.items() if found.operation.startswith(start)), "")
            raise ValueError(
                f"{names}: zero needs an elementwise transformation, but `{found.operation}`{_place(found.equations)} "
                f"{found.what}; use it without zero{hint}"
            ) from None

    def _updates(self, results: Sequence[Value], shards: Sequence[Array]) -> list[Array]:
        return [self._shard(v, i, x, "update") for i, (v, x) in enumerate(zip(results, shards, strict=True))]

    def _state(self, structure: Any, results: Sequence[Value], shards: Sequence[Array]) -> Any:
        out = []
        for (path, _), v in zip(jax.tree_util.tree_leaves_with_path(structure), results, strict=True):
            owner = self.owned.get(_plain(path))
            if owner is not None:
                out.append(self._shard(v, owner, shards[owner], f"state {_plain(path)}"))
            elif isinstance(v, Shard):
                raise ValueError(
                    f"{self.plan.leaves[v.leaf].path}: zero needs an elementwise transformation, but its state "
                    f"{_plain(path)} holds values of this leaf under a path that does not end in the leaf's; use it "
                    "without zero"
                )
            else:
                out.append(replay.array(v))
        return jax.tree.unflatten(jax.tree.structure(structure), out)

    def _shard(self, value: Value, leaf: int, like: Array, what: str) -> Array:
        """A result that belongs to a parameter, as its shard."""
        if isinstance(value, Uniform):
            return jnp.broadcast_to(value.value, like.shape)
        if isinstance(value, Shard) and value.leaf == leaf:
            return value.value
        source = self.plan.leaves[value.leaf].path if isinstance(value, Shard) else cast(Whole, value).origin
        raise ValueError(
            f"{self.plan.leaves[leaf].path}: zero needs an elementwise transformation, but the {what} of this leaf "
            f"comes from {source}; use it without zero"
        )


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x))


def _plain(path: Sequence[Any]) -> str:
    """A path as text; NNX's Variables stand for their arrays."""
    return jax.tree_util.keystr(tuple(path)).replace(".value", "")


def _place(equations: Sequence[Any]) -> str:
    """Where an operation comes from: " of scale_by_trust_ratio (transform.py:123)"."""
    tracebacks = [getattr(getattr(e, "source_info", None), "traceback", None) for e in equations]
    frames = [frame for traceback in tracebacks for frame in getattr(traceback, "frames", ())]
    ours = [f for f in frames if f"{os.sep}jax{os.sep}" not in f.file_name and ".<locals>." in f.function_name]
    chosen = [f for f in ours if f.function_name.split(".")[2].startswith(("update", "init"))] or ours
    for frame in chosen:
        if frame.function_name.split(".")[0] not in ("tree_map", "chain", "with_extra_args_support", "_Lifted"):
            name = frame.function_name.split(".")[0]
            return f" of {name} ({os.path.basename(frame.file_name)}:{frame.line_num})"
    return ""
