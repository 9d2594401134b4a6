"""`scatter_gradients` and `clip_by_global_norm` in front of `zero`, in every context, and among optax's own members."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optim.contexts import assert_close, assert_same, jit_step, manual_step, mesh, problem, run, unreduced_step
from optim.test_gradient_kinds import COMMON, CONTEXTS, GRIDS, SHAPES, shapes_for, varying
from oracles import adam

import jzero

MAX_NORM = 1.5


def clipped_chain(m, gradients="auto", common=COMMON):
    """Scatter, clip, double, then momentum SGD; with the state's specs for shard_map."""
    zero = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=m, master="fp32", gradients=gradients, **common)
    scatter = jzero.scatter_gradients(m, gradients=gradients, **common)
    tx = optax.chain(scatter, jzero.clip_by_global_norm(MAX_NORM), optax.scale(2.0), zero)
    specs = lambda params: (scatter.init(params), optax.EmptyState(), optax.EmptyState(), zero.state_specs(params))
    return tx, specs


def check(step, pr, tx):
    found, _, _ = run(step, pr.params, tx.init(pr.params), 3)
    gradients = lambda params: {k: 2 * g for k, g in adam.clip(pr.gradients(params), MAX_NORM).items()}
    assert adam.norm(pr.gradients(pr.start)) > MAX_NORM
    assert_close(found, adam.train(adam.sgd(0.1, momentum=0.9), pr.start, gradients, 3), atol=1e-6)


@pytest.mark.parametrize("context", ["jit", "local", "unchecked, local", "partial, local", "tensor alone"])
def test_scatter_then_clip(context):
    sizes, specs = GRIDS["data x tensor x pipeline"]
    pr = problem(mesh(**sizes), shapes_for(context), specs)
    options, declared = CONTEXTS.get(context, ({}, "auto"))
    tx, state_specs = clipped_chain(pr.mesh, declared)
    make = jit_step if context == "jit" else functools.partial(
        manual_step, state_specs=state_specs(pr.params), **options)  # fmt: skip
    check(make(pr, tx), pr, tx)


def test_scatter_then_clip_with_replicas():
    pr = problem(mesh(data=4, replica=2), SHAPES)
    tx, state_specs = clipped_chain(pr.mesh)
    check(manual_step(pr, tx, state_specs=state_specs(pr.params)), pr, tx)


def test_scatter_then_clip_with_unreduced_gradients():
    pr = problem(mesh(explicit=True, data=4, replica=2), {k: SHAPES[k] for k in ("w", "odd", "layers")})
    tx, _ = clipped_chain(pr.mesh)
    check(unreduced_step(pr, tx, ("replica", "data")), pr, tx)


def test_scatter_in_a_chosen_dtype():
    pr = problem(mesh(data=8), {"w": (8, 16)})
    tx = optax.chain(jzero.scatter_gradients(pr.mesh, replica_axis="replica", grad_sync_dtype=jnp.bfloat16),
                     jzero.zero(optax.sgd(0.1), mesh=pr.mesh, replica_axis="replica"))  # fmt: skip
    specs = (tx.init(pr.params)[0], jzero.zero(optax.sgd(0.1), mesh=pr.mesh).state_specs(pr.params))
    found, _, _ = run(manual_step(pr, tx, state_specs=specs), pr.params, tx.init(pr.params), 1)
    expected = adam.train(adam.sgd(0.1), pr.start, pr.gradients, 1)
    assert_close(found, expected, rtol=5e-2, atol=1e-2)
    assert np.abs(np.asarray(found["w"]) - expected["w"]).max() > 1e-5


# --- what is refused -------------------------------------------------------------------------------------------------


