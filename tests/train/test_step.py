"""The compiled step against plain autodiff and optax.adamw on one device, in every policy and way to accumulate."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import BATCH, VOCABULARY, T, batch, config, program, reference, train, whole

POLICIES = ("replicated", "gather_on_forward", "gather_twice")
LAYOUTS = {
    "replicated": config(8),
    "gather_on_forward": config(8, "gather_on_forward"),
    "gather_twice": config(8, "gather_twice"),
    "zero off": config(8, optim={"name": "fused_adam"}),
    "replica 2": config(8, replica_parallel_size=2),
    "replica 4, shards kept": config(8, "gather_twice", replica_parallel_size=4),
    "one device": config(1),
    "2 micro-batches": config(2, "gather_on_forward", 2),
    "4 micro-batches, replicated": config(2, "replicated", 4),
    "4 micro-batches, gather_on_forward": config(2, "gather_on_forward", 4),
    "4 micro-batches, gather_twice": config(2, "gather_twice", 4),
    "4 micro-batches into shards, replicated": config(2, "replicated", 4, grad_accumulation="sharded"),
    "4 micro-batches into shards, gather_on_forward": config(2, "gather_on_forward", 4, grad_accumulation="sharded"),
    "2 micro-batches into shards, gather_on_forward": config(2, "gather_on_forward", 2, grad_accumulation="sharded"),
    "4 micro-batches into shards, gather_twice": config(2, "gather_twice", 4, grad_accumulation="sharded"),
    "selective checkpointing": config(4, "gather_twice", activations_checkpoint_granularity="selective"),
    "full checkpointing": config(4, "gather_on_forward", activations_checkpoint_granularity="full"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_match_optax_on_one_device(name):
    expected, rows = reference(config(1), 10)
    prog = program(LAYOUTS[name])
    state, found = train(prog, 10)
    np.testing.assert_allclose(found, rows, rtol=1e-5)
    params = whole(prog, state.params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1.3e-6, atol=1e-5), params, expected)


@functools.cache
def without_zero():
    return train(program(config(8, optim={"name": "fused_adam"})), 20)[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_zero_on_and_off_give_the_same_loss_at_every_step(policy):
    off = without_zero()
    _, on = train(program(config(8, policy)), 20)
    np.testing.assert_allclose(on[:, 0], off[:, 0], rtol=1e-6)
    assert len(set(on[:, 0])) == 20


@pytest.mark.parametrize("policy", POLICIES)
def test_each_device_holds_an_eighth_of_the_state(policy):
    prog = program(config(8, policy))
    state = prog.init()
    leaves = prog.layout.plan.leaves
    shards = sum(math.prod(leaf.shard_local_shape) for leaf in leaves)
    padding = sum(leaf.padding for leaf in leaves)
    assert 8 * shards == sum(math.prod(leaf.shape) for leaf in leaves) + padding
    assert padding < 8 * 8 * len(leaves)
    for device in jax.devices():
        held = [s.data.nbytes for x in jax.tree.leaves(state.opt) for s in x.addressable_shards if s.device == device]
        assert sum(held) == 2 * 4 * shards + 2 * 4  # two moments in fp32, and the two step counts
    stored = sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards[:1])
    whole_bytes = 4 * sum(math.prod(leaf.shape) for leaf in leaves)
    assert stored == (whole_bytes if policy == "replicated" else 4 * shards)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_keeps_types_and_shardings_and_nothing_compiles_twice(policy):
    prog = program(config(8, policy))
    before = prog.init()
    seen = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(before)]
    after, _ = train(prog, 3, before)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for (shape, dtype, sharding), x in zip(seen, jax.tree.leaves(after), strict=True):
        assert (shape, dtype) == (x.shape, x.dtype)
        assert sharding.is_equivalent_to(x.sharding, x.ndim)
    assert prog.step._cache_size() == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(before.opt) if x.ndim), "the state's buffers are donated"


def test_the_initial_model_is_the_same_on_every_mesh():
    expected = whole(program(config(1)), program(config(1)).init().params)
    for conf in (config(8, "gather_twice"), config(8, replica_parallel_size=2)):
        prog = program(conf)
        jax.tree.map(np.testing.assert_array_equal, whole(prog, prog.init().params), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_abstract_state_is_what_init_makes(policy):
    prog = program(config(8, policy, precision="bf16"))
    state = prog.init()
    same = jax.tree.map(
        lambda a, x: (a.shape, a.dtype) == (x.shape, x.dtype) and a.sharding.is_equivalent_to(x.sharding, x.ndim),
        prog.abstract, state,
    )  # fmt: skip
    assert jax.tree.all(same)


def test_dropout_masks_do_not_depend_on_mesh_or_micro_batches():
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    _, expected = train(program(config(1, **rates)), 3)
    _, without = train(program(config(1)), 3)
    assert not np.allclose(expected, without, rtol=1e-4)
    for conf in (config(8, "gather_twice", **rates), config(2, "gather_on_forward", 4, **rates)):
        np.testing.assert_allclose(train(program(conf), 3)[1], expected, rtol=1e-5)


FEW = [(1, "gather_twice"), (2, "gather_on_forward"), (1, "replicated")]
MORE_FEW = [(2, "gather_twice"), (1, "gather_on_forward"), (2, "replicated")]


@pytest.mark.parametrize(
    ("layers", "policy"), [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_FEW)]
)
def test_few_layers(layers, policy):
    _, expected = reference(config(1, num_layers=layers), 3)
    for count in (1, 4):
        _, found = train(program(config(2, policy, count, num_layers=layers)), 3)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bf16_follows_fp32_and_keeps_the_lost_bits():
    prog = program(config(8, "gather_on_forward", precision="bf16"))
    state, found = train(prog, 10)
    np.testing.assert_allclose(found[:, 0], reference(config(1), 10)[1][:, 0], rtol=1e-3)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.opt.master)} == {jnp.dtype(jnp.int16)}


MODES = {
    "fp32": ({"master": "fp32"}, 1e-3),
    "remainder": ({"master": "remainder"}, 1e-3),
    "scaled_fp16": ({"exp_avg_dtype": "scaled_fp16", "exp_avg_sq_dtype": "scaled_fp16"}, 1e-2),
    "scaled_fp8": ({"exp_avg_dtype": "scaled_fp8", "exp_avg_sq_dtype": "scaled_fp16"}, 1e-2),
    "bf16": (
        {"master": "none", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
        1e-2,
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_precision_mode_follows_fp32(mode):
    optim, rtol = MODES[mode]
    policy = "replicated" if mode in ("remainder", "scaled_fp8") else "gather_on_forward"
    _, found = train(program(config(8, policy, precision="bf16", optim=optim)), 10)
    np.testing.assert_allclose(found[:, 0], reference(config(1), 10)[1][:, 0], rtol=rtol)


def test_evaluation_and_logits_agree_with_the_model():
    prog = program(config(8, "gather_twice"))
    params = prog.init().params
    data = batch(0)
    total, count = prog.evaluate(params, prog.place(data))
    assert float(count) == data["loss_mask"].sum()
    logits = np.asarray(prog.logits(params, data["tokens"]))
    assert logits.shape == (BATCH, T, VOCABULARY)
    shifted = logits - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, data["labels"][..., None], -1)[..., 0]
    np.testing.assert_allclose(float(total), (losses * data["loss_mask"]).sum(), rtol=1e-5)


def test_tokens_that_are_masked_out_do_not_count():
    prog = program(config(8))
    data = dict(batch(0))
    state, metrics = prog.step(prog.init(), prog.place(data))
    changed = data | {"labels": np.where(data["loss_mask"] > 0, data["labels"], 0)}
    other, metrics2 = prog.step(prog.init(), prog.place(changed))
    assert float(metrics["loss"]) == float(metrics2["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)


def test_bytes_in_the_table_are_those_of_the_arrays():
    prog = program(config(8, "gather_twice", precision="bf16"))
    state = prog.init()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.opt)))
    rows = dict(prog.summary())
    assert rows["parameters + optimizer state per device"] == f"{held / 2**20:,.1f} MiB"
