"""Every layout of data, replica and tensor ranks trains the model of one device: same loss, gradients, parameters."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from programs import batch, config, from_shards, program, train, whole

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
    Row(4, 1, 2, SPLIT, "replicated"),
    Row(4, 1, 2, SPLIT, "gather_twice", 2, granularity="selective", model="gpt2, dropout"),
    Row(4, 1, 2, WHOLE, "gather_on_forward", 2, "sharded", "selective", "llama"),
    Row(2, 1, 4, SPLIT, "gather_on_forward", 2, "sharded", "full", "llama"),
    Row(2, 1, 4, WHOLE, "replicated", 4, model="gpt2, dropout"),
    Row(2, 2, 2, SPLIT, "gather_on_forward", model="llama"),
    Row(1, 1, 4, SPLIT, "gather_twice", 4, granularity="full", model="gpt2, dropout"),
    Row(2, 1, 2, SPLIT, "replicated", 2, model="llama", optimizer="fused_adam"),
]
MORE_LAYOUTS = [
    Row(4, 1, 2, WHOLE, "replicated"),
    Row(4, 1, 2, SPLIT, "gather_on_forward", model="gpt2, dropout"),
    Row(2, 1, 4, WHOLE, "gather_twice", model="llama"),
    Row(2, 2, 2, WHOLE, "gather_twice", 2, granularity="full", model="gpt2, dropout"),
    Row(1, 4, 2, SPLIT, "replicated", 2, "sharded"),
    Row(1, 1, 2, SPLIT, "gather_on_forward", 2),
    Row(1, 2, 4, WHOLE, "replicated", model="llama"),
    Row(2, 1, 2, WHOLE, "replicated", 4, optimizer="fused_adam"),
]


def run(conf):
    """Rows of loss and gradient norm of ten steps, the first step's clipped gradient, the last parameters."""
    prog = program(conf, VOCABULARY)
    state, first = train(prog, 1)
    beta = conf.model.optim.betas[0]
    gradient = jax.tree.map(lambda m: m / (1 - beta), from_shards(prog, first_moment(state.opt)))
    state, rest = train(prog, 9, state)
    return np.concatenate([first, rest]), gradient, whole(prog, state.params)


def first_moment(state):
    """Adam's first moment: after one step from zero, (1 - beta) times the gradient."""
    found = [x.mu for x in jax.tree.leaves(state.inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")]
    return found[0]


@functools.cache
def one_device(model):
    return run(Row(1, 1, 1, WHOLE, "replicated", model=model).config())


@pytest.mark.parametrize(
    "row",
    [*LAYOUTS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_LAYOUTS)],
    ids=lambda row: "-".join(map(str, row)),
)
def test_a_layout_trains_the_model_of_one_device(row):
    expected_rows, expected_gradient, expected_params = one_device(row.model)
    rows, gradient, params = run(row.config())
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-6)
    floor = 1e-6 * np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(expected_gradient)))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), floor), jax.tree_util.keystr(path)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4), params, expected_params)


def test_evaluation_and_logits_do_not_depend_on_the_layout():
    row = Row(2, 1, 2, SPLIT, "gather_twice", model="llama")
    results = []
    for conf in (Row(1, 1, 1, WHOLE, "replicated", model="llama").config(), row.config()):
        prog = program(conf, VOCABULARY)
        params, data = prog.init().params, batch(0)
        total, count = jax.block_until_ready(prog.evaluate(params, prog.place(data)))
        results.append((float(total), float(count), np.asarray(prog.logits(params, data["tokens"][:3]))))
    (total, count, logits), (found, found_count, found_logits) = results
    assert found == pytest.approx(total, rel=1e-6)
    assert found_count == count
    assert found_logits.shape == (3, 16, VOCABULARY)
    np.testing.assert_allclose(found_logits, logits, rtol=1e-5, atol=1e-5)


LOW = {
    "remainder": ({"master": "remainder"}, 1e-3),
    "scaled": ({"exp_avg_dtype": "scaled_fp8", "exp_avg_sq_dtype": "scaled_fp16"}, 1e-2),
    "random": (
        {"master": "none", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
        1e-2,
    ),
}


@pytest.mark.parametrize("mode", LOW)
def test_low_precision_follows_fp32_and_tensor_ranks_keep_alike_what_they_share(mode):
    optim, rtol = LOW[mode]
    conf = Row(2, 1, 2, SPLIT, "gather_on_forward").config()
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
