"""Which parameter lives where, against the arrays themselves."""

import jax
import pytest
from programs import config, program

from jzero.train.placement import placements, total, words

RUNS = {
    "all axes": {
        "policy": "gather_on_forward", "devices": 8, "num_layers": 4, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_query_groups": None,
        "global_batch_size": 16, "micro_batches": 2,
    },
    "data": {"policy": "replicated", "devices": 8},
    "bf16": {"policy": "gather_twice", "devices": 4, "precision": "bf16"},
    "no ZeRO": {"devices": 4, "optim": {"name": "fused_adam"}, "tensor_model_parallel_size": 2},
}  # fmt: skip


def bytes_on_first(tree):
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first)


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_those_of_the_arrays(name):
    prog = program(config(**RUNS[name]), 64)
    rows, state = placements(prog), prog.init()
    assert [row.bytes for row in rows] == [bytes_on_first(x) for x in jax.tree.leaves(state.params)]
    scalars = 2 * 4  # Adam's count and the schedule's
    assert 0 <= bytes_on_first(state.opt) - sum(row.state_bytes for row in rows) <= scalars
    count, params, opt = total(rows)
    assert count == sum(x.size for x in jax.tree.leaves(prog.model.abstract))
    assert (params, opt) == (sum(r.bytes for r in rows), sum(r.state_bytes for r in rows))


def test_every_axis_is_named_by_the_dimension_it_splits():
    rows = {row.path: row for row in placements(program(config(**RUNS["all axes"]), 64))}
    up = rows["blocks/mlp/up/weight"]
    assert (up.shape, up.dtype) == ((4, 24, 96), "float32")
    assert up.split == {"layers": ("pipeline",), "embed": ("data",), "ffn": ("tensor",)}
    assert rows["blocks/mlp/up/bias"].split == {"layers": ("pipeline",), "ffn": ("tensor", "data")}
    assert rows["embedding/token"].split == {"vocab": ("tensor",), "embed": ("data",)}
    assert all(row.split == row.state_split for row in rows.values())
    assert words(up.split) == "layers/pipeline, embed/data, ffn/tensor"


def test_what_is_whole_or_flattened_says_so():
    rows = {row.path: row for row in placements(program(config(**RUNS["data"]), 61))}
    token = rows["embedding/token"]
    assert token.split == {}
    assert token.state_split == {"embed": ("data",)}
    assert token.state_bytes == 2 * token.bytes // 8
    assert words(token.split) == "whole"
    without = placements(program(config(**RUNS["no ZeRO"]), 64))
    assert not [row.path for row in without if "data" in str(row.split) + str(row.state_split)]
    odd = config(8, "gather_twice", hidden_size=20, num_attention_heads=2, num_query_groups=None)
    rows = {row.path: row for row in placements(program(odd, 61))}
    assert rows["final_norm/gain"].split == {"flat": ("data",)}
    assert rows["blocks/mlp_norm/gain"].split == {"flat": ("data",)}
