"""A state saved on one number of ranks is taken up on another, whatever does not divide."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero import JzeroError, make_mesh
from jzero.optim.partition import make_plan
from jzero.train.checkpoint import Checkpoints, load_params
from jzero.train.reshape import _scaled_part, is_form, orders, parameters

SHAPES = {"blocks": {"w": (2, 5, 7), "v": (3, 7)}, "b": (7,), "even": (12, 5), "one": ()}


class State(NamedTuple):
    step: Any
    params: Any
    opt: Any


def stacked(path: str) -> int:
    return int("blocks" in path)


def setup(ranks: int, dtype: Any = jnp.bfloat16, replica: int = 1, **options: Any):
    mesh = make_mesh(data=ranks, replica=replica, devices=jax.devices()[: ranks * replica])
    options = {"stacked": stacked, "gradients": "reduced", "replica_axis": "replica"} | options
    tx = jzero.distributed_fused_adam(1e-2, mesh=mesh, **options)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere),
        SHAPES,
        is_leaf=lambda x: type(x) is tuple,
    )
    plan = make_plan(abstract, mesh, axis="data", stacked=stacked)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return tx, State(step, abstract, tx.init(abstract)), plan


def random_params(abstract: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), abstract)


def numbers(state: State) -> list[np.ndarray]:
    """The numbers of a state in order, without padding: the same for every number of ranks."""
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = [getattr(key, "key", None) for key in path]
        shape = next((s for s in (_at(SHAPES, keys[i:]) for i in range(len(keys))) if s is not None), leaf.shape)
        lead = shape[: int("blocks" in keys)]
        flat = np.asarray(leaf, np.float32).reshape(*lead, -1)
        out.append(flat[..., : math.prod(shape[len(lead) :])])
        assert not flat[..., math.prod(shape[len(lead) :]) :].any()  # padding is zero
    return out


def _at(tree: Any, keys: list) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if type(tree) is tuple else None


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (5, 1), (1, 7), (4, 2)])
def test_from_one_number_of_ranks_to_another(tmp_path, before, after):
    tx, abstract, plan = setup(before)
    params = random_params(abstract.params, 0)
    params, opt = jax.jit(tx.step)(random_params(abstract.params, 1), tx.init(params), params)
    state = State(jnp.int32(1), params, opt)
    checkpoints = Checkpoints(tmp_path, plan=plan)
    checkpoints.save(1, state._replace(step=jax.device_put(1, abstract.step.sharding)), {})
    checkpoints.close()

    tx, abstract, plan = setup(after)
    checkpoints = Checkpoints(tmp_path, plan=plan)
    found = checkpoints.restore(abstract)
    checkpoints.close()
    assert found is not None
    for one, other in zip(numbers(state), numbers(found[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    want = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(abstract)]
    assert [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(found[0])] == want
    jax.jit(tx.step)(random_params(abstract.params, 2), found[0].opt, found[0].params)  # and training goes on


# --- scales, which are one per rank ----------------------------------------------------------------------------------

MIXED = {"mu": "scaled_fp8", "nu": "scaled_fp16"}
MODES = {  # options, and how far parameters may be off after three steps: not, Apex's tolerance, an eighth of each step
    "remainder": ({"master": "remainder"}, 0.0, 0.0),
    "scaled": ({"master": "scaled_fp16", "state_dtype": "scaled_fp16"}, 5e-2, 1e-5),
    "fp8 moments": ({"master": "remainder", "state_dtype": MIXED}, 2.0**-8, 3 * 1e-2 / 8),
}
REST = [((3, 1), (4, 2)), ((4, 2), (8, 1)), ((5, 1), (1, 1)), ((4, 1), (4, 2))]
MOVES = [((4, 1), (3, 2)), *(pytest.param(*move, marks=pytest.mark.slow) for move in REST)]


@pytest.mark.parametrize(("before", "after"), MOVES)
@pytest.mark.parametrize("mode", MODES)
def test_low_precision_goes_on_with_other_ranks_and_replicas(tmp_path, mode, before, after):
    """Saved on data x replica ranks, taken up on others: three more steps as where it was saved, rounding said."""
    options, rtol, atol = MODES[mode]
    tx, abstract, plan = setup(before[0], replica=before[1], **options)
    params = random_params(abstract.params, 0)
    state = State(jnp.int32(1), *jax.jit(tx.step)(random_params(abstract.params, 1), tx.init(params), params))
    checkpoints = Checkpoints(tmp_path, plan=plan)
    checkpoints.save(1, state._replace(step=jax.device_put(1, abstract.step.sharding)), {})
    checkpoints.close()
    expected = three_steps(tx, abstract, state)

    tx, abstract, plan = setup(after[0], replica=after[1], **options)
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, plan=plan, note=notes.append)
    found = checkpoints.restore(abstract)
    checkpoints.close()
    assert found is not None
    want = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(abstract)]
    assert [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(found[0])] == want
    rounded = mode != "remainder" and before[0] != after[0]
    count = {"scaled": 3, "fp8 moments": 2, "remainder": 0}[mode] * len(plan.leaves)
    said = (
        f"{count} arrays of optimizer state have one scale per data rank, and their number changed: rounded once more"
    )
    assert [note.startswith(said) for note in notes] == [True] * rounded
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(three_steps(tx, abstract, found[0])), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=rtol if rounded else 0, atol=atol)


def three_steps(tx: Any, abstract: State, state: State) -> Any:
    params, opt, step = state.params, state.opt, jax.jit(tx.step)
    for seed in (2, 3, 4):
        params, opt = step(random_params(abstract.params, seed), opt, params)
    return params


def test_scales_of_a_parameter_named_like_their_own_parts():
    """A norm's parameter may be called "scale": its moments are `scale/value` and `scale/scale`."""
    leaf = setup(1)[2].leaves[0]
    leaves = {"norm/scale": leaf, "w": leaf}
    assert _scaled_part("optimizer/mu/norm/scale", leaves) == ("optimizer/mu/norm/scale", "")
    assert _scaled_part("optimizer/mu/norm/scale/scale", leaves) == ("optimizer/mu/norm/scale", "scale")
    assert _scaled_part("optimizer/mu/w/value", leaves) == ("optimizer/mu/w", "value")
    assert _scaled_part("optimizer/other/value", leaves) == ("optimizer/other/value", "")


