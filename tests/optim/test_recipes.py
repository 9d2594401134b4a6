"""The recipes of docs/optimizer.md, run as they are printed."""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from optim.contexts import mesh

import jzero

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "optimizer.md"


def block(heading):
    """The first block of code under a heading."""
    text = DOCUMENT.read_text().split(f"\n## {heading}\n")[1]
    return ast.parse(re.search(r"```python\n(.*?)```", text, re.S)[1]).body


def test_every_recipe_for_composing_makes_a_step():
    model = linen.Dense(8)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"] | {"frozen": jnp.ones(5)}
    labels = {"kernel": "body", "bias": "head", "frozen": "frozen"}
    names = {"functools": functools, "jax": jax, "jzero": jzero, "optax": optax, "nnx": nnx, "TrainState": TrainState,
             "mesh": mesh(data=8), "labels": labels, "params": params}  # fmt: skip
    names["model"] = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    made = 0
    for statement in block("Composing"):
        target = statement.targets[0].id
        if target == "state":
            names["model"] = model
        exec(compile(ast.Module([statement], []), str(DOCUMENT), "exec"), names)
        if target == "tx":
            tx, made = names["tx"], made + 1
            updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
            assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert made == 7
    assert isinstance(names["optimizer"], nnx.Optimizer)
    assert isinstance(names["state"].opt_state, jzero.ZeroState)


def test_the_calls_that_move_a_state():
    old = jzero.distributed_fused_adam(1e-3, mesh=mesh(data=8))
    params = {"w": jnp.ones((5, 3), jnp.bfloat16)}
    names = {"jzero": jzero, "tx": old, "old": old, "state": old.init(params), "params": params, "abstract": params,
             "new": jzero.distributed_fused_adam(1e-3, mesh=mesh(data=4), master="fp32")}  # fmt: skip
    exec(compile(ast.Module(block("Moving a state"), []), str(DOCUMENT), "exec"), names)
    assert names["state"].master["w"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(names["params"]["w"], np.float32), 1.0)
