"""Whole steps compiled for 8 H100s, with GPT-2 124M's parameters: the trainer's, and a user's own in an optax chain.

What the update phase reads and writes, whether its roundings are there, what crosses the wire, and what a step copies
besides, all counted in the scheduled module.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.test_precision_traffic import gpt2
from oracles import traffic
from oracles.hlo import collective_bytes
from train.test_full_size import program

import jzero
from jzero.plan import hlo, targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]

# --- the trainer's step ----------------------------------------------------------------------------------------------

MODES = {  # configuration, least bytes per parameter of the update (a first pass for scales included), dtypes of state
    "remainder": ({"master": "remainder"}, 28, {"s16", "f32"}),
    "fp32": ({"master": "fp32"}, 30, {"f32"}),
    "fp8 moments": ({"exp_avg_dtype": "scaled_fp8", "exp_avg_sq_dtype": "scaled_fp16"}, 7 + 11 + 7,
                    {"s16", "f16", "f8e4m3fn"}),
}  # fmt: skip


@functools.cache
def trained(policy, mode):
    options = [f"model.optim.{k}={v}" for k, v in MODES[mode][0].items()]
    follows = f"model.optim.overlap_param_sync={str(policy != 'replicated').lower()}"
    prog = program("gpt2_124m", f"model.optim.policy={policy}", follows, "model.global_batch_size=64", *options)
    text = prog.step.lower(prog.abstract, prog.abstract_batch()).compile().as_text()
    return hlo.parse(text), sum(math.prod(leaf.shard_local_shape) for leaf in prog.layout.plan.leaves), prog


STEPS = [("replicated", "remainder"), ("gather_on_forward", "fp32"), ("gather_on_forward", "fp8 moments")]


@pytest.mark.parametrize(("policy", "mode"), STEPS)
def test_the_trainers_update_reads_and_writes_the_least_possible(policy, mode):
    module, count, _ = trained(policy, mode)
    least, norm = MODES[mode][1], 4  # the norm reads every gradient once, before any can be clipped
    found = [traffic.phase_bytes(module, phase) / count for phase in ("zero_update", "zero_norm")]
    assert least <= found[0] * 1.001  # the least cannot be undercut: the count would be wrong
    assert norm <= found[1] * 1.001
    assert found[0] <= 1.05 * least
    assert sum(found) <= 1.05 * (least + norm)


@pytest.mark.parametrize(("policy", "mode"), STEPS)
def test_every_rounding_is_in_the_trainers_module(policy, mode):
    module, _, prog = trained(policy, mode)
    leaves = prog.layout.plan.leaves
    inside = [
        i
        for _, kernel, _ in traffic.kernels(module)
        if traffic.belongs(module, kernel, "zero_update")
        for c in module.called(kernel)
        for i in c.instructions
    ]
    if mode == "fp32":  # masters round to bf16 values explicitly: a pair of casts would be dropped
        rounded = [i for i in inside if i.opcode == "reduce-precision" and "mantissa_bits=7" in i.attributes]
        assert len(rounded) >= len(leaves)
    else:  # the other half of a remainder: the sign bit is carried into the upper half
        assert len([i for i in inside if i.opcode == "shift-right-logical" and i.arrays[0].dtype == "u32"]) >= len(
            leaves
        )
    made = {a.dtype for i in inside for a in i.arrays}
    assert made >= MODES[mode][2] - {"s16"} | ({"u16"} if "s16" in MODES[mode][2] else set())
    outputs = {a.dtype for a in module.entry.root.arrays}
    assert outputs >= MODES[mode][2] | {"bf16"}
    for dtype in {"f16", "f8e4m3fn"} & MODES[mode][2]:  # every leaf of a narrow moment is rounded from float32
        narrowed = [i for i in inside if i.opcode == "convert" and i.arrays[0].dtype == dtype]
        assert len(narrowed) >= len(leaves)


# --- a user's own step -----------------------------------------------------------------------------------------------


@functools.cache
def own_step(form, *, state_first):
    """Local gradients, in a chain of scatter, clipping and Adam; donated."""
    params, decay = gpt2()
    mesh = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8))
    common = {"stacked": lambda path: int(path.startswith("['blocks']"))}
    adam = jzero.distributed_fused_adam(1e-3, weight_decay=0.1, mask=decay, mesh=mesh, **common)
    scatter = jzero.scatter_gradients(mesh, **common)
    chain = optax.chain(scatter, jzero.clip_by_global_norm(1.0), adam)
    place = lambda x, dtype, spec: jax.ShapeDtypeStruct(x, dtype, sharding=NamedSharding(mesh, spec))
    params = jax.tree.map(lambda x: place(x.shape, jnp.bfloat16, P()), params)
    grads = jax.tree.map(lambda x: place((8, *x.shape), jnp.float32, P("data")), params)
    state = (scatter.init(params), optax.EmptyState(), adam.init(params))
    specs = (scatter.init(params), optax.EmptyState(), adam.state_specs(params))
    if form == "step":
        state, specs = state[2], specs[2]

    def step(grads, state, params):
        local = jax.tree.map(lambda g: g[0], grads)
        if form == "step":
            new, state = adam.step(local, state, params)
        else:
            updates, state = chain.update(local, state, params)
            new = optax.apply_updates(params, updates)
        return (state, new) if state_first else (new, state)

    out = (specs, P()) if state_first else (P(), specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=out)
    text = jax.jit(mapped, donate_argnums=(1, 2)).lower(grads, state, params).compile().as_text()
    leaves = adam.plan(params).leaves
    return text, leaves, sum(math.prod(leaf.shard_local_shape) for leaf in leaves)


@pytest.mark.parametrize("form", ["update", "step"])
def test_what_a_chain_sends(form):
    """A true reduce-scatter, parameters gathered in two bytes, and no all-reduce but the norm's."""
    text, leaves, _ = own_step(form, state_first=False)
    found = collective_bytes(text)
    whole = sum(math.prod(leaf.shape) for leaf in leaves)
    padding = sum(leaf.padding for leaf in leaves)
    assert found["reduce-scatter"] == 4 * (whole + padding)
    assert found["all-gather"] == 2 * (whole + padding)
    assert found["all-reduce"] <= 64 * 1024
    assert found["all-to-all"] == found["collective-permute"] == 0


@pytest.mark.parametrize("form", ["update", "step"])
def test_the_update_of_a_users_step_reads_and_writes_the_least_possible(form):
    text, _, count = own_step(form, state_first=False)
    found = traffic.phase_bytes(hlo.parse(text), "zero_update") / count
    assert found * 1.001 >= 28
    assert found <= 1.05 * 28


@pytest.mark.parametrize("form", ["update", "step"])
def test_what_the_order_of_results_costs(form):
    """In the order of the donated arguments (state, parameters) they cost nothing, in the other one some copies."""
    first, _, count = own_step(form, state_first=True)
    last, _, _ = own_step(form, state_first=False)
    assert traffic.copies(hlo.parse(first)) / count <= 0.01
    assert traffic.copies(hlo.parse(last)) / count <= 4  # docs/optimizer.md