def test_stored_shards_become_whole_parameters(tmp_path):
    """As `jzero generate` meets them: parameters kept as shards on 5 ranks, wanted whole on one."""
    _, abstract, plan = setup(5)
    whole = random_params(abstract.params, 0)
    flat = []
    for leaf, x in zip(plan.leaves, jax.tree.leaves(whole), strict=True):
        lead = leaf.shape[: leaf.stacked]
        rest = np.asarray(x).reshape(*lead, -1)
        room = math.prod(leaf.shard_shape[leaf.stacked :])
        rest = np.pad(rest, [(0, 0)] * len(lead) + [(0, room - rest.shape[-1])]).reshape(leaf.shard_shape)
        sharding = jax.sharding.NamedSharding(abstract.step.sharding.mesh, leaf.shard_spec)
        flat.append(jax.device_put(rest, sharding))
    assert {x.shape for x in flat} != {x.shape for x in jax.tree.leaves(whole)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, State(jnp.int32(0), plan.unflatten(flat), {"count": jnp.int32(0)}), {})
    checkpoints.close()
    _, one, plan = setup(1)
    params = load_params(tmp_path, one.params, plan=plan)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    with pytest.raises(JzeroError, match=r"params/.*: expected bfloat16\[.*\], found bfloat16\[.*\]"):
        load_params(tmp_path, one.params)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 7), True),
        ((2, 1, 35), True),
        ((2, 1, 36), True),
        ((2, 1, 34), False),  # too small
        ((3, 1, 36), False),  # other layers
        ((2, 36), False),
        ((2, 2, 36), False),
        ((2, 7, 5), False),
    ],
)
def test_forms_of_a_parameter(shape, expected):
    _, _, plan = setup(1)
    leaf = next(leaf for leaf in plan.leaves if leaf.path == "['blocks']['w']")
    assert is_form(shape, leaf) is expected


def test_a_state_that_lies_in_the_order_of_its_mesh_stays_on_it(tmp_path):
    """[6] over tensor 2, flattened over data 4: two shards of a padded [4] each, as many numbers as [8] over data 8."""
    P = jax.sharding.PartitionSpec

    def on(data: int, tensor: int):
        mesh = make_mesh(data=data, tensor=tensor, devices=jax.devices()[: data * tensor])
        spec = P("tensor") if tensor > 1 else P()
        place = lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
        )
        params = {"b": place((6,), spec)}
        tx = jzero.distributed_fused_adam(1e-2, mesh=mesh, param_specs={"b": spec}, gradients="reduced")
        plan = make_plan(params, mesh, axis="data", param_specs={"b": spec}, share=True)
        return State(place((), P()), params, tx.init(params)), plan

    abstract, plan = on(4, 2)
    assert plan.leaves[0].shares_flat_dimension
    state = jax.tree.map(
        lambda x: jax.device_put(np.arange(x.size, dtype=x.dtype).reshape(x.shape), x.sharding), abstract
    )
    checkpoints = Checkpoints(tmp_path, plan=plan)
    checkpoints.save(0, state, {})
    restored, _ = checkpoints.restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    checkpoints.close()
    for data, tensor in ((8, 1), (2, 2), (1, 2)):
        abstract, plan = on(data, tensor)
        checkpoints = Checkpoints(tmp_path, plan=plan)
        with pytest.raises(JzeroError, match="/b is flattened over data 4 inside of 2 parts, expected"):
            checkpoints.restore(abstract)
        checkpoints.close()
        whole = load_params(tmp_path, abstract.params, plan=plan)  # they were stored whole
        np.testing.assert_array_equal(whole["b"], np.arange(6))


def test_stages_do_not_change_the_order_of_a_flattened_layer():
    mesh = make_mesh(pipeline=2, data=2, devices=jax.devices()[:4])
    shape = jax.ShapeDtypeStruct((2, 2, 7), jnp.float32)  # two chunks per stage
    spec = jax.sharding.PartitionSpec(None, "pipeline")
    plan = make_plan({"b": shape}, mesh, axis="data", param_specs={"b": spec}, stacked=lambda path: 2)
    (leaf,) = plan.leaves
    assert leaf.split is None
    sharding = jax.sharding.NamedSharding(mesh, leaf.shard_spec)
    stored = {"b": jax.ShapeDtypeStruct(leaf.shard_shape, jnp.float32, sharding=sharding)}
    assert orders(stored, parameters(plan)) == {}
    for form in ((4, 7), (4, 8), (2, 2, 8), (4, 12)):
        assert is_form(form, leaf)
    assert not is_form((5, 7), leaf)
    assert not is_form((4, 6), leaf)
