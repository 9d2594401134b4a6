"""Every layout with a pipeline trains the model of one device: same loss, gradients, parameters."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import (
    EVEN_VOCABULARY,
    Row,
    assert_low_precision_follows_fp32,
    assert_trains_as_one_device,
    batch,
    config,
    program,
)

from jzero.train.layout import threefry_key

FORWARD, TWICE = "gather_on_forward", "gather_twice"
GPT2, LLAMA = "gpt2, dropout", "llama"
FOUR = {"micro_batches": 4}
SHARDED = FOUR | {"accumulation": "sharded"}
LAYOUTS = [
    Row("replicated", "full", pipeline=2, **FOUR),
    Row(FORWARD, "selective", GPT2, data=2, tensor=2, pipeline=2, sequence=True, **FOUR),
    Row(TWICE, None, LLAMA, data=2, pipeline=4, **FOUR),
    Row("replicated", "selective", data=2, pipeline=2, virtual=2, **FOUR),
    Row(TWICE, "full", GPT2, data=2, pipeline=2, virtual=2, **SHARDED),
]
MORE_LAYOUTS = [
    Row("replicated", None, GPT2, data=2, pipeline=2, **FOUR),
    Row(FORWARD, "full", GPT2, tensor=2, pipeline=2, virtual=2, **FOUR),
    Row(FORWARD, None, LLAMA, data=2, replica=2, pipeline=2, **SHARDED),
    Row("replicated", "full", LLAMA, data=2, tensor=2, pipeline=2, sequence=True, optimizer="fused_adam", **FOUR),
    Row("replicated", "selective", GPT2, pipeline=4, micro_batches=2),
    Row(TWICE, "selective", LLAMA, tensor=2, pipeline=4, sequence=True, **FOUR),
    Row(TWICE, None, LLAMA, data=2, tensor=2, pipeline=2, virtual=2, sequence=True, **FOUR),
    Row("replicated", None, LLAMA, replica=2, tensor=2, pipeline=2, virtual=2, sequence=True, **SHARDED),
]


@pytest.mark.parametrize(
    "row", [*LAYOUTS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_LAYOUTS)], ids=str
)
def test_a_pipeline_trains_the_model_of_one_device(row):
    assert_trains_as_one_device(row)


SMALL = {"num_layers": 4, "num_query_groups": None}
STAGES = {
    "2 stages": config(
        4, "gather_on_forward", 2, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, **SMALL
    ),
    "2 stages of 2 chunks": config(
        4, "gather_twice", 4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, **SMALL
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_evaluation_and_logits_are_those_of_one_device(name):
    alone, prog = program(config(1, **SMALL), EVEN_VOCABULARY), program(STAGES[name], EVEN_VOCABULARY)
    expected, found = alone.init().params, prog.init().params
    data = batch(0)
    for a, b in zip(prog.evaluate(found, prog.place(data)), alone.evaluate(expected, alone.place(data)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    tokens = data["tokens"][:3]
    np.testing.assert_allclose(prog.logits(found, tokens), alone.logits(expected, tokens), rtol=1e-5, atol=1e-6)


def test_each_stage_holds_its_layers_alone():
    prog = program(STAGES["2 stages of 2 chunks"], EVEN_VOCABULARY)
    gain = prog.init().params["blocks"]["mlp_norm"]["gain"]
    assert gain.shape == (2, 2, 24)
    stage = lambda device: int(np.argwhere(prog.mesh.devices == device)[0][0])
    for shard in gain.addressable_shards:
        chunks, layers = shard.index[:2]
        assert chunks == slice(None)
        assert (layers.start or 0) == stage(shard.device)
        assert shard.data.shape[:2] == (2, 1)
    assert len(jax.tree.leaves(prog.abstract.params)) == len(jax.tree.leaves(prog.model.abstract))


def test_a_stage_of_several_chunks_makes_its_own_layers_alone():
    """As much memory to begin with as for one chunk: 8 layers of which each of 4 stages has 2."""

    def temporaries(virtual):
        prog = program(Row(pipeline=4, virtual=virtual, micro_batches=4).config(num_layers=8), EVEN_VOCABULARY)
        return prog.create.lower(threefry_key(0)).compile().memory_analysis().temp_size_in_bytes

    one, two = temporaries(None), temporaries(2)
    assert two < 1.05 * one


def test_memory_does_not_grow_with_micro_batches():
    def temporaries(samples):
        conf = Row(data=2, pipeline=2, virtual=2, micro_batches=4).config()
        model = dataclasses.replace(conf.model, micro_batch_size=1, global_batch_size=samples, hidden_size=96)
        prog = program(dataclasses.replace(conf, model=model), EVEN_VOCABULARY)
        compiled = prog.step.lower(prog.abstract, prog.abstract_batch()).compile()
        return compiled.memory_analysis().temp_size_in_bytes, prog.config.num_micro_batches

    (few, eight), (many, sixty_four) = temporaries(16), temporaries(128)
    assert (eight, sixty_four) == (8, 64)
    assert abs(many - few) < 0.01 * few  # what there is: a weight per token, a number per sample, the timetable


@pytest.mark.parametrize("mode", ["scaled", pytest.param("random", marks=pytest.mark.slow)])
def test_low_precision_follows_fp32_and_stages_keep_alike_what_they_share(mode):
    assert_low_precision_follows_fp32(Row(FORWARD, data=2, pipeline=2, virtual=2, micro_batches=4), mode)
