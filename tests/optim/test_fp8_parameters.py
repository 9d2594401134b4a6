"""FP8 parameters in the optimizer, against NumPy: masters, bytes and scales of every step, on every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optim.contexts import batch_axes, mesh, problem
from oracles import adam, fp8

import jzero
from jzero.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Quantised, dequantise, quantise

SHAPES = {"w": (16, 24), "odd": (5, 3), "layers": (4, 8, 6), "gain": (8,), "bias": (7,)}
FP8 = ("w", "odd", "layers")
CHOSEN = r"\['(w|odd|layers)'\]"
DTYPES = {"gain": jnp.bfloat16}
RATE = 0.3
LAYOUTS = {
    "data 8": ({"data": 8}, {}),
    "data 4, replica 2": ({"data": 4, "replica": 2}, {}),
    "data 2, replica 2, tensor 2": (
        {"data": 2, "replica": 2, "tensor": 2},
        {"w": P(None, "tensor"), "layers": P(None, "tensor")},
    ),
    "data 2, tensor 2, pipeline 2": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"w": P(None, "tensor"), "layers": P("pipeline", None, "tensor")},
    ),
}


def stacked(path):
    return int("layers" in path)


def layers_of(name, x):
    """[layers, elements of one]"""
    x = np.asarray(x)
    return x.reshape(x.shape[0] if stacked(name) else 1, -1)


def amaxes(name, x):
    return np.abs(layers_of(name, x)).max(1)


def gradient(pr, step):
    return {k: x * np.float32((-1) ** (step // 2) * (1 + step)) for k, x in pr.scales.items()}


def setup(layout="data 8", **options):
    sizes, specs = LAYOUTS[layout]
    pr = problem(mesh(**sizes), SHAPES, specs)
    tx = jzero.distributed_fused_adam(RATE, mesh=pr.mesh, replica_axis="replica", stacked=stacked, **options)
    whole = pr.place(pr.start)
    rounded = {k: x.astype(DTYPES.get(k, jnp.float32)) for k, x in whole.items()}
    params = quantise(rounded, CHOSEN, recipe=options.get("fp8_recipe"), stacked=stacked)
    return pr, tx, whole, params


def by_jit(pr, tx, params, state):
    """Reduced gradients."""
    step = jax.jit(lambda params, state, grads: tx.step(grads, state, params))
    return lambda params, state, grads: step(params, state, pr.place(grads)), step


def by_shard_map(pr, tx, params, state):
    """Each rank's own gradients, whose mean is the one that is given; those of FP8 leaves as `jax.grad` gives them."""
    axes = batch_axes(pr.mesh)
    ranks = int(np.prod([pr.mesh.shape[a] for a in axes]))

    def own(params, state, grads):
        grads = {k: Quantised(g[0], jnp.zeros(())) if k in FP8 else g[0] for k, g in grads.items()}
        return tx.step(grads, state, params)

    specs = jax.tree.map(lambda x: x.sharding.spec, params), tx.state_specs(params)
    grad_specs = {k: P(axes, *pr.specs[k]) for k in SHAPES}
    mapped = jax.jit(jax.shard_map(own, mesh=pr.mesh, in_specs=(*specs, grad_specs), out_specs=specs))

    def run(params, state, grads):
        spread = np.linspace(0.5, 1.5, ranks, dtype=np.float32)
        each = {k: g[None] * spread.reshape(-1, *[1] * g.ndim) for k, g in grads.items()}
        put = {k: jax.device_put(g, jax.NamedSharding(pr.mesh, grad_specs[k])) for k, g in each.items()}
        return mapped(params, state, put)

    return run, mapped


def train(pr, tx, params, state, form, steps):
    """Parameters, state and whole float32 masters after each step."""
    run, compiled = form(pr, tx, params, state)
    out = []
    for t in range(steps):
        params, state = jax.block_until_ready(run(params, state, gradient(pr, t)))
        out.append((params, state, jzero.to_optax(tx, state, params)[0]))
    assert compiled._cache_size() == 1
    return out


