"""The dynamic loss scale against a loop in plain Python, and steps that are skipped as a whole, on all ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim import contexts
from optim.contexts import assert_close, assert_same, mesh, problem
from oracles import adam

import jzero
from jzero.plan import targets

SHAPES = {"w": (8, 16), "odd": (5, 3), "bias": (6,)}
SPLIT = {"w": P(None, "tensor"), "bias": P("tensor")}
MOMENTUM = optax.sgd(lambda t: 0.1 / (t + 1), momentum=0.9)


class Reference:
    """NeMo's rule, with Python's numbers."""

    def __init__(self, rule):
        self.rule, self.scale, self.count, self.left = rule, rule.initial, 0, rule.hysteresis

    def next(self, finite):
        if finite:
            self.count, self.left = self.count + 1, self.rule.hysteresis
            if self.count == self.rule.growth_interval:
                self.scale, self.count = self.scale * self.rule.growth_factor, 0
        else:
            self.count, self.left = 0, max(self.left - 1, 0)
            if self.left == 0:
                self.scale = max(self.scale * self.rule.backoff_factor, self.rule.minimum)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_scale_follows_the_rule(interval, hysteresis):
    rule = jzero.DynamicLossScale(64.0, 3.0, 0.25, interval, hysteresis, minimum=2.0)
    state, reference, next_ = rule.init(), Reference(rule), jax.jit(rule.next)
    for finite in np.random.default_rng(interval).random(40) < 0.6:
        state = next_(state, jnp.bool_(finite))
        reference.next(finite)
        assert float(state.scale) == pytest.approx(reference.scale, rel=1e-5)
        assert (int(state.finite_steps), int(state.hysteresis)) == (reference.count, reference.left)


def test_the_scale_does_not_grow_beyond_float32():
    rule = jzero.DynamicLossScale(2.0**127, growth_interval=1)
    assert float(rule.next(rule.init(), jnp.bool_(True)).scale) == 2.0**127


def test_defaults_are_nemos():
    rule = jzero.DynamicLossScale()
    assert (rule.initial, rule.growth_interval, rule.hysteresis) == (2.0**32, 1000, 2)


def test_the_scaled_loss_of_float16_does_not_overflow():
    rule = jzero.DynamicLossScale()
    scaled = rule.scale(jnp.float16(3.0), rule.init())
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 3 * 2.0**32


# --- in zero ----------------------------------------------------------------------------------------------------------


def stepper(pr, tx, context, form):
    """(params, state, factor) -> (params, state): a step in which one row multiplies its gradient by `factor`."""
    batch = contexts.batch_axes(pr.mesh)
    rows = jax.device_put(np.ones(contexts.ROWS, np.float32), NamedSharding(pr.mesh, P(batch)))
    scales = pr.place(pr.scales)

    def gradients(params, state, scales, factor, rows, summed=lambda k, x: x):
        def value(p):
            scaled = tx.scale_loss if tx.core.guard.loss_scale else lambda x, _: x
            return scaled(contexts.loss(p, scales, jnp.asarray(rows), summed), state) * jnp.mean(factor)

        return jax.grad(value)(params)

    def finish(grads, state, params):
        if form == "step":
            return tx.step(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def by_jit(params, state, scales, factor, rows):
        return finish(gradients(params, state, scales, factor, rows), state, params)

    def by_hand(params, state, scales, factor, rows):
        split = lambda k: tuple(n for n in pr.specs[k] if n)
        summed = lambda k, x: jax.lax.psum(x, split(k)) if split(k) else x
        seen = jax.tree.map(lambda p: jax.lax.pcast(p, batch, to="varying"), params)
        return finish(gradients(seen, state, scales, factor, rows, summed), state, params)

    f = by_jit
    if context == "shard_map":
        specs, states = pr.specs, tx.state_specs(pr.params)
        f = jax.shard_map(by_hand, mesh=pr.mesh, in_specs=(specs, states, specs, P(batch), P(batch)),
                          out_specs=(specs, states))  # fmt: skip
    f = jax.jit(f)

    def run(params, state, factor):
        # one row, so one rank, holds the bad number
        factors = np.ones(contexts.ROWS, np.float32)
        factors[5] = factor
        put = jax.device_put(factors, rows.sharding)
        return jax.block_until_ready(f(params, state, scales, put, rows))

    return run


def setup(**options):
    pr = problem(mesh(data=2, replica=2, tensor=2), SHAPES, SPLIT)
    return pr, jzero.zero(MOMENTUM, mesh=pr.mesh, replica_axis="replica", **options)


def expected_steps(pr, count):
    gradients = lambda params: {k: pr.scales[k] * (pr.scales[k] * p - 1.0) for k, p in params.items()}
    momentum = adam.train(lambda g, p, s, t, name: rule(g, p, s, t), pr.start, gradients, count)
    return momentum


def rule(g, p, state, t):
    m = state["m"] = 0.9 * state.get("m", 0.0) + g
    return p - 0.1 / t * m


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("context", ["jit", "shard_map"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_apexs_grad_scaler(context, form, bad):
    """Scales 3.21, x 1.23, x .876; two of five steps overflow on one rank, and leave everything but the scale."""
    scale = jzero.DynamicLossScale(3.21, 1.23, 0.876, growth_interval=1, hysteresis=1)
    pr, tx = setup(loss_scale=scale, master="fp32")
    step, params, state = stepper(pr, tx, context, form), pr.params, tx.init(pr.params)
    factor, taken = 3.21, 0
    for number in (1.0, bad, 1.0, -bad, 1.0):
        before = params, state
        params, state = step(params, state, number)
        if np.isfinite(number):
            factor, taken = factor * 1.23, taken + 1
        else:
            factor = factor * 0.876
            assert_same(params, before[0])
            assert_same((state.master, state.inner), (before[1].master, before[1].inner))
        assert float(state.guard.loss_scale.scale) == pytest.approx(factor, rel=1e-6)
        assert_close(params, expected_steps(pr, taken))
    assert int(state.guard.skipped) == 2
    assert {int(x) for x in jax.tree.leaves(state.inner) if x.dtype == jnp.int32} == {3}  # the schedule's count


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.5}], ids=["alone", "clipped"])
def test_skipping_without_a_scale(options):
    pr, tx = setup(skip_nonfinite=True, **options)
    step, params, state = stepper(pr, tx, "jit", "update"), pr.params, tx.init(pr.params)
    first, after = step(params, state, np.nan)
    assert_same(first, params)
    assert (int(after.guard.skipped), jax.tree.leaves(after.guard.loss_scale)) == (1, [])
    _, plain = setup(skip_nonfinite=False, **options)
    found, _ = step(first, after, 1.0)
    straight = jax.jit(lambda g, s, p: plain.step(g, s, p)[0])
    gradients = {k: pr.scales[k] * (pr.scales[k] * p - 1.0) for k, p in pr.start.items()}
    assert_close(found, straight(pr.place(gradients), plain.init(params), params))


def test_without_it_nan_is_never_masked():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.zero(MOMENTUM, mesh=pr.mesh, clip_norm=1.0)
    bad = pr.place({k: np.where(g == g.max(), np.nan, g) for k, g in pr.scales.items()})
    found, _ = jax.jit(tx.step)(bad, tx.init(pr.params), pr.params)
    assert all(np.isnan(np.asarray(x)).all() for x in found.values())


MODES = [{"master": "fp32"}, {}, {"state_dtype": "scaled_fp16"}, {"state_dtype": "bf16", "stochastic_rounding": True}]


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("options", MODES)
def test_a_skipped_step_leaves_every_stored_bit(options, form):
    """Whatever the precision: remainders, scales and the count of random numbers included."""
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, mesh=pr.mesh, skip_nonfinite=True, **options)
    params = pr.place(pr.start, "bfloat16")
    one = jax.jit(tx.step if form == "step" else lambda g, s, p: add(tx, g, s, p))
    params, state = one(pr.place(pr.scales), tx.init(params), params)
    after, kept = one(pr.place({k: g * np.inf for k, g in pr.scales.items()}), state, params)
    assert_same(after, params)
    assert_same((kept.master, kept.inner, kept.rounding), (state.master, state.inner, state.rounding))
    assert int(kept.guard.skipped) == 1
    assert jax.tree.map(lambda x: x.sharding, kept) == jax.tree.map(lambda x: x.sharding, state)


def add(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"loss_scale": jzero.DynamicLossScale()}])
def test_skipped_steps_cost_no_pass_over_memory(options):
    """One fusion still reads gradient, parameter and moments once, and writes each once: the select is part of it."""
    m = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8))
    place = lambda spec: {"w": jax.ShapeDtypeStruct((2**20,), "float32", sharding=NamedSharding(m, spec))}
    passes = []
    for extra in ({}, options):
        tx = jzero.distributed_fused_adam(1e-3, mesh=m, clip_norm=1.0, **extra)
        step = jax.jit(tx.step, donate_argnums=(1, 2))
        text = step.lower(place(P()), tx.init(place(P())), place(P())).compile().as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        passes.append([line for line in entry if "= (f32[131072]{0}, f32[131072]{0}, f32[131072]{0}) fusion" in line])
    reads = [line.split("fusion(")[1].split(")")[0].count("%") for (line,) in passes]
    assert reads[1] - reads[0] <= 1  # the scale; gradient, parameter and moments were read before


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("initial", 0.0, "a positive number"), ("initial", float("inf"), "a positive number"),
     ("growth_factor", 0.5, "at least 1"), ("backoff_factor", 1.5, "above 0 and at most 1"),
     ("growth_interval", 0, "at least 1"), ("hysteresis", 0, "at least 1"), ("minimum", 2.0**40, "above 0 and at")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=f"DynamicLossScale: {name}: expected {expected}.*, found"):
        jzero.DynamicLossScale(**{name: value})


def test_what_is_no_loss_scale_is_refused():
    make = functools.partial(jzero.zero, optax.sgd(0.1), mesh=mesh(data=8))
    with pytest.raises(ValueError, match=r"loss_scale: expected a jzero\.DynamicLossScale or None, found 1024"):
        make(loss_scale=1024.0)
    with pytest.raises(ValueError, match=r"scale_loss: zero has no loss scale; pass loss_scale="):
        make(skip_nonfinite=True).scale_loss(jnp.float32(1.0), None)
