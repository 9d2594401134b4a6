"""Layers of two kinds in one loop: each number runs its own kind, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.parallel.kinds import Kinds

WIDTH = 4


def plain(w, x, batch, number, slots):
    return x + jnp.sin(x @ w["w"]) * batch * number


def other(w, x, batch, number, slots):  # its backward pass needs more, of other shapes, and it reads the slots
    return x + jnp.cos(x.sum() * slots) * jnp.tanh(x @ w["w"]) + jnp.exp(w["w"]).sum(0)


@pytest.mark.parametrize("number", range(4))
def test_each_layer_is_of_its_kind(number):
    rng = np.random.default_rng(number)
    w, x, dy = ({"w": rng.normal(size=(WIDTH, WIDTH))}, rng.normal(size=(2, WIDTH)), rng.normal(size=(2, WIDTH)))
    w, x, dy = jax.tree.map(jnp.float32, (w, x, dy))
    batch, slots, kinds = jnp.float32(0.5), jnp.float32(2), Kinds(plain, other, 1, 3)
    expected = plain if 1 <= number < 3 else other
    y, vjp = jax.vjp(lambda w, x, slots: expected(w, x, batch, number, slots), w, x, slots)

    @jax.jit
    def both(number):
        y, residuals, rebuild = kinds.vjp(w, x, batch, number, slots)
        return y, kinds(w, x, batch, number, slots), rebuild((w, batch, number, slots), residuals)(dy)

    found, again, gradients = both(jnp.int32(number))
    np.testing.assert_allclose(found, y, rtol=1e-6)
    np.testing.assert_allclose(again, y, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, vjp(dy))
