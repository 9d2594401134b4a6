"""Masks depend on what is dropped, not on where or together with what it is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.errors import JzeroError
from jzero.models.dropout import Dropout, Site, drop_attention, drop_features

KEY = jax.random.key(7)
B, T, D, H = 4, 6, 32, 3


@functools.partial(jax.jit, static_argnames=("rate", "site", "shape"))
def features(samples, *, key=KEY, rate=0.25, site=Site.MLP_OUT, layer=0, shape=(T, D)):
    ones = jnp.ones((samples.shape[0], *shape))
    return drop_features(ones, rate, Dropout(key, samples), site, layer)


@functools.partial(jax.jit, static_argnames=("rate", "shape"))
def weights(samples, *, key=KEY, rate=0.25, layer=0, shape=(H, T, 9)):
    ones = jnp.ones((samples.shape[0], *shape))
    return drop_attention(ones, rate, Dropout(key, samples), layer)


BOTH = pytest.mark.parametrize("masks", [features, weights], ids=["features", "attention"])


@BOTH
def test_a_sample_has_its_mask_in_any_split_of_the_batch(masks):
    whole = masks(jnp.arange(8, dtype=jnp.int32))
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [6], [7, 0]):
        np.testing.assert_array_equal(masks(jnp.array(rows, jnp.int32)), whole[jnp.array(rows)])


@BOTH
def test_ranks_of_a_mesh_have_the_masks_of_one_device(masks):
    mesh = jax.make_mesh((2, 2), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.P(("replica", "data"))
    spread = jax.shard_map(
        lambda key, samples: masks(samples, key=key), mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows
    )
    samples = jnp.arange(8, dtype=jnp.int32)
    np.testing.assert_array_equal(jax.block_until_ready(jax.jit(spread)(KEY, samples)), masks(samples))


@BOTH
def test_samples_layers_keys_and_rows_differ(masks):
    samples = jnp.arange(2, dtype=jnp.int32)
    mask = masks(samples)
    other = [masks(samples, layer=1), masks(samples, key=jax.random.key(8))]
    assert all((mask != changed).mean() > 0.2 for changed in other)  # 2 · 0.25 · 0.75 = 0.375 of independent masks
    assert (mask[0] != mask[1]).mean() > 0.2
    assert (mask[..., 0, :] != mask[..., 1, :]).mean() > 0.2


def test_sites_and_heads_differ():
    samples = jnp.arange(2, dtype=jnp.int32)
    first, second = (features(samples, site=site) for site in (Site.ATTENTION_OUT, Site.MLP_OUT))
    assert (first != second).mean() > 0.2
    mask = weights(samples)
    assert (mask[:, 0] != mask[:, 1]).mean() > 0.2


def test_a_head_has_its_mask_however_many_heads_there_are():
    samples = jnp.arange(2, dtype=jnp.int32)
    np.testing.assert_array_equal(weights(samples, shape=(2, T, 9)), weights(samples)[:, :2])


def test_a_position_has_its_mask_however_long_the_sequence():
    samples = jnp.arange(2, dtype=jnp.int32)
    np.testing.assert_array_equal(features(samples, shape=(4, D)), features(samples)[:, :4])


def test_a_part_of_the_sequence_or_of_the_heads_has_its_part_of_the_mask():
    dropout = Dropout(KEY, jnp.arange(2, dtype=jnp.int32))
    for first in (jnp.int32(2), 4):
        part = jax.jit(lambda x, f: drop_features(x, 0.25, dropout, Site.MLP_OUT, 0, f))(jnp.ones((2, 2, D)), first)
        np.testing.assert_array_equal(part, features(dropout.samples)[:, first : first + 2])
    part = jax.jit(lambda p, f: drop_attention(p, 0.25, dropout, 0, f))(jnp.ones((2, 2, T, 9)), 1)
    np.testing.assert_array_equal(part, weights(dropout.samples)[:, 1:])


@BOTH
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_keep_rate_and_scale(masks, rate):
    mask = masks(jnp.arange(64, dtype=jnp.int32), rate=rate, shape=(16, 64) if masks is features else (4, 16, 16))
    kept = mask > 0
    deviation = np.sqrt(rate * (1 - rate) / mask.size)
    assert abs(float(kept.mean()) - (1 - rate)) < 5 * deviation
    values = np.unique(np.asarray(mask)[np.asarray(kept)])
    np.testing.assert_allclose(values, [1 / (1 - rate)], rtol=2**-15)  # rates are rounded to 16 bits


def test_odd_width_type_and_gradient():
    x = jnp.full((2, T, 7), 2.0, jnp.bfloat16)
    drop = jax.jit(lambda x: drop_features(x, 0.5, Dropout(KEY, jnp.arange(2)), Site.EMBEDDING, 0))
    out, vjp = jax.vjp(drop, x)
    assert out.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(out, np.float32))) == {0.0, 4.0}
    np.testing.assert_array_equal(vjp(jnp.ones_like(out))[0], out / 2)


@pytest.mark.parametrize("rate", [1e-9, 1 - 1e-9])
def test_extreme_rates_stay_finite(rate):
    assert bool(jnp.isfinite(features(jnp.arange(2, dtype=jnp.int32), rate=rate)).all())


def test_none_and_rate_zero_return_the_input():
    x = jnp.ones((2, T, D))
    assert drop_features(x, 0.5, None, Site.MLP_OUT, 0) is x
    assert drop_features(x, 0.0, Dropout(KEY, jnp.arange(2)), Site.MLP_OUT, 0) is x


@pytest.mark.parametrize(
    ("key", "found"), [(jax.random.key(0, impl="rbg"), "rbg"), (jax.random.PRNGKey(0), "an array of uint32")]
)
def test_keys_whose_draws_depend_on_vmap_are_refused(key, found):
    with pytest.raises(JzeroError, match=f"dropout: expected a threefry key, .* found {found}; make it with"):
        drop_features(jnp.ones((2, T, D)), 0.5, Dropout(key, jnp.arange(2)), Site.MLP_OUT, 0)
