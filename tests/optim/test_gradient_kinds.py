"""Every kind of gradient in every context: the same parameters as NumPy, by both forms.

SGD with momentum throughout, since Adam hides a wrong factor; and a master, which is cut at init and used in the
step's own region, so that two different cuts would show.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optim import contexts
from optim.contexts import assert_close, jit_step, manual_step, mesh, problem, run, unreduced_step
from oracles import adam

import jzero

SHAPES = {"w": (8, 16), "odd": (5, 3), "layers": (4, 7), "all": (4, 2), "bias": (6,)}
SPLIT = {"w": P(None, "tensor"), "layers": P("pipeline"), "all": P("pipeline", "tensor"), "bias": P("tensor")}
GRIDS = {"data x replica": ({"data": 4, "replica": 2}, {}),
         "data x tensor x pipeline": ({"data": 2, "tensor": 2, "pipeline": 2}, SPLIT)}  # fmt: skip
BATCH_AXES = {"data", "replica"}
CONTEXTS = {  # options of manual_step, and what must be declared
    "local": ({}, "auto"),
    "reduced": ({"local": False}, "reduced"),
    "unchecked, local": ({"check_vma": False}, "local"),
    "unchecked, reduced": ({"check_vma": False, "local": False}, "reduced"),
    "partial, local": ({"axes": BATCH_AXES}, "local"),
    "partial, reduced": ({"axes": BATCH_AXES, "local": False}, "reduced"),
    "partial, unchecked": ({"axes": BATCH_AXES, "check_vma": False}, "local"),
    "tensor alone": ({"axes": {"tensor"}, "local": False}, "auto"),
}
SHARED = ("all", "bias")  # their shards share a dimension with tensor, so regions must bind data too


def shapes_for(context):
    return {k: shape for k, shape in SHAPES.items() if context != "tensor alone" or k not in SHARED}


COMMON = {"replica_axis": "replica", "stacked": lambda path: int("layers" in path)}
MOMENTUM = (optax.sgd(0.1, momentum=0.9), adam.sgd(0.1, momentum=0.9))


def check(step, pr, tx, gradients=None):
    """Three steps."""
    by_update, by_step, _ = run(step, pr.params, tx.init(pr.params), 3)
    expected = adam.train(MOMENTUM[1], pr.start, gradients or pr.gradients, 3)
    assert_close(by_update, expected, atol=1e-6)
    assert_close(by_step, expected, atol=1e-6)


@pytest.mark.parametrize("types", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
def test_explicit_beside_auto_axes(types):
    m = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=types)
    start, scales = (contexts.values({"w": (8, 16), "odd": (5, 3)}, seed) for seed in (0, 1))
    pr = contexts.Problem(m, start, scales, {"w": P(None, "tensor"), "odd": P(None, None)})
    tx = jzero.zero(MOMENTUM[0], mesh=m, master="fp32")
    check(jit_step(pr, tx), pr, tx)


@pytest.mark.parametrize("context", ["jit", "shard_map"])
def test_an_explicit_data_axis_of_one_rank(context):
    pr = problem(mesh(explicit=True, data=1, tensor=2), {"w": (8, 16), "odd": (5, 3), "bias": (6,)}, SPLIT)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", **COMMON)
    step = jit_step(pr, tx) if context == "jit" else manual_step(pr, tx, state_specs=tx.state_specs(pr.params))
    check(step, pr, tx)


EVERYWHERE = [("data x tensor x pipeline", context) for context in ("jit", *CONTEXTS)]
WITH_REPLICAS = [("data x replica", context) for context in ("jit", "local", "reduced", "unchecked, local")]


@pytest.mark.parametrize(("grid", "context"), EVERYWHERE + WITH_REPLICAS)
def test_auto_axes(grid, context):
    sizes, specs = GRIDS[grid]
    pr = problem(mesh(**sizes), shapes_for(context), specs)
    options, declared = CONTEXTS.get(context, ({}, "auto"))
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", gradients=declared, **COMMON)
    make = jit_step if context == "jit" else functools.partial(
        manual_step, state_specs=tx.state_specs(pr.params), **options)  # fmt: skip
    check(make(pr, tx), pr, tx)


@pytest.mark.parametrize("context", ["jit", "local", "partial, local", "tensor alone"])
def test_explicit_axes(context):
    sizes, specs = GRIDS["data x tensor x pipeline"]
    pr = problem(mesh(explicit=True, **sizes), shapes_for(context), specs)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", **COMMON)
    options = CONTEXTS.get(context, ({}, ""))[0]
    make = jit_step if context == "jit" else functools.partial(
        manual_step, state_specs=tx.state_specs(pr.params), **options)  # fmt: skip
    check(make(pr, tx), pr, tx)


@pytest.mark.parametrize(("axes", "declared"), [(("data",), "auto"), (("replica", "data"), "unreduced")])
def test_unreduced_gradients(axes, declared):
    shapes = {name: SHAPES[name] for name in ("w", "odd", "layers")}
    pr = problem(mesh(explicit=True, data=4, replica=2), shapes)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", gradients=declared, **COMMON)
    check(unreduced_step(pr, tx, axes), pr, tx)


def test_unreduced_gradients_of_parameters_split_over_tensor():
    pr = problem(mesh(explicit=True, data=4, tensor=2), {"w": (8, 16), "bias": (6,)}, SPLIT)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, **COMMON)
    check(unreduced_step(pr, tx, ("data",)), pr, tx)


def test_without_sharding_the_state_gradients_are_averaged_over_the_replica_axes():
    pr = problem(mesh(data=4, replica=2), SHAPES)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, axis=None, replica_axis=("replica", "data"), stacked=COMMON["stacked"])
    check(manual_step(pr, tx, state_specs=tx.state_specs(pr.params)), pr, tx)
    check(jit_step(pr, tx), pr, tx)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grad_sync_dtype_is_the_dtype_that_is_summed(dtype):
    pr = problem(mesh(data=8), {"w": (8, 16), "odd": (5, 3)})
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, replica_axis="replica", grad_sync_dtype=dtype)
    step = manual_step(pr, tx, state_specs=tx.state_specs(pr.params))
    found, _, _ = run(step, pr.params, tx.init(pr.params), 3)
    expected = adam.train(MOMENTUM[1], pr.start, pr.gradients, 3)
    assert_close(found, expected, rtol=5e-2, atol=2e-2)
    assert max(np.abs(np.asarray(found[k]) - x).max() for k, x in expected.items()) > 1e-5  # it did round


def test_a_float16_sum_over_ranks_does_not_overflow():
    m = mesh(data=8)
    tx = jzero.zero(optax.sgd(1.0), mesh=m, grad_sync_dtype=jnp.float16)
    params = {"w": jax.device_put(jnp.zeros(8), NamedSharding(m, P()))}
    state, specs = tx.init(params), tx.state_specs(params)
    local = lambda g: jax.lax.pcast(g, "data", to="varying")
    step = jax.shard_map(lambda g, s, p: tx.step(jax.tree.map(local, g), s, p)[0], mesh=m,
                         in_specs=(P(), specs, P()), out_specs=P())  # fmt: skip
    found = jax.jit(step)({"w": jnp.full(8, 60000.0)}, state, params)
    np.testing.assert_allclose(np.asarray(found["w"]), -60000.0, rtol=1e-3)


# --- partial regions: the tensor shards stay where they are -----------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_partial_regions_never_gather_tensor_shards(check_vma):
    pr = problem(mesh(data=4, tensor=2), {"w": (64, 128), "o": (128, 64), "bias": (128,)},
                 {"w": P(None, "tensor"), "o": P("tensor"), "bias": P("tensor")})  # fmt: skip
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, replica_axis="replica", master="fp32", gradients="local")
    step = manual_step(pr, tx, axes=BATCH_AXES, check_vma=check_vma, state_specs=tx.state_specs(pr.params))
    with jax.set_mesh(pr.mesh):
        text = step.jitted.lower(pr.params, tx.init(pr.params), *step.args).compile().as_text()
    kinds = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    lines = [line for line in text.splitlines() if re.search(rf" ({'|'.join(kinds)})(-start)?\(", line)]
    assert any(" reduce-scatter" in line for line in lines)
    along_data = "replica_groups={{0,2,4,6},{1,3,5,7}}"  # tensor ranks are neighbours
    assert [line for line in lines if along_data not in line] == []


# --- what cannot be told is refused ----------------------------------------------------------------------------------


def attempt(pr, *, grads=lambda g: g, axes=None, check_vma=True, form="update", **options):
    """Trace one step with gradients made by `grads` from replicated ones, inside shard_map."""
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, **options)
    axes = set(pr.mesh.axis_names) if axes is None else axes
    keep = lambda spec: contexts.within(spec, axes)
    specs = {k: keep(spec) for k, spec in pr.specs.items()}
    states = jax.tree.map(keep, tx.state_specs(pr.params), is_leaf=lambda x: isinstance(x, P))

    def step(g, state, params):
        return getattr(tx, form)(jax.tree.map(grads, g), state, params)[0]

    mapped = jax.shard_map(step, mesh=pr.mesh, axis_names=axes, in_specs=(specs, states, specs), out_specs=specs,
                           check_vma=check_vma)  # fmt: skip
    with jax.set_mesh(pr.mesh):
        jax.eval_shape(mapped, pr.params, tx.init(pr.params), pr.params)


varying = lambda *axes: lambda g: jax.lax.pcast(g, axes, to="varying")


@pytest.fixture
def pr():
    return problem(mesh(data=4, replica=2), {"w": (8, 16)})


@pytest.mark.parametrize("form", ["update", "step"])
def test_unchecked_regions_need_a_declaration(pr, form):
    with pytest.raises(ValueError, match=r"gradient of \['w'\]: its kind cannot be told under check_vma=False; pass"):
        attempt(pr, check_vma=False, replica_axis="replica", form=form)


@pytest.mark.parametrize(
    ("grads", "declared", "found"),
    [(varying("data", "replica"), "reduced", "local"), (varying("data", "replica"), "unreduced", "local")],
)
def test_a_declaration_that_contradicts_the_type_is_refused(pr, grads, declared, found):
    with pytest.raises(ValueError, match=rf"\['w'\]: declared gradients='{declared}', but its type says '{found}'"):
        attempt(pr, grads=grads, gradients=declared, replica_axis="replica")


@pytest.mark.parametrize("declared", ["auto", "local", "unreduced"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_autodiff_has_summed_is_refused(ranks, declared):
    """`jax.grad` of a rank's own mean loss with respect to replicated parameters: a sum, not the mean."""
    pr = problem(mesh(data=ranks), {"w": (8, 16)})
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, gradients=declared)

    def step(params, state, scales, rows):
        return tx.step(jax.grad(contexts.loss)(params, scales, rows), state, params)[0]

    mapped = jax.shard_map(step, mesh=pr.mesh, in_specs=(P(), tx.state_specs(pr.params), P(), P("data")), out_specs=P())
    wrongly = "" if declared == "auto" else rf"declared gradients='{declared}', but "
    said = rf"gradient of \['w'\]: {wrongly}it is the same on every rank of \['data'\], so autodiff has summed it, .*"
    ways_out = r"jax\.lax\.pcast\(params, \('data',\), to='varying'\) .* pass gradients='reduced'"
    with pytest.raises(ValueError, match=said + ways_out):
        jax.eval_shape(mapped, pr.params, tx.init(pr.params), pr.params, contexts.BATCH)


