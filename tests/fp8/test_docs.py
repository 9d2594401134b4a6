"""The program in docs/fp8.md."""

import pathlib
import re

import jax
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


def test_a_flax_model_trains_with_fp8_parameters():
    names = {}
    section = DOCS.read_text().split("\n## FP8 parameters\n")[1]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y, params, state = jnp.sin(x[:, :8]), names["params"], names["state"]
    before = float(names["loss"](params, x, y))
    for _ in range(20):
        params, state = jax.block_until_ready(names["step"](params, state, x, y))
    assert float(names["loss"](params, x, y)) < 0.5 * before
    assert params["layers_0"]["kernel"].value.dtype == jnp.float8_e4m3fn
    assert names["step"]._cache_size() <= 2  # the parameters came from one device
