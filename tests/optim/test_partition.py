"""How leaves are cut: the plan as data, its round trip on devices, its report, and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import mesh, problem, values
from oracles import adam

import jzero
from jzero.optim import collectives
from jzero.optim.partition import make_plan

DATA8, DATA2 = {"data": 8}, {"data": 2, "tensor": 2, "pipeline": 2}
CASES = [  # mesh, shape, spec, stacked -> split, shape of all shards, their spec, shape of one
    (DATA8, (16, 4), P(), 0, 0, (16, 4), P("data"), (2, 4)),
    (DATA8, (4, 16), P(), 0, 1, (4, 16), P(None, "data"), (4, 2)),
    (DATA8, (5, 3), P(), 0, None, (1, 16), P(None, "data"), (1, 2)),
    (DATA8, (7,), P(), 0, None, (8,), P("data"), (1,)),
    (DATA8, (), P(), 0, None, (8,), P("data"), (1,)),
    (DATA8, (0, 3), P(), 0, None, (1, 0), P(None, "data"), (1, 0)),
    (DATA8, (8, 16, 3), P(), 1, 1, (8, 16, 3), P(None, "data"), (8, 2, 3)),
    (DATA8, (8, 7), P(), 1, None, (8, 8), P(None, "data"), (8, 1)),
    (DATA8, (3,), P(), 1, None, (3, 8), P(None, "data"), (3, 1)),
    (DATA2, (8, 6), P(None, "tensor"), 0, 0, (8, 6), P("data", "tensor"), (4, 3)),
    (DATA2, (8, 6), P("tensor"), 0, 1, (8, 6), P("tensor", "data"), (4, 3)),
    (DATA2, (6,), P("tensor"), 0, None, (8,), P(("data", "tensor")), (2,)),
    (DATA2, (12,), P(("pipeline", "tensor")), 0, None, (16,), P(("data", "pipeline", "tensor")), (2,)),
    (DATA2, (4, 2), P("pipeline", "tensor"), 0, None, (2, 4), P("pipeline", ("data", "tensor")), (1, 1)),
    (DATA2, (4, 6), P("pipeline", "tensor"), 1, None, (4, 8), P("pipeline", ("data", "tensor")), (2, 2)),
    (DATA2, (4, 6, 5), P("pipeline", "tensor"), 1, None, (4, 2, 16), P("pipeline", "tensor", "data"), (2, 1, 8)),
    (DATA2, (4, 3), P("pipeline"), 1, None, (4, 4), P("pipeline", "data"), (2, 2)),
    (DATA2, (8, 6), P("data"), 0, 0, (8, 6), P("data"), (4, 6)),
    (DATA2, (8, 4), P(None, ("data", "tensor")), 0, 1, (8, 4), P(None, ("data", "tensor")), (8, 1)),
]
SHARED = [  # the same with `share`
    (DATA2, (8,), P("tensor"), 0, 0, (8,), P(("tensor", "data")), (2,)),
    (DATA2, (3, 8), P(None, "tensor"), 1, 1, (3, 8), P(None, ("tensor", "data")), (3, 2)),
    (DATA2, (8, 6), P("tensor"), 0, 1, (8, 6), P("tensor", "data"), (4, 3)),  # a dimension of its own comes first
    (DATA2, (6,), P("tensor"), 0, None, (8,), P(("data", "tensor")), (2,)),  # 3 on a rank: data does not divide it
]
CUT = ("sizes", "shape", "spec", "stacked", "split", "whole", "shard_spec", "local")


def planned(sizes, shape, spec, stacked, dtype=jnp.float32, **options):
    m = mesh(**sizes)
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(m, spec))
    return make_plan({"x": array}, m, axis="data", stacked=lambda path: stacked, **options).leaves[0]


@pytest.mark.parametrize(CUT, SHARED)
def test_a_dimension_that_other_axes_split_too(sizes, shape, spec, stacked, split, whole, shard_spec, local):
    leaf = planned(sizes, shape, spec, stacked, share=True)
    assert (leaf.split, leaf.shard_shape, leaf.shard_spec, leaf.shard_local_shape) == (split, whole, shard_spec, local)
    assert leaf.shares_split_dimension == (split is not None and shard_spec[split] == ("tensor", "data"))
    assert NamedSharding(mesh(**sizes), leaf.shard_spec).shard_shape(leaf.shard_shape) == local


@pytest.mark.parametrize(CUT, CASES)
def test_where_a_leaf_is_cut(sizes, shape, spec, stacked, split, whole, shard_spec, local):
    leaf = planned(sizes, shape, spec, stacked)
    assert (leaf.split, leaf.shard_shape, leaf.shard_spec, leaf.shard_local_shape) == (split, whole, shard_spec, local)
    assert leaf.padding == math.prod(whole) - math.prod(shape)
    sharding = NamedSharding(mesh(**sizes), leaf.shard_spec)
    assert sharding.shard_shape(leaf.shard_shape) == local
    assert leaf.resident == ("data" in str(spec))
    assert len(whole) == max(len(shape), stacked + 1 if split is None else 0)  # for masks by dimensions


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([(), ("tensor",), ("pipeline",)])), max_size=4),
    st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_any_leaf_is_cut_evenly(dimensions, stacked):
    """All devices hold as much, every element has a place, and padding is less than one element per rank and layer."""
    names = [n for _, group in dimensions for n in group]
    if len(set(names)) < len(names):
        return
    shape = tuple(size * 2 if group else size for size, group in dimensions)  # divisible by the axis that splits it
    stacked = min(stacked, len(shape))
    leaf = planned(DATA2, shape, P(*(group or None for _, group in dimensions)), stacked)
    assert NamedSharding(mesh(**DATA2), leaf.shard_spec).shard_shape(leaf.shard_shape) == leaf.shard_local_shape
    layers, parts = math.prod(shape[:stacked]), math.prod(leaf.others[stacked:])
    assert 0 <= leaf.padding < max(layers * parts * leaf.ranks, 1)
    assert len(leaf.shard_shape) == max(len(shape), stacked + 1 if leaf.split is None else 0)


@pytest.mark.parametrize("sizes", [DATA8, DATA2], ids=["data 8", "data 2 tensor 2 pipeline 2"])
def test_shards_on_devices_make_up_the_leaf(sizes):
    """take, then gather; and scatter of every rank's own value is the mean's shard."""
    m = mesh(**sizes)
    leaves = [planned(*case[:4]) for case in CASES if case[0] == sizes]
    leaves = [leaf for leaf in leaves if not leaf.resident]
    arrays = list(values({str(i): leaf.shape for i, leaf in enumerate(leaves)}).values())

    def there_and_back(xs):
        shards = [collectives.take(x, leaf) for x, leaf in zip(xs, leaves, strict=True)]
        weight = 1.0 + jax.lax.axis_index("data")  # mean over ranks: (1 + ranks) / 2
        own = [collectives.vary(x, ("data",)) * weight for x in xs]
        means = [collectives.scatter(g, leaf) for g, leaf in zip(own, leaves, strict=True)]
        whole = [collectives.gather(s, leaf, to="invarying") for s, leaf in zip(shards, leaves, strict=True)]
        low = [
            collectives.gather(s, leaf, dtype=jnp.bfloat16, to="invarying")
            for s, leaf in zip(shards, leaves, strict=True)
        ]
        return shards, means, whole, low

    specs, cut = [leaf.param_spec for leaf in leaves], [leaf.shard_spec for leaf in leaves]
    mapped = jax.shard_map(there_and_back, mesh=m, in_specs=(specs,), out_specs=(cut, cut, specs, specs))
    shards, means, whole, low = jax.block_until_ready(jax.jit(mapped)(arrays))
    factor = (1 + sizes["data"]) / 2
    for x, shard, mean, back, half, leaf in zip(arrays, shards, means, whole, low, leaves, strict=True):
        assert shard.shape == leaf.shard_shape
        np.testing.assert_array_equal(np.asarray(back), x)
        np.testing.assert_array_equal(np.asarray(half), x.astype("bfloat16"))
        np.testing.assert_allclose(np.asarray(mean), factor * np.asarray(shard), rtol=1e-6)
        assert np.sum(np.abs(np.asarray(shard)), dtype=np.float64) == pytest.approx(
            np.abs(x).sum(dtype=np.float64), rel=1e-6
        )


@pytest.mark.parametrize("sizes", [DATA8, DATA2], ids=["data 8", "data 2 tensor 2 pipeline 2"])
def test_the_global_norm_counts_every_element_once(sizes):
    m = mesh(**sizes)
    leaves = [planned(*case[:4]) for case in CASES if case[0] == sizes]
    arrays = values({str(i): leaf.shape for i, leaf in enumerate(leaves)})

    def norm(xs):
        own = [x if leaf.resident else collectives.take(x, leaf) for x, leaf in zip(xs, leaves, strict=True)]
        return collectives.global_norm(own, leaves)

    mapped = jax.shard_map(norm, mesh=m, in_specs=([leaf.param_spec for leaf in leaves],), out_specs=P())
    assert float(jax.jit(mapped)(list(arrays.values()))) == pytest.approx(adam.norm(arrays), rel=1e-6)


def test_the_norm_that_update_shards_returns_is_before_clipping():
    pr = problem(
        mesh(**DATA2), {"w": (8, 16), "bias": (6,), "odd": (5, 3)}, {"w": P(None, "tensor"), "bias": P("tensor")}
    )
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, clip_norm=1.0)
    plan, specs = tx.plan(pr.params), tx.state_specs(pr.params)

    def step(grads, state, params):
        take = lambda tree: [
            collectives.take(x, leaf) for x, leaf in zip(plan.flatten(tree, ""), plan.leaves, strict=True)
        ]
        new, state, norm = tx.update_shards(take(grads), state, take(params))
        whole = [collectives.gather(x, leaf, to="invarying") for x, leaf in zip(new, plan.leaves, strict=True)]
        return plan.unflatten(whole), state, norm

    in_specs, out_specs = (pr.specs, specs, pr.specs), (pr.specs, specs, P())
    mapped = jax.jit(jax.shard_map(step, mesh=pr.mesh, in_specs=in_specs, out_specs=out_specs))
    grads = pr.gradients(pr.start)
    found, _, norm = mapped(pr.place(grads), tx.init(pr.params), pr.params)
    assert float(norm) == pytest.approx(adam.norm(grads), rel=1e-6)
    assert adam.norm(grads) > 1.0
    for k, g in adam.clip(grads, 1.0).items():
        np.testing.assert_allclose(np.asarray(found[k]), pr.start[k] - 0.1 * g, rtol=1.3e-6, atol=1e-6)


def test_one_layer_of_a_stacked_leaf():
    for case in CASES:
        leaf = planned(*case[:4])
        if leaf.stacked:
            layer = leaf.layer()
            assert layer.shard_local_shape == leaf.shard_local_shape[1:]
            assert layer.shard_shape == leaf.shard_shape[1:]
            assert layer.local_shape == leaf.local_shape[1:]
            assert layer.shard_spec == P(*leaf.shard_spec[1:])
    with pytest.raises(ValueError, match=r"\['x'\]: expected a leaf with one stacked dimension, found 0"):
        planned(*CASES[0][:4]).layer()


@pytest.mark.parametrize("axis", ["data", None])
@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 1, "tensor": 2}])
def test_an_axis_of_size_one_or_no_axis_needs_nothing_special(axis, sizes):
    specs = {"w": P(None, "tensor")}
    pr = problem(mesh(**sizes), {"w": (5, 4), "odd": (7,), "scalar": (), "empty": (0,)}, specs)
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, axis=axis, master="fp32", clip_norm=1.0)
    state = tx.init(pr.params)
    assert {k: x.size for k, x in state.master.items()} == {k: max(x.size, 0) for k, x in pr.start.items()}
    found, _ = jax.jit(tx.step)(pr.params, state, pr.params)
    for k, g in adam.clip(pr.start, 1.0).items():
        np.testing.assert_allclose(np.asarray(found[k]), pr.start[k] - 0.1 * g, rtol=1e-6, atol=1e-7)


def test_axes_of_size_one_in_a_parameters_own_spec():
    pr = problem(mesh(data=4), {"w": (8, 4), "bias": (6,)}, {"w": P("pipeline", "tensor"), "bias": P("tensor")})
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh)
    found, _ = jax.jit(tx.step)(pr.params, tx.init(pr.params), pr.params)
    for k, x in pr.start.items():
        np.testing.assert_allclose(np.asarray(found[k]), 0.9 * x, rtol=1e-6)


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_lists_every_leaf_and_what_its_state_costs():
    pr = problem(
        mesh(**DATA2), {"w": (8, 16), "bias": (6,), "odd": (5, 3)}, {"w": P(None, "tensor"), "bias": P("tensor")}
    )
    params = pr.place(pr.start, jnp.bfloat16)
    tx = jzero.distributed_fused_adam(1e-3, mesh=pr.mesh)
    report = tx.partition_report(params)
    rows = {row.path: row for row in report}
    assert rows["['w']"][1:5] == ((8, 16), "bfloat16", "dimension 0 of 2", (4, 8))
    assert {row.precision for row in report} == {"remainder, mu fp32, nu fp32"}
    assert rows["['bias']"].split == "flattened, 2 of padding"
    assert rows["['odd']"].split == "flattened, 1 of padding"
    state = tx.init(params)
    kept = (state.master, state.inner[0].mu, state.inner[0].nu)
    measured = {k: sum(x[k].addressable_shards[0].data.nbytes for x in kept) for k in params}
    assert {row.path: row.state_bytes for row in report} == {f"['{k}']": n for k, n in measured.items()}
    assert measured["w"] == (2 + 4 + 4) * 8 * 16 // 4
    lines = str(report).splitlines()
    assert lines[0].split() == ["path", "shape", "dtype", "split", "shard", "precision", "state_bytes"]
    assert lines[-1] == f"total: {sum(measured.values()):,} bytes of state per device"
    assert len(lines) == 2 + len(params)


# --- what is refused -------------------------------------------------------------------------------------------------


def refuse(match, params, *, sizes=None, **options):
    with pytest.raises(ValueError, match=match):
        jzero.zero(optax.sgd(0.1), mesh=mesh(**(sizes or DATA8)), **options).init(params)


def test_leaves_that_are_refused():
    on = lambda shape, spec, **sizes: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh(**sizes), spec)
    )
    w = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    refuse(
        r"\['n'\]: expected a floating-point parameter, found int32; keep it out with optax.masked",
        {"n": jnp.arange(3)},
    )
    refuse(r"\['x'\]: expected an array, found float; wrap it in jnp.asarray", {"x": 1.0})
    refuse(r"\['w'\]: dimension 1 of \(8, 6\) is split over \('tensor',\), and 4 does not divide 6",
           {"w": w}, sizes={"data": 2, "tensor": 4}, param_specs=P(None, "tensor"))  # fmt: skip
    refuse(r"\['w'\]: dimension 1 of \(8, 6\) is split over 'data', and 8 does not divide it",
           {"w": w}, param_specs=P(None, "data"))  # fmt: skip
    refuse(
        r"\['w'\]: expected an array on the mesh .*'data': 8.*, found .*'data': 4", {"w": on((8, 6), P("data"), data=4)}
    )
    refuse(r"\['w'\]: its sharding names the axis 'rows', which the mesh .* lacks", {"w": w}, param_specs=P("rows"))
    refuse(r"\['w'\]: expected a spec of at most 2 entries", {"w": w}, param_specs=P(None, None, "data"))
    refuse(r"\['w'\]: expected stacked between 0 and its 2 dimensions, found 3", {"w": w}, stacked=lambda path: 3)
    refuse(r"\['w'\]: 'data' splits dimension 0, one of its 1 stacked ones", {"w": w}, stacked=lambda path: 1,
           param_specs=P("data"))  # fmt: skip
    refuse(r"\['w'\]: it is split over \['replica'\], over which its state is to be repeated", {"w": w},
           sizes={"data": 4, "replica": 2}, param_specs=P("replica"), replica_axis="replica")  # fmt: skip


def test_options_that_are_refused():
    make = lambda **options: jzero.zero(optax.sgd(0.1), mesh=mesh(**DATA8), **options)
    for options, match in [
        ({"axis": "rows"}, r"axis 'rows': expected one of the mesh's axes .*; choose one of them"),
        ({"replica_axis": "data"}, r"replica_axis 'data': expected an axis of the mesh .* other than 'data'"),
        ({"replica_axis": ("replica", "rows")}, r"replica_axis 'rows': expected an axis of the mesh"),
        ({"master": "bf16"}, "master: expected one of 'auto', 'fp32', 'none', .*, found 'bf16'"),
        ({"gradients": "mean"}, "gradients: expected one of 'auto', 'local', 'reduced', 'unreduced', found 'mean'"),
    ]:
        with pytest.raises(ValueError, match=match):
            make(**options).init({"w": jnp.ones(8)})


def test_trees_and_arrays_that_do_not_fit_are_named():
    pr = problem(mesh(**DATA8), {"w": (8, 4), "odd": (5, 3)})
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh)
    params, state = pr.params, tx.init(pr.params)
    w, odd = params["w"], params["odd"]
    for grads, against, match in [
        (params, None, r"update needs the parameters; call tx.update\(grads, state, params\)"),
        (
            {"w": w},
            params,
            r"gradients: expected the structure of the parameters given to init, .*: \['odd'\] is missing",
        ),
        (params | {"x": w}, params, r"gradients: .* found another: \['x'\] is not a parameter"),
        (params, {"w": w}, r"params: .*: \['odd'\] is missing"),
        ({"w": w.T, "odd": odd}, params, r"gradient of \['w'\]: expected shape \(8, 4\), found \(4, 8\)"),
        ({"w": w, "odd": odd[:4]}, params, r"gradient of \['odd'\]: expected shape \(5, 3\), found \(4, 3\)"),
        (params, {"w": w.T, "odd": odd}, r"parameter of \['w'\]: expected shape \(8, 4\), found \(4, 8\)"),
        (
            params,
            {"w": w.astype("bfloat16"), "odd": odd},
            r"parameter of \['w'\]: expected dtype float32 as given to init",
        ),
    ]:
        for form in (tx.update, tx.step):
            with pytest.raises(ValueError, match=match):
                form(grads, state, against)


def test_init_inside_a_region_is_refused():
    m = mesh(**DATA8)
    tx = jzero.zero(optax.sgd(0.1), mesh=m)
    region = jax.shard_map(lambda p: tx.init(p).inner, mesh=m, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="init needs whole arrays, found a call inside shard_map over"):
        jax.eval_shape(region, {"w": jnp.ones(8)})


def test_gathering_a_part_that_is_not_contiguous_is_refused():
    leaf = planned(DATA2, (8, 4), P(None, ("data", "tensor")), 0)
    gather = jax.shard_map(
        lambda x: collectives.gather(x, leaf), mesh=mesh(**DATA2), in_specs=leaf.param_spec, out_specs=P()
    )
    with pytest.raises(ValueError, match=r"gather over 'data' alone gives no contiguous part; expected 'data' last"):
        jax.eval_shape(gather, jnp.ones((8, 4)))