@pytest.mark.parametrize("axis", ["data", "replica"])
def test_gradients_that_vary_over_some_of_the_batch_axes_are_refused(pr, axis):
    with pytest.raises(ValueError, match=rf"it varies over \['{axis}'\] but not over all of \['data', 'replica'\]"):
        attempt(pr, grads=varying(axis), replica_axis="replica")


def test_gradients_that_vary_over_an_axis_that_is_not_named_are_refused(pr):
    with pytest.raises(ValueError, match=r"varies over \['replica'\], which neither splits the parameter nor"):
        attempt(pr, grads=varying("data", "replica"))


def test_regions_that_bind_some_of_the_batch_axes_are_refused(pr):
    with pytest.raises(ValueError, match=r"shard_map binds \['data'\] of the axes \['data', 'replica'\]; bind all"):
        attempt(pr, axes={"data"}, replica_axis="replica")


@pytest.mark.parametrize("name", SHARED)
def test_regions_that_read_shards_in_another_order_are_refused(name):
    sizes, specs = GRIDS["data x tensor x pipeline"]
    pr = problem(mesh(**sizes), {name: SHAPES[name]}, specs)
    match = rf"\['{name}'\]: its shards are split over 'data' and \('tensor',\) in one dimension, but shard_map binds"
    with pytest.raises(ValueError, match=match):
        attempt(pr, axes={"tensor"})


