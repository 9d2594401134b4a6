"""Every precision mode: bytes, the rules that choose one, both forms of the step, what is refused."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.contexts import assert_close, assert_same, mesh, problem
from oracles import adam

import jzero
from jzero.fp8 import DelayedScaling, quantise

SHAPES = {"dense": (8, 16), "odd": (5, 3), "gain": (7,), "scalar": (), "empty": (0, 3)}
MIXED = {"mu": "scaled_fp8", "nu": "scaled_fp16"}
TABLE = {  # parameters, master, moments: bytes per parameter replicated, and over the data ranks
    "fp32": ("float32", "none", "fp32", 4, 8),
    "bf16, fp32 master": ("bfloat16", "fp32", "fp32", 2, 12),
    "remainder": ("bfloat16", "remainder", "fp32", 2, 10),
    "bf16 state": ("bfloat16", "none", "bf16", 2, 4),
    "scaled": ("bfloat16", "scaled_fp16", "scaled_fp16", 2, 6),
    "remainder, fp8 and fp16 moments": ("bfloat16", "remainder", MIXED, 2, 5),
}
FP8_TABLE = {
    "fp8": ("float8_e4m3fn", "fp32", "fp32", 1, 12),
    "fp8, scaled": ("float8_e4m3fn", "scaled_fp16", "scaled_fp16", 1, 6),
}
WHOLE_TABLE = TABLE | FP8_TABLE
REPORTED = {
    "fp32": "no master, mu fp32, nu fp32",
    "bf16, fp32 master": "fp32 master, mu fp32, nu fp32",
    "remainder": "remainder, mu fp32, nu fp32",
    "bf16 state": "no master, mu bf16, nu bf16",
    "scaled": "scaled fp16 master, mu scaled fp16, nu scaled fp16",
    "remainder, fp8 and fp16 moments": "remainder, mu scaled fp8, nu scaled fp16",
    "fp8": "fp32 master, mu fp32, nu fp32",
    "fp8, scaled": "scaled fp16 master, mu scaled fp16, nu scaled fp16",
}
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "optimizer.md"


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def ones(shapes, dtype, stacked=0):
    """Parameters of ones on every device of data 8."""
    whole = {k: jnp.ones(s, "float32" if dtype == "float8_e4m3fn" else dtype) for k, s in shapes.items()}
    whole = jax.device_put(whole, jax.NamedSharding(mesh(data=8), jax.P()))
    return quantise(whole, "", stacked=lambda path: stacked) if dtype == "float8_e4m3fn" else whole


@pytest.mark.parametrize("stacked", [0, 1])
@pytest.mark.parametrize("row", WHOLE_TABLE)
def test_bytes_per_device_are_the_tables(row, stacked):
    dtype, master, moments, replicated, sharded = WHOLE_TABLE[row]
    m = mesh(data=8)
    shapes = {"w": (8, 256, 64), "b": (4, 64)}
    params, recipe = ones(shapes, dtype, stacked), DelayedScaling(amax_history_len=4)
    options = {"master": master, "state_dtype": moments, "fp8_recipe": recipe, "stacked": lambda path: stacked}
    tx = jzero.distributed_fused_adam(1e-3, mesh=m, **options)
    state = tx.init(params)
    count = sum(np.prod(s) for s in shapes.values())
    scales = sum(math.prod(s[:stacked]) for s in shapes.values()) if row in FP8_TABLE else 0
    assert held(params) == replicated * count + 4 * scales
    assert held(state.fp8) == (1 + recipe.amax_history_len) * 4 * scales + 4 * bool(scales)
    assert held((state.master, state.inner)) == pytest.approx(sharded * count / 8, rel=0.01)
    report = tx.partition_report(params)
    assert {r.precision for r in report} == {REPORTED[row]}
    counts = 4 + 4 * bool(scales)  # they belong to no leaf
    assert sum(r.state_bytes for r in report) == held((state.master, state.inner, state.fp8)) - counts


def written(row):
    """The row of docs/optimizer.md, with the bytes per parameter that one of 8 devices holds, measured on arrays."""
    dtype, master, moments, replicated, sharded = WHOLE_TABLE[row]
    params = ones({"w": (768, 3072)}, dtype)
    tx = jzero.distributed_fused_adam(1e-3, mesh=mesh(data=8), master=master, state_dtype=moments)
    state = tx.init(params)
    measured = (held(params) + held(state)) / (768 * 3072)
    short = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}[dtype]
    cells = (short, f"`{json.dumps(master)}`", f"`{json.dumps(moments)}`", replicated, sharded, f"{measured:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


def test_the_documents_table_is_what_is_measured():
    rows = [written(row) for row in WHOLE_TABLE]
    starts = ("| fp32 | `", "| bf16 | `", "| fp8 | `")
    found = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(starts)]
    assert found == rows


@pytest.mark.parametrize("row", TABLE)
def test_the_state_looks_the_same_after_a_step(row):
    dtype, master, moments, *_ = TABLE[row]
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, mesh=pr.mesh, master=master, state_dtype=moments)
    params = pr.place(pr.start, dtype)
    state, abstract = tx.init(params), tx.init(jax.eval_shape(lambda: params))
    step = jax.jit(lambda g, s, p: (*tx.step(g, s, p), tx.update(g, s, p)[0]))
    grads = pr.place(pr.scales)
    looks = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)
    for _ in range(2):
        after, new_state, updates = jax.block_until_ready(step(grads, state, params))
        assert looks(new_state) == looks(state)
        (assert_same if dtype == "bfloat16" else assert_close)(optax.apply_updates(params, updates), after)
        params, state = after, new_state
    assert step._cache_size() == 1
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(abstract) == shapes(state)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "wire", "chosen"),
    [
        ("float32", None, None, "none"),
        ("float32", "scaled_fp16", None, "none"),
        ("float32", None, "bfloat16", "fp32"),
        ("float32", None, "int32", "none"),
        ("bfloat16", None, None, "remainder"),
        ("bfloat16", "fp32", "float32", "remainder"),
        ("bfloat16", MIXED, None, "remainder"),
        ("bfloat16", "bf16", None, "none"),
        ("bfloat16", "scaled_fp16", None, "scaled_fp16"),
        ("bfloat16", None, "float16", "fp32"),
        ("bfloat16", None, "float8_e5m2", "fp32"),
        ("float16", None, None, "fp32"),
        ("float16", "fp16", None, "none"),
    ],
)
def test_the_automatic_master(dtype, state_dtype, wire, chosen):
    tx = jzero.distributed_fused_adam(1e-3, mesh=mesh(data=8), state_dtype=state_dtype, param_sync_dtype=wire)
    state = tx.init({"w": jnp.ones((8, 8), dtype)})
    kept = [str(x.dtype) for x in jax.tree.leaves(state.master)]
    assert (
        kept == {"none": [], "fp32": ["float32"], "remainder": ["int16"], "scaled_fp16": ["float16", "float32"]}[chosen]
    )


def test_remainders_are_float32_masters():
    """The masters of ten steps, put together again, are bit by bit those of a run that keeps them whole."""
    pr = problem(mesh(data=8), SHAPES)
    masters = {}
    for master in ("fp32", "remainder"):
        tx = jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=pr.mesh, master=master)
        params = pr.place(pr.start, "bfloat16")
        state, step = tx.init(params), jax.jit(tx.update)
        for i in range(10):
            updates, state = jax.block_until_ready(
                step(pr.place({k: (-1) ** i * x for k, x in pr.scales.items()}), state, params)
            )
            params = optax.apply_updates(params, updates)
        masters[master] = {k: np.asarray(x).ravel()[: params[k].size] for k, x in state.master.items()}
        bits = {k: np.asarray(p).view(np.uint16).ravel() for k, p in params.items()}
    for k, whole in masters["fp32"].items():
        low = masters["remainder"][k].astype(np.int64)
        found = ((bits[k].astype(np.int64) - (low < 0)) << 16) | (low & 0xFFFF)
        np.testing.assert_array_equal(found.astype(np.uint32), whole.view(np.uint32), err_msg=k)


def test_remainders_belong_to_what_apply_updates_gives():
    """`old + (new - old)` is not `new` where that is far smaller: each form keeps a master that fits."""
    m = mesh(data=8)
    params = {"w": jnp.full(16, 1e9, jnp.bfloat16)}
    grads = {"w": params["w"].astype(jnp.float32) - 3.0}  # the new value is 3
    tx = jzero.zero(optax.sgd(1.0), mesh=m, master="remainder")
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    still = jax.jit(tx.step)({"w": jnp.zeros(16)}, state, after)[0]
    assert_same(still, after)
    np.testing.assert_array_equal(np.asarray(jax.jit(tx.step)(grads, tx.init(params), params)[0]["w"], np.float32), 0.0)


def test_a_remainders_master_follows_an_edit():
    params = {"w": jnp.full(16, 1.0, jnp.bfloat16)}
    tx = jzero.zero(optax.sgd(2.0**-10), mesh=mesh(data=8), master="remainder")
    _, state = tx.step({"w": jnp.ones(16)}, tx.init(params), params)
    edited = {"w": jnp.full(16, 5.0, jnp.bfloat16)}
    found, _ = tx.step({"w": jnp.zeros(16)}, state, edited)
    assert_same(found, edited)
    tx.check_masters(edited, state)


def test_nan_parameters_stay_nan():
    params = {"w": jnp.asarray([np.nan, 1.0] * 8, jnp.bfloat16)}
    tx = jzero.distributed_fused_adam(1e-3, mesh=mesh(data=8), master="remainder")
    state = tx.init(params)
    for _ in range(2):
        params, state = jax.jit(tx.step)({"w": jnp.ones(16)}, state, params)
    np.testing.assert_array_equal(np.isnan(np.asarray(params["w"], np.float32)), [True, False] * 8)


@pytest.mark.parametrize("inner", ["momentum", "lion"])
def test_state_dtypes_hold_for_any_transformation(inner):
    tx, rule, field = {
        "momentum": (optax.sgd(0.1, momentum=0.9), adam.sgd(0.1, momentum=0.9), "trace"),
        "lion": (optax.lion(1e-2, weight_decay=0.0), adam.lion(1e-2, weight_decay=0.0), "mu"),
    }[inner]
    pr = problem(mesh(data=8), SHAPES)
    zero = jzero.zero(tx, mesh=pr.mesh, state_dtype={field: "scaled_fp16"})
    params, state = pr.params, zero.init(pr.params)
    grads = pr.place(pr.scales)
    for _ in range(3):
        params, state = jax.block_until_ready(jax.jit(zero.step)(grads, state, params))
    assert_close(params, adam.train(rule, pr.start, lambda _: pr.scales, 3), rtol=1e-3, atol=1e-4)
    assert {x.dtype for x in jax.tree.leaves(state.inner) if x.ndim and x.size > 64} == {jnp.dtype("float16")}


def test_stochastic_rounding_moves_a_parameter_that_plain_rounding_leaves():
    m = mesh(data=8)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    grads = {"w": jnp.ones((64, 64))}
    found = {}
    for chosen in (False, True):
        tx = jzero.zero(optax.sgd(1e-4), mesh=m, master="none", stochastic_rounding=chosen)
        step = jax.jit(tx.step)
        p, state = params, tx.init(params)
        for _ in range(20):
            p, state = jax.block_until_ready(step(grads, state, p))
        found[chosen] = np.asarray(p["w"], np.float32)
    assert (found[False] == 1).all()
    assert found[True].mean() == pytest.approx(1 - 20 * 1e-4, abs=3e-4)
    assert state.rounding.tolist() == [0, 20]
    again, after = params, tx.init(params)
    for _ in range(20):
        again, after = jax.block_until_ready(step(grads, after, again))
    np.testing.assert_array_equal(np.asarray(again["w"], np.float32), found[True])
    assert len({x.tobytes() for x in np.split(found[True], 8)}) == 8  # every rank draws its own


def test_replicas_draw_the_same_numbers():
    m = mesh(data=4, replica=2)
    tx = jzero.zero(
        optax.sgd(1e-3, momentum=0.9), mesh=m, replica_axis="replica", master="none", state_dtype="bf16",
        stochastic_rounding=True,
    )  # fmt: skip
    params = {"w": jax.device_put(jnp.ones((8, 16), jnp.bfloat16), jax.NamedSharding(m, jax.P()))}
    params, state = jax.jit(tx.step)({"w": jnp.full((8, 16), 0.37)}, tx.init(params), params)
    for x in (params["w"], state.inner[0].trace["w"]):
        parts = {}
        for shard in x.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(p) == 1 for p in parts.values())


REFUSED = [
    ("float32", {"master": "remainder"}, r"\['w'\]: master='remainder' needs a bfloat16 parameter .* found a float32"),
    ("float16", {"master": "remainder"}, "found a float16 one; expected master='auto', or 'fp32'"),
    ("bfloat16", {"master": "remainder", "param_sync_dtype": "float16"}, "that is gathered as float16; expected"),
    ("float32", {"master": "scaled_fp16"}, "would be no more precise than the float32 parameter itself; expected"),
    ("float16", {"master": "scaled_fp16"}, "would be no more precise than the float16 parameter itself"),
    ("float32", {"master": "none", "param_sync_dtype": "bfloat16"}, "expected master='auto' or 'fp32'"),
    ("float32", {"param_sync_dtype": "int16"}, r"\['w'\]: param_sync_dtype=int16 .* expected a wider integer"),
    ("float32", {"state_dtype": "int8"}, "state_dtype: expected one of 'fp32', 'bf16', .*, found 'int8'"),
    ("float32", {"state_dtype": {"mu": "fp4"}}, r"state_dtype\['mu'\]: expected one of 'fp32'"),
    ("float32", {"state_dtype": {"m": "bf16"}}, r"expected fields of the inner state, \['mu', 'nu'\], found 'm'"),
    ("float32", {"state_dtype": "scaled_fp8"}, r"second moments .* expected \{'mu': 'scaled_fp8', "),
    ("float32", {"state_dtype": {"nu": "scaled_fp8"}}, r"state_dtype\['nu'\]='scaled_fp8'"),
    ("bfloat16", {"stochastic_rounding": True}, "nothing is stored as bfloat16 .* expected state_dtype='bf16', or"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "options", "match"), REFUSED)
def test_combinations_that_make_no_sense_are_refused(dtype, options, match):
    with pytest.raises(ValueError, match=match):
        jzero.distributed_fused_adam(1e-3, mesh=mesh(data=8), **options).init({"w": jnp.ones((8, 8), dtype)})


def test_a_transformation_without_state_has_no_state_dtype():
    tx = jzero.zero(optax.sgd(0.1), mesh=mesh(data=8), state_dtype="bf16")
    with pytest.raises(ValueError, match="state_dtype: the inner transformation keeps no arrays"):
        tx.init({"w": jnp.ones(8)})