def assert_follows_the_oracle(pr, first, found, recipe, master_rtol=1.3e-6):
    expected = dict(pr.start)
    for k in FP8:
        np.testing.assert_array_equal(
            first[k].scale.ravel(), [fp8.scale(a, 1, 448, **how(recipe)) for a in amaxes(k, pr.start[k])]
        )
    scales = {k: np.atleast_1d(np.asarray(first[k].scale)) for k in FP8}
    for t, (params, state, masters) in enumerate(found):
        expected = adam.train(adam.adam(RATE), pr.start, Sequence(pr), t + 1)
        for k in SHAPES:
            np.testing.assert_allclose(masters[k], expected[k], rtol=master_rtol, atol=1e-5, err_msg=f"{k}, step {t}")
        for k in FP8:
            history = np.stack([amaxes(k, m[k]) for _, _, m in found[: t + 1]])  # [steps, layers]
            if isinstance(recipe, CurrentScaling):
                scales[k] = np.asarray([fp8.scale(a, 1, 448, **how(recipe)) for a in history[-1]])
            product = layers_of(k, masters[k]) * np.atleast_1d(scales[k])[:, None]
            bits = np.asarray(params[k].value).view(np.uint8)
            np.testing.assert_array_equal(layers_of(k, bits), fp8.encode(product, "float8_e4m3fn"), f"{k}, step {t}")
            np.testing.assert_array_equal(np.ravel(params[k].scale), scales[k])
            if isinstance(recipe, DelayedScaling):
                each = zip(np.atleast_1d(np.asarray(first[k].scale)), history.T, strict=True)
                scales[k] = np.asarray([delayed(recipe, s, h)[-1] for s, h in each])
                np.testing.assert_array_equal(np.ravel(state.fp8.scale[k]), scales[k], f"{k}, step {t}")


def how(recipe):
    return {"margin": recipe.margin, "power_of_two": recipe.power_of_two}


def delayed(recipe, first, history):
    return fp8.next_scales(
        first, history, length=recipe.amax_history_len, algo=recipe.amax_compute_algo, interval=recipe.interval,
        **how(recipe),
    )  # fmt: skip


class Sequence:
    """The gradients of one step after another, for the oracle."""

    def __init__(self, pr):
        self.pr, self.step = pr, -1

    def __call__(self, _):
        self.step += 1
        return gradient(self.pr, self.step)


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed, most recent, interval, margin, powers of two": DelayedScaling(
        amax_history_len=2, amax_compute_algo="most_recent", interval=2, margin=1, power_of_two=True
    ),
    "current": CurrentScaling(margin=1),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps(recipe):
    pr, tx, whole, params = setup(fp8_recipe=RECIPES[recipe])
    found = train(pr, tx, params, tx.init_with(params, whole), by_jit, 10)
    assert_follows_the_oracle(pr, params, found, RECIPES[recipe])


@pytest.mark.parametrize("form", [by_jit, by_shard_map])
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_mesh(layout, form):
    pr, tx, whole, params = setup(layout, fp8_recipe=RECIPES["delayed"])
    found = train(pr, tx, params, tx.init_with(params, whole), form, 2)
    assert_follows_the_oracle(pr, params, found, RECIPES["delayed"])


def test_current_scaling_inside_shard_map():
    pr, tx, whole, params = setup("data 2, tensor 2, pipeline 2", fp8_recipe=RECIPES["current"])
    found = train(pr, tx, params, tx.init_with(params, whole), by_shard_map, 2)
    assert_follows_the_oracle(pr, params, found, RECIPES["current"])


def test_the_state_looks_the_same_after_a_step():
    pr, tx, whole, params = setup("data 2, tensor 2, pipeline 2")
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    state, abstract = tx.init_with(params, whole), tx.init(jax.tree.map(placed, params))
    looks = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    after, later = by_jit(pr, tx, params, state)[0](params, state, gradient(pr, 0))
    assert looks((after, later)) == looks((params, state))
    assert shapes(abstract) == shapes(state)
    assert state.fp8.amax_history["layers"].sharding.spec == P(None, "pipeline")


def test_masters_are_what_the_parameters_are_rounded_from():
    """Without `masters`, the FP8 values are all that there is to start from."""
    pr, tx, whole, params = setup()
    exact = jzero.to_optax(tx, tx.init_with(params, whole), params)[0]
    rounded = jzero.to_optax(tx, tx.init(params), params)[0]
    for k in FP8:
        np.testing.assert_array_equal(exact[k], pr.start[k])
        np.testing.assert_array_equal(rounded[k], dequantise(params, jnp.float32)[k])


