"""The program in docs/fp8.md."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "fp8.md"


def test_the_example_trains_and_finds_its_scales():
    names = {}
    exec(re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1], names)
    w, state, x = jnp.ones((4, 3)), names["state"], jnp.ones((2, 4))
    losses = []
    for _ in range(4):
        losses.append(names["loss"](w, state.scale, x))
        w, state = names["step"](w, state, x)
    assert losses == sorted(losses, reverse=True)
    np.testing.assert_array_equal(state.scale[:2], [448, 448])
    assert state.count == 4
