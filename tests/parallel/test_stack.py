"""Layers of two kinds, each kind a scan of its own: against plain autodiff of a Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.parallel import stack
from jzero.parallel.stack import DataParallel, Layers

LAYERS, WIDTH = 6, 8
ALONE = DataParallel((), (), (), jnp.float32)


def one(w, x, i, slots):
    return x + jnp.tanh(x @ w) * (1 + i)


def other(w, x, i, slots):
    return x * jax.nn.sigmoid(x @ w) + i


@pytest.mark.parametrize(("first", "last"), [(1, 5), (2, 4), (0, 4), (3, 6), (1, 6), (0, 6)])
def test_layers_of_two_kinds_have_the_gradients_of_a_loop(first, last):
    """Kinds change at the layers `first` and `last`."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 3
    x, dy = (jax.random.normal(key, (2, 3, WIDTH)) for key in keys[1:])
    pieces = [piece for piece in ((one, 0, first), (other, first, last), (one, last, LAYERS)) if piece[1] < piece[2]]

    def loop(weights, x):
        for i in range(LAYERS):
            x = (other if first <= i < last else one)(weights[i], x, i, None)
        return x

    @jax.jit
    def scanned(weights, x, dy):
        y, saved = stack.forward(pieces, Layers((weights,)), x, ALONE, keep=True)
        dx, sums, _, _ = stack.backward(saved, dy, ALONE, sums=jnp.zeros_like(weights), scatter=False)
        return y, sums, dx

    expected, vjp = jax.vjp(loop, weights, x)
    y, *gradients = scanned(weights, x, dy)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for found, reference in zip(gradients, vjp(dy), strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4 * float(jnp.abs(reference).max()))