def test_scaled_masters():
    """The bytes come from the float32 value, before the master is rounded: at most a rounding apart."""
    pr, tx, whole, params = setup(master="scaled_fp16", state_dtype="scaled_fp16")
    state = tx.init_with({k: params[k] for k in FP8}, {k: whole[k] for k in FP8})
    params = {k: params[k] for k in FP8}
    step = jax.jit(lambda params, state, grads: tx.step(grads, state, params))
    for t in range(3):
        grads = pr.place(gradient(pr, t))
        params, state = jax.block_until_ready(step(params, state, {k: grads[k] for k in FP8}))
    tx.check_masters(params, state)
    assert {str(x.dtype) for x in jax.tree.leaves(state.master)} == {"float16", "float32"}
    expected = adam.train(adam.adam(RATE), {k: pr.start[k] for k in FP8}, Sequence(pr), 3)
    for k in FP8:
        largest = np.abs(expected[k]).max()
        np.testing.assert_allclose(jzero.to_optax(tx, state, params)[0][k], expected[k], rtol=2e-2, atol=1e-3 * largest)
        np.testing.assert_allclose(dequantise(params, jnp.float32)[k], expected[k], rtol=2**-3.9, atol=2**-9 * largest)


def test_check_masters_tells_an_edit():
    _, tx, whole, params = setup()
    state = tx.init_with(params, whole)
    tx.check_masters(params, state)
    edited = {**params, "w": quantise({"w": whole["w"] * 2}, "w")["w"]}
    with pytest.raises(ValueError, match=r"\['w'\]: the parameter differs by up to"):
        tx.check_masters(edited, state)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_skipped_step_changes_neither_values_nor_scales(recipe):
    pr, tx, whole, params = setup(fp8_recipe=RECIPES[recipe], skip_nonfinite=True)
    run, _ = by_jit(pr, tx, params, None)
    params, state = run(params, tx.init_with(params, whole), gradient(pr, 0))
    bad = gradient(pr, 1)
    bad["bias"] = bad["bias"] * np.float32(np.nan)
    after, later = run(params, state, bad)
    same = lambda a, b: np.testing.assert_array_equal(np.float32(a), np.float32(b))
    jax.tree.map(same, (after, later.master, later.inner, later.fp8), (params, state.master, state.inner, state.fp8))
    assert later.guard.skipped == 1


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_amax_that_is_not_finite_leaves_the_scale(recipe, bad):
    pr, tx, whole, params = setup(fp8_recipe=RECIPES[recipe])
    run, _ = by_jit(pr, tx, params, None)
    grads = gradient(pr, 0)
    grads["layers"][2, 0, 0] = bad
    before = np.asarray(params["layers"].scale)
    params, state = run(params, tx.init_with(params, whole), grads)
    scale = np.asarray(params["layers"].scale if recipe == "current" else state.fp8.scale["layers"])
    assert ((scale == before) == [False, False, True, False]).all()
    assert np.isfinite(scale).all()


def test_zeros_keep_their_scale():
    m = mesh(data=8)
    params = quantise({"w": jnp.zeros((8, 8))}, "w")
    tx = jzero.zero(optax.sgd(1.0), mesh=m)
    params, state = tx.step({"w": jnp.zeros((8, 8))}, tx.init(params), params)
    assert (float(params["w"].scale), float(state.fp8.scale["w"])) == (1.0, 1.0)


def test_masks_and_labels_see_one_leaf():
    _, _, whole, params = setup()
    seen = []

    def mask(params):
        seen.append({k: (p.shape, len(jax.tree.leaves(p))) for k, p in params.items()})
        return {k: len(p.shape) > 1 for k, p in params.items()}

    tx = jzero.distributed_fused_adam(RATE, weight_decay=0.5, mask=mask, mesh=mesh(data=8), stacked=stacked)
    state = tx.init_with(params, whole)
    assert seen[0] == {k: (SHAPES[k], 1) for k in SHAPES}
    assert [row.path for row in tx.partition_report(params)] == [leaf.path for leaf in tx.plan(whole).leaves]
    after, _ = tx.step(jax.tree.map(jnp.zeros_like, whole), state, params)
    for k in SHAPES:
        value = dequantise(after, jnp.float32)[k] if k in FP8 else after[k].astype(jnp.float32)
        ratio = np.abs(np.asarray(value)).sum() / np.abs(np.asarray(whole[k], np.float32)).sum()
        assert ratio == pytest.approx(1 - 0.5 * RATE if k in FP8 else 1.0, rel=0.03)


