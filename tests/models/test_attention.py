"""The written-out attention against JAX's own, rotary positions, and which implementation is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.errors import JzeroError
from jzero.models.attention import attend, einsum32, library, rotate

B, T, G, R, K = 2, 9, 2, 3, 8


def operands(dtype=jnp.float32, groups=G, per_group=R):
    rng = np.random.default_rng(0)
    shapes = (B, T, groups, per_group, K), (B, T, groups, K), (B, T, groups, K)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(("groups", "per_group"), [(6, 1), (2, 3), (1, 6)])
def test_written_out_and_library_agree_with_gradients(groups, per_group, segmented):
    segments = jnp.asarray([[0] * 4 + [1] * 5, [0, 1, 1, 1, 2, 2, 2, 2, 2]], jnp.int32) if segmented else None

    def run(implementation):
        def loss(query, key, value):
            out = attend(query, key, value, segments=segments, implementation=implementation)
            return (out * jnp.arange(out.size).reshape(out.shape)).mean(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*operands(jnp.float32, groups, per_group))

    found, expected = run("auto"), run("xla")
    assert found[1].shape == (B, T, groups * per_group, K)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_sixteen_bits_stay_close_to_float32():
    exact, narrow = attend(*operands()), attend(*operands(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), exact, rtol=5e-2, atol=2e-2)


def test_large_scores_do_not_overflow():
    query, key, value = operands()
    out = attend(1e4 * query, key, value)
    assert bool(jnp.isfinite(out).all())
    np.testing.assert_allclose(out[:, 0].reshape(B, G, R, K), jnp.broadcast_to(value[:, 0, :, None], (B, G, R, K)))


def test_dropped_weights_are_not_renormalised():
    query, key, value = operands()
    halved = attend(query, key, value, drop=lambda weights: weights / 2)
    np.testing.assert_allclose(halved, attend(query, key, value) / 2, rtol=1e-6)


def test_rotated_products_depend_on_distances_alone():
    x, y = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 1, 1, K)), jnp.float32) for i in range(2))

    def product(i, j):
        return jnp.vdot(*(rotate(a, jnp.array([p]), K, 100.0) for a, p in ((x, i), (y, j))))

    np.testing.assert_allclose(product(3, 1), product(12, 10), rtol=1e-4)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3


def test_rotation_turns_the_first_channels_only_and_position_zero_not_at_all():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, G, R, K)), jnp.bfloat16)
    out = rotate(x, jnp.arange(T), 4, 10000.0)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(out[:, 0], x[:, 0])
    assert (out[:, 1:, ..., :4] != x[:, 1:, ..., :4]).mean() > 0.8
    per_sample = rotate(x, jnp.stack([jnp.arange(T), jnp.arange(T) + 5]), 4, 10000.0)
    np.testing.assert_array_equal(per_sample[0], out[0])
    np.testing.assert_array_equal(per_sample[1], rotate(x, jnp.arange(T) + 5, 4, 10000.0)[1])


def test_wide_product_has_narrow_gradients():
    a, b = (jnp.asarray(np.random.default_rng(i).normal(size=(4, 6)), jnp.bfloat16) for i in range(2))
    loss = lambda f: lambda a, b: (f("ik,jk->ij", a, b) ** 2).sum()
    wide = lambda spec, a, b: jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))
    assert einsum32("ik,jk->ij", a, b).dtype == jnp.float32
    np.testing.assert_allclose(einsum32("ik,jk->ij", a, b), wide("ik,jk->ij", a, b), rtol=1e-6)
    found, expected = (jax.grad(loss(f), argnums=(0, 1))(a, b) for f in (einsum32, wide))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("backend", "dtype", "width", "expected"),
    [
        ("gpu", jnp.bfloat16, 64, "cudnn"),
        ("cuda", jnp.float16, 128, "cudnn"),
        ("gpu", jnp.bfloat16, 12, None),  # cuDNN wants a multiple of 8
        ("gpu", jnp.bfloat16, 256, None),
        ("gpu", jnp.float32, 64, None),
        ("cpu", jnp.bfloat16, 64, None),
    ],
)
def test_auto_takes_cudnn_where_it_can(monkeypatch, backend, dtype, width, expected):
    assert library("auto", jnp.dtype(dtype), width, backend) == expected
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert library("auto", jnp.dtype(dtype), width) == expected


def test_cudnn_refuses_what_it_cannot_do():
    with pytest.raises(JzeroError, match=r"expected auto or xla for float32 activations, found cudnn"):
        attend(*operands(), implementation="cudnn")
    with pytest.raises(JzeroError, match=r"expected auto or xla with attention dropout, found cudnn"):
        attend(*operands(jnp.bfloat16), implementation="cudnn", drop=lambda weights: weights)