def in_region(f, m, *, check_vma=True):
    mapped = jax.shard_map(f, mesh=m, in_specs=(P(),), out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(mapped, {"w": jnp.ones((8, 4))})


def test_clipping_gradients_that_vary_is_refused():
    clip = jzero.clip_by_global_norm(1.0)
    with pytest.raises(ValueError, match=r"clip_by_global_norm: the gradient of \['w'\] varies over \['data'\]"):
        in_region(lambda g: clip.update(jax.tree.map(varying("data"), g), optax.EmptyState())[0], mesh(data=8))


def test_clipping_what_may_vary_is_refused():
    clip = jzero.clip_by_global_norm(1.0)
    with pytest.raises(ValueError, match=r"\['w'\] is inside shard_map with check_vma=False, which does not tell"):
        in_region(lambda g: clip.update(g, optax.EmptyState())[0], mesh(data=8), check_vma=False)


def test_clipping_a_sum_still_to_be_taken_is_refused():
    clip = jzero.clip_by_global_norm(1.0)
    m = mesh(explicit=True, data=8)
    region = jax.shard_map(lambda x: x, mesh=m, in_specs=P("data"), out_specs=P(None, unreduced={"data"}))
    unreduced = lambda x: region(jax.reshard(x, P("data")))
    with jax.set_mesh(m), pytest.raises(ValueError, match=r"\['w'\] is still a sum over \['data'\], so its norm"):
        jax.eval_shape(lambda x: clip.update({"w": unreduced(x)}, optax.EmptyState()), jnp.ones(8))


def test_clip_by_global_norm_takes_gradients_that_are_the_same_everywhere():
    clip = jzero.clip_by_global_norm(1.0)
    grads = {"w": jnp.full((8, 4), 2.0), "h": jnp.full(4, 2.0, jnp.bfloat16)}
    expected = {k: np.asarray(g, np.float32) / (12.0 + 1e-6) for k, g in grads.items()}
    update = lambda g: clip.update(g, optax.EmptyState())[0]
    inside = jax.jit(jax.shard_map(update, mesh=mesh(data=8), in_specs=(P(),), out_specs=P()))(grads)
    for found in (jax.jit(update)(grads), inside):
        assert {k: g.dtype for k, g in found.items()} == {k: g.dtype for k, g in grads.items()}
        assert_close(found, expected, rtol=2.0**-8)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_the_largest_norm_is_positive(norm):
    with pytest.raises(ValueError, match="max_norm: expected a positive number, found"):
        jzero.clip_by_global_norm(norm)
    with pytest.raises(ValueError, match="clip_norm: expected a positive number or None, found"):
        jzero.zero(optax.sgd(0.1), mesh=mesh(data=8), clip_norm=norm)


def test_scatter_and_zero_must_cut_alike():
    pr = problem(mesh(data=8), {"layers": (8, 16)})
    zero = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, replica_axis="replica")
    tx = optax.chain(jzero.scatter_gradients(pr.mesh, replica_axis="replica", stacked=lambda path: 1), zero)
    specs = (tx.init(pr.params)[0], zero.state_specs(pr.params))
    with pytest.raises(ValueError, match=r"\['layers'\]: scatter_gradients cut it by another plan than zero's"):
        manual_step(pr, tx, state_specs=specs)(pr.params, tx.init(pr.params))


def test_scatter_checks_its_axes():
    with pytest.raises(ValueError, match=r"replica_axis 'rows': expected an axis of the mesh .* other than 'data'"):
        jzero.scatter_gradients(mesh(data=8), replica_axis="rows")


# --- among optax's own members ---------------------------------------------------------------------------------------


def test_before_and_after_others_in_a_chain():
    """A decay before, a scale after; float32 parameters have no master that a later member could leave behind."""
    pr = problem(mesh(data=8), {"w": (8, 16), "odd": (5, 3)})
    tx = optax.chain(optax.add_decayed_weights(0.1), jzero.zero(optax.sgd(0.1), mesh=pr.mesh), optax.scale(0.5))
    found, _, _ = run(jit_step(pr, tx), pr.params, tx.init(pr.params), 3)
    decayed = lambda params: {k: g + 0.1 * params[k] for k, g in pr.gradients(params).items()}
    assert_close(found, adam.train(adam.sgd(0.05), pr.start, decayed, 3))


