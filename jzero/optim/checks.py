"""What callers mix up, told before anything is traced: arguments in another order, a state of another `zero`.

Every error is one line that names the argument, what was expected, what was found, and what to write.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jzero.optim.partition import Plan
from jzero.optim.transformation import ZeroState

CALL = "call it as (gradients, state, params)"


def check_inner(inner: Any) -> None:
    """Refuse what is neither a transformation nor a function from parameters to one; `optax.adam` itself, too."""
    if isinstance(inner, optax.GradientTransformation):
        return
    made = inner.func if isinstance(inner, functools.partial) else inner
    name = getattr(made, "__qualname__", type(made).__name__)
    if not callable(inner):
        raise ValueError(f"zero: expected an optax transformation such as optax.adamw(1e-3), found {name}")
    package = str(getattr(made, "__module__", "")).split(".")[0]
    if package in ("optax", "jzero") and "." not in name:  # no function that optax or jzero made
        raise ValueError(f"zero: expected a transformation, found the function {name}; call it, as in {name}(1e-3)")


def check_made(inner: Any) -> optax.GradientTransformation:
    """What a function from parameters to a transformation returned."""
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(
            "zero: expected a function from the parameters to an optax transformation, found one that returns "
            f"{type(inner).__name__}"
        )
    return inner


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """Refuse what is none of an option's choices."""
    if value not in choices:
        raise ValueError(f"{option}: expected one of {', '.join(map(repr, choices))}, found {value!r}")
    return value


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh: expected a jax.sharding.Mesh, as jzero.make_mesh(data=-1) returns, found {type(mesh).__name__}"
        )


def check_arguments(grads: Any, state: Any, params: Any) -> None:
    """Refuse arguments in another order."""
    if isinstance(state, ZeroState) and not isinstance(grads, ZeroState) and not isinstance(params, ZeroState):
        return
    where = {"gradients": grads, "params": params}
    swapped = next((name for name, x in where.items() if isinstance(x, ZeroState)), None)
    found = f"the state in place of the {swapped}" if swapped else f"{type(state).__name__} in place of the state"
    advice = CALL if swapped else f"{CALL}, with the state that init of this transformation returned"
    raise ValueError(f"zero: expected gradients, state and params, found {found}; {advice}")


def check_state(state: ZeroState, expected: ZeroState, plan: Plan, axis: str | None, ranks: int) -> None:
    """Refuse the state of a `zero` with another inner transformation, other options or another number of ranks.

    Args:
        state: as given; inside a manual region, one rank's part.
        expected: what this `zero` keeps, abstract.
        plan: of the state, for these parameters.
        axis, ranks: the data axis and its size.
    """
    for leaf in plan.leaves[:1]:
        if (leaf.axis, leaf.ranks) != (axis, ranks):
            _refuse(f"it is cut into {leaf.ranks} shards over '{leaf.axis}', expected {ranks} over '{axis}'")
    wanted, found = _types(expected), _types(state)
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            _refuse(f"expected {path} {wanted.get(path, 'not there')}, found it {found.get(path, 'missing')}")


def check_updates(plan: Plan) -> None:
    """Refuse optax's `update` for FP8 parameters."""
    for leaf in plan.leaves:
        if leaf.quantised:
            raise ValueError(
                f"{leaf.path}: expected a parameter that an update can be added to, found an FP8 one; in place of "
                "tx.update and optax.apply_updates write params, state = tx.step(grads, state, params)"
            )


def _types(state: ZeroState) -> dict[str, str]:
    """Dtype by path: of everything that a state holds; NNX's Variables stand for their arrays."""
    parts = {"master": state.master, "inner": state.inner, "rounding": state.rounding, "guard": state.guard}
    parts["fp8"] = state.fp8
    return {
        jax.tree_util.keystr(path).replace(".value", ""): str(x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(parts)
    }


def _refuse(what: str) -> None:
    raise ValueError(
        f"zero: the state is of another transformation, other options or another mesh: {what}; use the one that made "
        "it, or jzero.convert"
    )
