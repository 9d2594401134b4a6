"""Every layout of data, replica and tensor ranks trains the model of one device: same loss, gradients, parameters."""

import functools
from typing import NamedTuple

import pytest
from programs import assert_same_training, config, ten_steps

VOCABULARY = 64  # a multiple of every tensor size, so that all layouts pad it alike
MODELS = {
    "gpt2": {"num_query_groups": None},
    "gpt2, dropout": {"num_query_groups": None, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {
        "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 4, "position_embedding_type": "rope",
        "normalization": "rmsnorm", "activation": "swiglu", "bias": False, "ffn_hidden_size": 40,
        "share_embeddings_and_output_weights": False,
    },
}  # fmt: skip


class Row(NamedTuple):
    data: int
    replica: int
    tensor: int
    sequence: bool
    policy: str
    micro_batches: int = 1
    accumulation: str = "local"
    granularity: str | None = None
    model: str = "gpt2"
    optimizer: str = "distributed_fused_adam"

    def config(self):
        return config(
            self.data * self.replica * self.tensor,
            self.policy,
            self.micro_batches,
            replica_parallel_size=self.replica,
            tensor_model_parallel_size=self.tensor,
            sequence_parallel=self.sequence,
            grad_accumulation=self.accumulation,
            activations_checkpoint_granularity=self.granularity,
            optim={"name": self.optimizer},
            clip=0.5,
            **MODELS[self.model],
        )


WHOLE, SPLIT = False, True
LAYOUTS = [
    Row(4, 1, 2, WHOLE, "replicated"),
    Row(4, 1, 2, SPLIT, "replicated"),
    Row(4, 1, 2, SPLIT, "gather_on_forward", model="gpt2, dropout"),
    Row(4, 1, 2, SPLIT, "gather_twice", 2, granularity="selective", model="gpt2, dropout"),
    Row(4, 1, 2, WHOLE, "gather_on_forward", 2, "sharded", "selective", "llama"),
    Row(2, 1, 4, WHOLE, "gather_twice", model="llama"),
    Row(2, 1, 4, SPLIT, "gather_on_forward", 2, "sharded", "full", "llama"),
    Row(2, 1, 4, WHOLE, "replicated", 4, model="gpt2, dropout"),
    Row(2, 2, 2, SPLIT, "gather_on_forward", model="llama"),
    Row(2, 2, 2, WHOLE, "gather_twice", 2, granularity="full", model="gpt2, dropout"),
    Row(1, 4, 2, SPLIT, "replicated", 2, "sharded"),
    Row(1, 1, 2, SPLIT, "gather_on_forward", 2),
    Row(1, 1, 4, SPLIT, "gather_twice", 4, granularity="full", model="gpt2, dropout"),
    Row(1, 2, 4, WHOLE, "replicated", model="llama"),
    Row(2, 1, 2, SPLIT, "replicated", 2, model="llama", optimizer="fused_adam"),
    Row(2, 1, 2, WHOLE, "replicated", 4, optimizer="fused_adam"),
]


@functools.cache
def one_device(model):
    return ten_steps(Row(1, 1, 1, WHOLE, "replicated", model=model).config(), VOCABULARY)


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: "-".join(map(str, row)))
def test_a_layout_trains_the_model_of_one_device(row):
    assert_same_training(ten_steps(row.config(), VOCABULARY), one_device(row.model))
