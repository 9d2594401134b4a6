"""FP8 parameters from and to other states: plain optax, 16-bit parameters, other meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.contexts import assert_same
from optim.test_fp8_parameters import CHOSEN, FP8, RATE, RECIPES, gradient, layers_of, setup, stacked
from oracles import fp8

import jzero
from jzero.fp8 import dequantise, quantise


def step(pr, tx, params, state, t):
    return jax.block_until_ready(jax.jit(tx.step)(pr.place(gradient(pr, t)), state, params))


def bits(tree):
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 else np.asarray(x), tree)


def trained(layout="data 8", **options):
    pr, tx, whole, params = setup(layout, fp8_recipe=RECIPES["delayed"], **options)
    state = tx.init_with(params, whole)
    for t in range(2):
        params, state = step(pr, tx, params, state, t)
    return pr, tx, params, state


@pytest.mark.parametrize("layout", ["data 4, replica 2", "data 2, tensor 2, pipeline 2"])
def test_a_run_goes_on_bit_for_bit_on_another_mesh(layout):
    pr, tx, params, state = trained()
    other, new, _, like = setup(layout, fp8_recipe=RECIPES["delayed"])
    moved, after = jzero.convert(tx, state, params, new, like)
    assert_same(bits(moved), bits(params))
    assert_same(jax.device_get(after.fp8), jax.device_get(state.fp8))
    moved, after = step(other, new, moved, after, 2)
    params, state = step(pr, tx, params, state, 2)
    assert_same(bits({k: moved[k] for k in FP8}), bits({k: params[k] for k in FP8}))
    assert_same(jax.device_get(after.fp8), jax.device_get(state.fp8))


def test_from_bfloat16_parameters_and_back():
    """The masters go on; the scales are those of their values."""
    pr, new, whole, like = setup(fp8_recipe=RECIPES["delayed"])
    old = jzero.distributed_fused_adam(RATE, mesh=pr.mesh, replica_axis="replica", stacked=stacked, master="remainder")
    params = pr.place(pr.start, "bfloat16")
    params, state = step(pr, old, params, old.init(params, whole), 0)
    masters, adam = jzero.to_optax(old, state, params)
    ours, after = jzero.convert(old, state, params, new, like)
    assert_same(jzero.to_optax(new, after, ours), (masters, adam))
    for k in FP8:
        scale = np.asarray([fp8.scale(np.abs(x).max(), 1, 448) for x in layers_of(k, masters[k])])
        np.testing.assert_array_equal(np.ravel(ours[k].scale), scale)
        np.testing.assert_array_equal(np.ravel(after.fp8.scale[k]), scale)
        codes = fp8.encode(layers_of(k, masters[k]) * scale[:, None], "float8_e4m3fn")
        np.testing.assert_array_equal(layers_of(k, bits(ours[k].value)), codes)
    again, back = jzero.convert(new, after, ours, old, params)
    assert_same((again, back.master), (params, state.master))


def test_the_bytes_are_the_masters_with_the_scale_beside_them():
    """What a checkpoint need not hold: float32 masters and scales give the very bytes."""
    _, tx, params, state = trained()
    masters = jzero.to_optax(tx, state, params)[0]
    for k in FP8:
        product = layers_of(k, masters[k]) * np.atleast_1d(np.asarray(params[k].scale))[:, None]
        np.testing.assert_array_equal(layers_of(k, bits(params[k].value)), fp8.encode(product, "float8_e4m3fn"))
        assert not np.array_equal(params[k].scale, state.fp8.scale[k])  # the next one is not the one beside the value


def test_from_plain_adamw():
    pr, tx, _, like = setup(fp8_recipe=RECIPES["delayed"])
    plain = optax.adamw(RATE, weight_decay=0.0)
    updates, adam = plain.update(gradient(pr, 0), plain.init(pr.start), pr.start)
    whole = optax.apply_updates(pr.start, updates)
    params, state = jzero.from_optax(tx, adam, whole, like=like)
    assert_same(jzero.to_optax(tx, state, params)[0], whole)
    params, state = step(pr, tx, params, state, 1)
    updates, _ = plain.update(gradient(pr, 1), adam, whole)
    expected = optax.apply_updates(whole, updates)
    found = jzero.to_optax(tx, state, params)[0]
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=1.3e-6, atol=1e-5, err_msg=k)


def test_scaled_masters_are_converted_with_the_scales_that_they_had():
    pr, tx, whole, params = setup(master="scaled_fp16", state_dtype="scaled_fp16")
    drop = lambda tree: {k: tree[k] for k in FP8}
    params, whole = drop(params), drop(whole)
    state = tx.init_with(params, whole)
    params, state = jax.jit(tx.step)(drop(pr.place(gradient(pr, 0))), state, params)
    _, new, _, like = setup(master="fp32", state_dtype="fp32")
    moved, _ = jzero.convert(tx, state, params, new, drop(like))
    for k in FP8:
        np.testing.assert_array_equal(moved[k].scale, params[k].scale)
        near = np.asarray(dequantise(params, jnp.float32)[k])
        np.testing.assert_allclose(
            dequantise(moved, jnp.float32)[k], near, rtol=2**-3, atol=2**-9 / params[k].scale.min()
        )


def test_quantising_again_and_a_pattern_without_a_match():
    _, _, _, params = setup()
    with pytest.raises(
        jzero.JzeroError, match=r"\['layers'\]: expected a floating-point array to store as FP8, found Quant"
    ):
        quantise(params, CHOSEN)
    with pytest.raises(jzero.JzeroError, match=r"expected `where` to choose a leaf, found none .*\['bias'\]"):
        quantise(params, "nothing")
    assert_same(quantise({"a": jnp.ones(3)}, lambda path: path == "['a']")["a"].scale, 448.0)
