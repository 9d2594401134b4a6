"""Bytes that the update phase reads and writes on a GPU, counted in the module compiled for 8 H100s.

GPT-2 124M's parameters. The least possible: every array of state and the gradient read once, state and bfloat16
parameters written once. A scale is the largest new magnitude, so scaled states need what they depend on read twice.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from oracles import traffic

import jzero
from jzero.models.gpt import functions
from jzero.plan import hlo, targets
from jzero.train.config import load_config, model_config

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]

MIXED = {"mu": "scaled_fp8", "nu": "scaled_fp16"}
CASES = {  # options, and the least bytes per parameter: of a first pass for the scales, read, written
    "fp32 master": ({"master": "fp32"}, 0, 4 + 12, 12 + 2),
    "remainder": ({"master": "remainder"}, 0, 4 + 10 + 2, 10 + 2),
    "bf16 state": ({"master": "none", "state_dtype": "bf16"}, 0, 4 + 4 + 2, 4 + 2),
    "scaled": ({"master": "scaled_fp16", "state_dtype": "scaled_fp16"}, 4 + 6, 4 + 6, 6 + 2),
    "fp8 moments": ({"master": "remainder", "state_dtype": MIXED}, 4 + 3, 4 + 5 + 2, 5 + 2),
}


@functools.cache
def gpt2():
    model = functions(model_config(load_config(None), 50257))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), model.abstract), model.decay


def compiled(options):
    params, decay = gpt2()
    mesh = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8))
    tx = jzero.distributed_fused_adam(
        1e-3,
        weight_decay=0.1,
        mask=decay,
        mesh=mesh,
        stacked=lambda path: int(path.startswith("['blocks']")),
        **options,
    )
    plan, specs = tx.plan(params), tx.state_specs(params)
    shard = lambda leaf, dtype: jax.ShapeDtypeStruct(
        leaf.shard_shape, dtype, sharding=NamedSharding(mesh, leaf.shard_spec)
    )
    grads, own = ([shard(leaf, dtype) for leaf in plan.leaves] for dtype in (jnp.float32, jnp.bfloat16))
    split = [leaf.shard_spec for leaf in plan.leaves]

    def update(grads, state, params):
        new, state, _ = tx.update_shards(grads, state, params)
        return state, new  # state first: XLA copies 16-bit state where a bfloat16 result comes before it

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(split, specs, split), out_specs=(specs, split))
    text = jax.jit(mapped, donate_argnums=(1, 2)).lower(grads, tx.init(params), own).compile().as_text()
    return text, sum(math.prod(leaf.shard_local_shape) for leaf in plan.leaves)


def read_and_written(text):
    module = hlo.parse(text)
    return sum(times * traffic.moved(module, c, i) for c, i, times in traffic.kernels(module))


@pytest.mark.parametrize("case", CASES)
def test_the_update_reads_and_writes_the_least_possible(case):
    options, first, read, written = CASES[case]
    text, count = compiled(options)
    found = read_and_written(text) / count
    assert first + read + written <= found * 1.001  # the least cannot be undercut: the count would be wrong
    assert found <= 1.05 * (first + read + written)


@pytest.mark.parametrize(
    ("case", "roundings"),
    [
        ("fp32 master", ["reduce-precision", "bf16"]),
        ("remainder", ["u16", "s16", "shift-right-logical"]),
        ("scaled", ["reduce-precision", "f16"]),
        ("fp8 moments", ["f8e4m3fn", "f16", "u16"]),
    ],
)
def test_every_rounding_is_in_the_gpu_module(case, roundings):
    text, _ = compiled(CASES[case][0])
    for word in roundings:
        assert f" {word}(" in text or f" {word}[" in text, word