def test_extra_arguments_reach_the_inner_transformation_and_others_pass_by():
    def scale_by_value():
        update = lambda u, s, p=None, *, value, **_: (jax.tree.map(lambda x: -value * x, u), s)
        return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)

    pr = problem(mesh(data=8), {"w": (8, 16)})
    tx = jzero.zero(scale_by_value(), mesh=pr.mesh)
    grads = pr.place(pr.scales)
    step = jax.jit(lambda g, s, p, value: tx.update(g, s, p, value=value, value_fn=lambda p: 0.0)[0])
    found = step(grads, tx.init(pr.params), pr.params, jnp.float32(0.5))
    assert_close(found, {"w": -0.5 * pr.scales["w"]})


@pytest.mark.parametrize("wrap", ["accumulate", "finite"])
def test_inside_optax_wrappers(wrap):
    pr = problem(mesh(data=8), {"w": (8, 16), "odd": (5, 3)})
    zero = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, master="fp32")
    tx = optax.MultiSteps(zero, 2) if wrap == "accumulate" else optax.apply_if_finite(zero, 3)
    state, params = tx.init(pr.params), pr.params
    update = jax.jit(tx.update)
    for factor in (0.5, 1.5):
        updates, state = update(pr.place({k: factor * g for k, g in pr.scales.items()}), state, params)
        params = jax.block_until_ready(optax.apply_updates(params, updates))
    total = 1.0 if wrap == "accumulate" else 2.0
    assert_close(params, {k: pr.start[k] - 0.1 * total * g for k, g in pr.scales.items()})
    bad = pr.place({k: np.full_like(g, np.nan) for k, g in pr.scales.items()})
    if wrap == "finite":
        assert_same(optax.apply_updates(params, update(bad, state, params)[0]), params)


# --- a master that its parameter no longer follows --------------------------------------------------------------------


def low_precision():
    pr = problem(mesh(data=8), {"w": (8, 16), "odd": (5, 3), "empty": (0,)})
    return pr, pr.place(pr.start, "bfloat16"), pr.place(pr.scales)


def test_a_later_member_that_changes_updates_is_found_on_the_next_step():
    pr, params, grads = low_precision()
    tx = optax.chain(jzero.zero(optax.sgd(0.1), mesh=pr.mesh, master="fp32"), optax.scale(0.5))
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    with pytest.raises(ValueError, match=r"\['odd'\]: the parameter differs by up to .* from what its master"):
        tx.update(grads, state, params)


def test_masters_can_be_checked_between_compiled_steps():
    pr, params, grads = low_precision()
    zero = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, master="fp32")
    for scale, alike in ((1.0, True), (0.5, False)):
        tx = optax.chain(zero, optax.scale(scale))
        updates, (state, _) = jax.jit(tx.update)(grads, tx.init(params), params)
        after = optax.apply_updates(params, updates)
        if alike:
            zero.check_masters(after, state)
        else:
            with pytest.raises(ValueError, match="call init again after editing parameters"):
                zero.check_masters(after, state)


def test_masters_are_found_to_agree_where_they_do():
    """After steps with huge and tiny updates, where float32 rounds `old + (new - old)`, and with NaN and infinity."""
    pr, params, _ = low_precision()
    zero = jzero.zero(optax.sgd(1.0), mesh=pr.mesh, master="fp32")
    state = zero.init(params)
    for size in (1.0, 0.999, 1e-3, 1.0, np.inf):
        with np.errstate(invalid="ignore"):
            grads = pr.place({k: np.asarray(p, np.float32) * np.float32(size) for k, p in params.items()})
        updates, state = zero.update(grads, state, params)  # checks before it steps
        params = optax.apply_updates(params, updates)
    zero.check_masters(params, state)
    assert not np.isfinite(np.asarray(params["w"], np.float32)).all()
