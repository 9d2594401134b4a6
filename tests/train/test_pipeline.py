"""Every layout with a pipeline trains the model of one device: same loss, gradients, parameters."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from programs import assert_same_training, batch, config, program, ten_steps, train

VOCABULARY = 64  # a multiple of every tensor size, so that all layouts pad it alike
MODELS = {
    "gpt2": {"num_query_groups": None},
    "gpt2, dropout": {"num_query_groups": None, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {
        "num_query_groups": 2, "position_embedding_type": "rope", "normalization": "rmsnorm", "activation": "swiglu",
        "bias": False, "ffn_hidden_size": 40, "share_embeddings_and_output_weights": False,
    },
}  # fmt: skip


class Row(NamedTuple):
    data: int
    tensor: int
    pipeline: int
    virtual: int | None
    policy: str
    granularity: str | None
    model: str = "gpt2"
    accumulation: str = "local"
    sequence: bool = False
    replica: int = 1
    micro_batches: int = 4
    optimizer: str = "distributed_fused_adam"

    def config(self):
        return config(
            self.data * self.replica * self.tensor * self.pipeline,
            self.policy,
            self.micro_batches,
            num_layers=4,
            replica_parallel_size=self.replica,
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self.virtual,
            sequence_parallel=self.sequence,
            grad_accumulation=self.accumulation,
            activations_checkpoint_granularity=self.granularity,
            optim={"name": self.optimizer},
            clip=0.5,
            **MODELS[self.model],
        )


LAYOUTS = [
    Row(1, 1, 2, None, "replicated", "full"),
    Row(2, 2, 2, None, "gather_on_forward", "selective", "gpt2, dropout", sequence=True),
    Row(2, 1, 4, None, "gather_twice", None, "llama"),
    Row(2, 1, 2, 2, "replicated", "selective"),
    Row(2, 1, 2, 2, "gather_twice", "full", "gpt2, dropout", "sharded"),
]
MORE_LAYOUTS = [
    Row(2, 1, 2, None, "replicated", None, "gpt2, dropout"),
    Row(1, 2, 2, 2, "gather_on_forward", "full", "gpt2, dropout"),
    Row(2, 1, 2, None, "gather_on_forward", None, "llama", "sharded", replica=2),
    Row(2, 2, 2, None, "replicated", "full", "llama", sequence=True, optimizer="fused_adam"),
    Row(1, 1, 4, None, "replicated", "selective", "gpt2, dropout", micro_batches=2),
    Row(1, 2, 4, None, "gather_twice", "selective", "llama", sequence=True),
    Row(1, 2, 2, 2, "replicated", None, "llama", "sharded", sequence=True, replica=2),
]


@functools.cache
def one_device(model):
    return ten_steps(Row(1, 1, 1, None, "replicated", None, model, micro_batches=1).config(), VOCABULARY)


@pytest.mark.parametrize(
    "row",
    [*LAYOUTS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_LAYOUTS)],
    ids=lambda row: "-".join(map(str, row)),
)
def test_a_pipeline_trains_the_model_of_one_device(row):
    assert_same_training(ten_steps(row.config(), VOCABULARY), one_device(row.model))


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
    alone, prog = program(config(1, **SMALL), VOCABULARY), program(STAGES[name], VOCABULARY)
    expected, found = alone.init().params, prog.init().params
    data = batch(0)
    for a, b in zip(prog.evaluate(found, prog.place(data)), alone.evaluate(expected, alone.place(data)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    tokens = data["tokens"][:3]
    np.testing.assert_allclose(prog.logits(found, tokens), alone.logits(expected, tokens), rtol=1e-5, atol=1e-6)


def test_each_stage_holds_its_layers_alone():
    prog = program(STAGES["2 stages of 2 chunks"], VOCABULARY)
    gain = prog.init().params["blocks"]["mlp_norm"]["gain"]
    assert gain.shape == (2, 2, 24)
    stage = lambda device: int(np.argwhere(prog.mesh.devices == device)[0][0])
    for shard in gain.addressable_shards:
        chunks, layers = shard.index[:2]
        assert chunks == slice(None)
        assert (layers.start or 0) == stage(shard.device)
        assert shard.data.shape[:2] == (2, 1)
    assert len(jax.tree.leaves(prog.abstract.params)) == len(jax.tree.leaves(prog.model.abstract))


def test_memory_does_not_grow_with_micro_batches():
    def temporaries(samples):
        conf = Row(2, 1, 2, 2, "replicated", None, micro_batches=4).config()
        model = dataclasses.replace(conf.model, micro_batch_size=1, global_batch_size=samples, hidden_size=96)
        prog = program(dataclasses.replace(conf, model=model), VOCABULARY)
        compiled = prog.step.lower(prog.abstract, prog.abstract_batch()).compile()
        return compiled.memory_analysis().temp_size_in_bytes, prog.config.num_micro_batches

    (few, eight), (many, sixty_four) = temporaries(16), temporaries(128)
    assert (eight, sixty_four) == (8, 64)
    assert abs(many - few) < 0.01 * few  # what there is: a weight per token, a number per sample, the timetable


LOW = {
    "scaled": ({"exp_avg_dtype": "scaled_fp8", "exp_avg_sq_dtype": "scaled_fp16"}, 1e-2),
    "random": (
        {"master": "none", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
        1e-2,
    ),
}


@pytest.mark.parametrize("mode", LOW)
def test_low_precision_follows_fp32_and_stages_keep_alike_what_they_share(mode):
    optim, rtol = LOW[mode]
    conf = Row(2, 1, 2, 2, "gather_on_forward", None).config()
    model = dataclasses.replace(conf.model, optim=dataclasses.replace(conf.model.optim, **optim))
    conf = dataclasses.replace(conf, model=model, trainer=dataclasses.replace(conf.trainer, precision="bf16"))
    prog = program(conf, VOCABULARY)
    state, rows = train(prog, 10)
    np.testing.assert_allclose(rows[:, 0], one_device("gpt2")[0][:, 0], rtol=rtol)
    for x in jax.tree.leaves(state):
        held: dict = {}
        for shard in x.addressable_shards:
            value = np.asarray(shard.data).tobytes()
            assert held.setdefault(str(shard.index), value) == value