def test_local_gradients_outside_of_shard_map_are_refused(pr):
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, gradients="local")
    with pytest.raises(ValueError, match=r"gradients='local' exist only inside shard_map over \['data'\]"):
        tx.update(pr.params, tx.init(pr.params), pr.params)


def test_local_gradients_with_no_axis_to_average_over_are_refused(pr):
    with pytest.raises(ValueError, match="exist only where zero has an axis or replica_axis to average over"):
        attempt(pr, axis=None, gradients="local")


def test_grad_sync_dtype_applies_to_local_gradients_only(pr):
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, grad_sync_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"grad_sync_dtype=bfloat16: expected local gradients .*, found 'reduced'"):
        tx.update(pr.params, tx.init(pr.params), pr.params)


# --- parameters that are themselves kept sharded ----------------------------------------------------------------------

RESIDENT = {"row": P("data"), "column": P("tensor", "data")}


def resident_step(pr, tx, kind):
    """Gathers the shards in the forward pass, so that autodiff reduce-scatters their gradients."""
    batch, dimension = contexts.batch_axes(pr.mesh), {"row": 0, "column": 1}

    def step(params, state, scales, rows):
        def value(p):
            whole = {k: jax.lax.all_gather(x, "data", axis=dimension[k], tiled=True) for k, x in p.items()}
            a = {k: jax.lax.all_gather(x, "data", axis=dimension[k], tiled=True) for k, x in scales.items()}
            summed = lambda k, x: jax.lax.psum(x, "tensor") if k == "column" else x
            mean = contexts.loss(whole, a, rows, summed)
            return jax.lax.pmean(mean, batch) if kind == "reduced" else mean

        return contexts.both(tx, jax.grad(value)(params), state, params)

    states = tx.state_specs(pr.params)
    in_specs = (pr.specs, states, pr.specs, P(batch))
    mapped = jax.jit(jax.shard_map(step, mesh=pr.mesh, in_specs=in_specs, out_specs=(pr.specs, pr.specs, states)))
    rows = jax.device_put(contexts.BATCH, NamedSharding(pr.mesh, P(batch)))
    return lambda params, state: mapped(params, state, pr.place(pr.scales), rows)


