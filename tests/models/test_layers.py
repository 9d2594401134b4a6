"""Single layers against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.models.config import TransformerConfig
from jzero.models.layers import Linear, Norm
from jzero.parallel.tensor import TensorParallel

cross_entropy = TensorParallel().cross_entropy
X = np.random.default_rng(0).normal(3, 2, (2, 3, 8)).astype(np.float32)


def norm(kind, **values):
    config = TransformerConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, normalization=kind)
    return Norm(config, {name: jnp.full((8,), value) for name, value in values.items()})


def test_layer_norm_has_the_mean_and_deviation_of_its_bias_and_gain():
    y = norm("layernorm", gain=2.0, bias=0.5)(jnp.asarray(X))
    np.testing.assert_allclose(y.mean(-1), 0.5, atol=1e-6)
    np.testing.assert_allclose(y.std(-1), 2.0, rtol=1e-4)


def test_rms_norm_keeps_the_direction():
    y = norm("rmsnorm", gain=2.0)(jnp.asarray(X))
    np.testing.assert_allclose(y / X, np.broadcast_to((y / X)[..., :1], X.shape), rtol=1e-5)
    np.testing.assert_allclose(np.sqrt((y**2).mean(-1)), 2.0, rtol=1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_statistics_of_a_16_bit_norm_are_float32(kind):
    layer = norm(kind, gain=1.0, **({"bias": 0.0} if kind == "layernorm" else {}))
    x = jnp.asarray(1000 + X, jnp.bfloat16)
    found = layer(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, layer(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_projection_over_several_dimensions():
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(2, 4, 5, 3)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    x = X.reshape(2, 3, 2, 4)
    found = Linear({"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}, inputs=2)(jnp.asarray(x))
    np.testing.assert_allclose(found, np.einsum("bthk,hkop->btop", x, weight) + bias, rtol=1e-4, atol=1e-4)
    assert Linear({"weight": jnp.asarray(weight)}, inputs=2)(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_cross_entropy_and_its_gradient():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 30, (2, 3, 7)).astype(np.float32), rng.integers(0, 7, (2, 3), dtype=np.int32)
    weight = rng.normal(size=(2, 3)).astype(np.float32)
    found, vjp = jax.vjp(lambda logits: cross_entropy(logits, labels), jnp.asarray(logits))
    wide = np.float64(logits)
    softmax = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    own = np.eye(7)[labels]
    np.testing.assert_allclose(found, -np.log((softmax * own).sum(-1)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(jnp.asarray(weight))[0], (softmax - own) * weight[..., None], rtol=1e-5, atol=1e-6)


def test_cross_entropy_of_huge_logits_is_finite():
    logits = jnp.array([[[1e30, -1e30, 0.0]]])
    value, grad = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([[0]])).sum())(logits)
    assert float(value) == 0
    np.testing.assert_array_equal(grad, jnp.zeros_like(grad))