@pytest.mark.parametrize("policy", ["resident", "whole"])
def test_parameters_kept_as_shards(policy):
    """A parameter that lies sharded over data stays so: nothing is gathered, and the bytes are the same."""
    pr, tx, whole, params = setup()
    only = {"w": params["w"]}
    if policy == "resident":
        put = lambda x: jax.device_put(x, jax.NamedSharding(pr.mesh, P("data") if x.ndim else P()))
        only = jax.tree.map(put, only)
    step = jax.jit(lambda params, state, grads: tx.step(grads, state, params))
    grads = {"w": pr.place(gradient(pr, 0))["w"]}
    state = tx.init_with(only, {"w": whole["w"]})
    found, _ = step(only, state, grads)
    expected, _ = jax.jit(tx.step)(pr.place(gradient(pr, 0)), tx.init_with(params, whole), params)
    np.testing.assert_array_equal(found["w"].value.view(jnp.uint8), expected["w"].value.view(jnp.uint8))
    text = step.lower(only, state, grads).compile().as_text()
    assert ("all-gather" in text) == (policy == "whole")


REFUSED = [
    ({"master": "none"}, r"\['layers'\]: master='none' would leave an FP8 parameter .* expected master='auto', 'fp32'"),
    ({"master": "remainder"}, r"\['layers'\]: master='remainder' would leave an FP8 parameter"),
    ({"stacked": lambda path: 0}, r"\['layers'\]: expected one scale per layer, \[\], found \[4\]; give"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "match"), REFUSED)
def test_options_that_fp8_parameters_cannot_have(options, match):
    params = {k: x for k, x in setup()[3].items() if k != "bias"}
    with pytest.raises(ValueError, match=match):
        jzero.distributed_fused_adam(RATE, mesh=mesh(data=8), **{"stacked": stacked, **options}).init(params)


def test_a_recipe_must_have_scales_per_tensor():
    with pytest.raises(
        ValueError, match=r"fp8_recipe: .* expected DelayedScaling or CurrentScaling, found BlockScaling"
    ):
        jzero.zero(optax.sgd(0.1), mesh=mesh(data=8), fp8_recipe=BlockScaling())
    with pytest.raises(ValueError, match=r"quantise: recipe: .* found BlockScaling"):
        quantise({"w": jnp.ones(3)}, "w", recipe=BlockScaling())


def test_arguments_that_do_not_fit():
    pr, tx, whole, params = setup()
    state, grads = tx.init_with(params, whole), pr.place(gradient(pr, 0))
    with pytest.raises(ValueError, match=r"\['layers'\]: .* write params, state = tx.step\(grads, state, params\)"):
        tx.update(grads, state, params)
    with pytest.raises(ValueError, match=r"\['w'\]: expected 16 or 32 bits, found float8_e4m3fn, rounded without"):
        tx.step({**grads, "w": params["w"].value}, state, params)
    with pytest.raises(ValueError, match=r"parameter of \['w'\]: expected an FP8 parameter as given to init, found a"):
        tx.step(grads, state, {**params, "w": whole["w"]})
    with pytest.raises(ValueError, match=r"\['w'\]: expected an FP8 parameter Quantised\(float8_e4m3fn, float32\)"):
        tx.init({**params, "w": Quantised(params["w"].value.astype(jnp.float8_e5m2), params["w"].scale)})
    with pytest.raises(ValueError, match=r"expected \['fp8'\].scale\['layers'\] not there, found it float32"):
        jzero.distributed_fused_adam(RATE, mesh=pr.mesh, stacked=stacked, fp8_recipe=CurrentScaling()).step(
            grads, state, params
        )