def resident_problem():
    return problem(mesh(data=2, replica=2, tensor=2), {"row": (8, 3), "column": (2, 8)}, RESIDENT)


@pytest.mark.parametrize("kind", ["local", "reduced"])
def test_parameters_kept_sharded(kind):
    pr = resident_problem()
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", gradients=kind, replica_axis="replica")
    assert all(leaf.resident for leaf in tx.plan(pr.params).leaves)
    check(resident_step(pr, tx, kind), pr, tx)


def test_parameters_kept_sharded_under_plain_jit_keep_their_own_order_of_axes():
    specs = {"row": P("data"), "mixed": P(("data", "tensor"))}
    pr = problem(mesh(data=4, tensor=2), {"row": (8, 3), "mixed": (16,)}, specs)
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, master="fp32", replica_axis="replica")
    step = jit_step(pr, tx)
    check(step, pr, tx)
    params, _, state = step(pr.params, tx.init(pr.params))
    assert {k: p.sharding.spec for k, p in params.items()} == specs
    assert state.master["mixed"].sharding.spec == specs["mixed"]


def test_the_kind_of_a_gradient_kept_sharded_must_be_declared():
    pr = resident_problem()
    tx = jzero.zero(MOMENTUM[0], mesh=pr.mesh, replica_axis="replica")
    with pytest.raises(ValueError, match=r"\['column'\]: the parameter is kept sharded over 'data', so the type"):
        resident_step(pr, tx, "local")(pr.params, tx.init(pr.params))


def test_a_mean_gradient_kept_sharded_must_not_vary_over_replicas():
    pr = resident_problem()
    with pytest.raises(ValueError, match=r"declared gradients='reduced', but it varies over \['replica'\]"):
        attempt(pr, grads=varying("replica"), gradients="reduced", replica_axis="replica")
