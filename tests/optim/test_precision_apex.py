"""The problem on which Apex tests its DistributedFusedAdam, with its settings and tolerances.

Eleven parameters of size 7; y = sum of (i + 1) w_i x over a batch of 3 per rank and micro-batch; 3 steps of 3
micro-batches; lr 0.1, twice that for odd parameters; betas (0.1, 0.2), eps 0.25, decay 0.1. Outputs, gradients of the
inputs and parameters are compared at every step with NumPy in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import mesh
from oracles import adam

import jzero

LAYERS, SIZE, ROWS, STEPS, MICRO = 11, 7, 3, 3, 3
NAMES = [f"w{i:02}" for i in range(LAYERS)]
OPTIONS = {"b1": 0.1, "b2": 0.2, "eps": 0.25}
GRIDS = {"data 8": {"data": 8}, "data 4, replica 2": {"data": 4, "replica": 2}, "data 1": {"data": 1}}

CASES = {  # dtype of parameters, of gradients, options of zero, rtol, atol
    "reference": ("float32", "float32", {}, 1.3e-6, 1e-5),
    "l2": ("float32", "float32", {"l2": True}, 1.3e-6, 1e-5),
    "fp32 master": ("float32", "float32", {"master": "fp32"}, 1.3e-6, 1e-5),
    "integer gather": ("float32", "float32", {"param_sync_dtype": "int32"}, 1.3e-6, 1e-5),
    "fp16": ("float16", "float16", {"state_dtype": "fp16", "grad_sync_dtype": "float16"}, 5e-3, 1e-5),
    "fp16, fp32 state": ("float16", "float32", {}, 5e-3, 1e-5),
    "bf16": ("bfloat16", "bfloat16", {"state_dtype": "bf16", "grad_sync_dtype": "bfloat16"}, 5e-2, 1e-5),
    "bf16 gradients": ("float32", "bfloat16", {"grad_sync_dtype": "bfloat16"}, 5e-2, 1e-5),
    "bf16, fp32 master": ("bfloat16", "float32", {"master": "fp32"}, 5e-2, 1e-5),
    "bf16 remainders": ("bfloat16", "bfloat16", {"master": "remainder"}, 5e-2, 1e-5),
    "several dtypes": (("float32", "float16", "bfloat16"), "float32", {}, 5e-2, 1e-5),
    "one-byte gather": ("float16", "float16", {"param_sync_dtype": "float8_e5m2"}, 0.5, 0.05),
    "scaled": ("bfloat16", "bfloat16", {"state_dtype": "scaled_fp16"}, 5e-2, 1e-5),
    "fp8 and fp16 moments": (
        "bfloat16", "float32", {"state_dtype": {"mu": "scaled_fp8", "nu": "scaled_fp16"}}, 5e-2, 1e-5
    ),
}  # fmt: skip


def draw(ranks):
    """Parameters, and inputs and output gradients [step, micro-batch, rank, row, size]."""
    random = np.random.default_rng(0)
    start = {name: (random.uniform(size=SIZE) + 1).astype(np.float32) for name in NAMES}
    shape = (STEPS, MICRO, ranks, ROWS, SIZE)
    return start, *((random.uniform(size=shape) - 0.5).astype(np.float32) for _ in range(2))


def model(params, x):
    return sum((i + 1) * params[name].astype(x.dtype) * x for i, name in enumerate(NAMES))


def expected(start, x, dy, l2=False):
    """Per step: outputs, gradients of the inputs, and parameters after it."""
    params, states, found = {k: p.astype(np.float64) for k, p in start.items()}, {k: {} for k in start}, []
    rules = [adam.adam(lr, weight_decay=0.1, l2=l2, **OPTIONS) for lr in (0.1, 0.2)]
    for t in range(STEPS):
        slope = sum((i + 1) * params[name] for i, name in enumerate(NAMES))
        outputs, inputs = slope * x[t], slope * dy[t]
        common = (x[t].astype(np.float64) * dy[t]).sum(axis=(0, 2)).mean(axis=0)  # the mean of the ranks' sums
        params = {
            name: rules[i % 2]((i + 1) * common, params[name], states[name], t + 1, name)
            for i, name in enumerate(NAMES)
        }
        found.append((outputs, inputs, params))
    return found


def optimizer(grid, l2=False, lr=0.1, **options):
    def rule(lr):
        scale = optax.scale_by_adam(**OPTIONS)
        decay = optax.add_decayed_weights(0.1)
        return optax.chain(*((decay, scale) if l2 else (scale, decay)), optax.scale(-lr))

    groups = {name: ("even", "odd")[i % 2] for i, name in enumerate(NAMES)}
    inner = optax.multi_transform({"even": rule(lr), "odd": rule(2 * lr)}, groups)
    replica = "replica" if "replica" in grid else None
    return jzero.zero(inner, mesh=mesh(**grid), replica_axis=replica, gradients="local", **options)


def trained(grid, dtypes, grad_dtype, start, x, dy, **options):
    """What the same steps give with `zero`, inside shard_map, gradients local to the rank."""
    m, tx, axes = mesh(**grid), optimizer(grid, **options), tuple(grid)
    each = [dtypes] * LAYERS if isinstance(dtypes, str) else [dtypes[i % len(dtypes)] for i in range(LAYERS)]
    params = {
        k: jax.device_put(jnp.asarray(p, d), NamedSharding(m, P()))
        for (k, p), d in zip(start.items(), each, strict=True)
    }
    state, specs = tx.init(params), tx.state_specs(params)

    def step(params, state, x, dy):
        x, dy = x[:, 0], dy[:, 0]
        seen = jax.tree.map(lambda p: jax.lax.pcast(p, axes, to="varying"), params)
        grads = [jax.vjp(model, seen, x[i].astype(jnp.float32)) for i in range(MICRO)]
        both = [pull(dy[i]) for i, (_, pull) in enumerate(grads)]
        total = jax.tree.map(lambda *g: sum(a.astype(jnp.float32) for a in g).astype(grad_dtype), *[g for g, _ in both])
        updates, after = tx.update(total, state, params)
        by_step, _ = tx.step(total, state, params)
        outputs = jnp.stack([y for y, _ in grads])[:, None], jnp.stack([d for _, d in both])[:, None]
        return *outputs, optax.apply_updates(params, updates), by_step, after

    rows = P(None, axes)
    run = jax.jit(jax.shard_map(
        step, mesh=m, in_specs=(P(), specs, rows, rows), out_specs=(rows, rows, P(), P(), specs)
    ))  # fmt: skip
    found = []
    for t in range(STEPS):
        outputs, inputs, params, by_step, state = jax.block_until_ready(run(params, state, x[t], dy[t]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=3e-7), params, by_step)
        found.append((outputs, inputs, params))
    return found


def compare(found, wanted, rtol, atol):
    for (*arrays, params), (*others, masters) in zip(found, wanted, strict=True):
        for a, b in zip([*arrays, *params.values()], [*others, *masters.values()], strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=rtol, atol=atol)


def check(grid, case, **wrong):
    dtypes, grad_dtype, options, rtol, atol = CASES[case]
    start, x, dy = draw(mesh(**grid).size)
    found = trained(grid, dtypes, grad_dtype, start, x, dy, **options | wrong)
    compare(found, expected(start, x, dy, options.get("l2", False)), rtol, atol)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case):
    check(GRIDS["data 8"], case)


@pytest.mark.parametrize("grid", ["data 4, replica 2", "data 1"])
@pytest.mark.parametrize("case", ["reference", "l2", "bf16 remainders", "scaled"])
def test_matches_on_other_grids(grid, case):
    check(GRIDS[grid], case)


@pytest.mark.parametrize("case", ["reference", "bf16 remainders", "scaled"])
def test_a_wrong_setting_does_not_match(case):
    with pytest.raises(AssertionError):
        check(GRIDS["data 8"], case, lr=0.5)


def test_float64_parameters_with_float32_state():
    with jax.enable_x64(True):
        CASES["fp64"] = ("float64", "float32", {}, 1.3e-6, 1e-5)
        check(GRIDS["data 8"], "fp64")
