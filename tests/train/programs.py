"""Small programs, batches, layouts and the one-device references that the tests of the step share."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero import make_mesh
from jzero.optim import collectives
from jzero.train.config import Config, Model, Optim, Sched, Trainer
from jzero.train.step import Program, build_program

T, VOCABULARY, BATCH = 16, 61, 16


def config(devices: int = 8, policy: str = "replicated", micro_batches: int = 1, **changes) -> Config:
    """A run of a 3-layer GPT whose biases (24, 72, 96 wide) and vocabulary (61) do not all divide by 8."""
    precision, optim = changes.pop("precision", 32), changes.pop("optim", {})
    clip, samples = changes.pop("clip", 1.0), BATCH
    for axis in ("tensor", "pipeline"):
        samples *= changes.get(f"{axis}_model_parallel_size", 1)
    model = {
        "global_batch_size": BATCH, "micro_batch_size": samples // (micro_batches * devices), "encoder_seq_length": T,
        "num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
        "make_vocab_size_divisible_by": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    } | changes  # fmt: skip
    optim = {"lr": 2e-3, "policy": policy, "sched": Sched(warmup_steps=2)} | optim
    trainer = Trainer(devices=devices, precision=precision, max_steps=20, gradient_clip_val=clip)
    return Config(trainer=trainer, model=Model(**model, optim=Optim(**optim)))


MODELS = {
    "gpt2": {"num_query_groups": None},
    "gpt2, dropout": {"num_query_groups": None, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {
        "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 4, "position_embedding_type": "rope",
        "normalization": "rmsnorm", "activation": "swiglu", "bias": False, "ffn_hidden_size": 40,
        "share_embeddings_and_output_weights": False,
    },
}  # fmt: skip
EVEN_VOCABULARY = 64  # a multiple of every tensor size, so that all layouts pad it alike


class Row(NamedTuple):
    """A layout, and all else that must not change what is trained."""

    policy: str = "replicated"
    granularity: str | None = None
    model: str = "gpt2"
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    replica: int = 1
    sequence: bool = False
    micro_batches: int = 1
    accumulation: str = "local"
    optimizer: str = "distributed_fused_adam"

    def config(self, **changes) -> Config:
        keys = {
            "num_layers": 4,
            "replica_parallel_size": self.replica,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "sequence_parallel": self.sequence,
            "grad_accumulation": self.accumulation,
            "activations_checkpoint_granularity": self.granularity,
            "optim": {"name": self.optimizer} | changes.pop("optim", {}),
            "clip": 0.5,
        }
        devices = self.data * self.replica * self.tensor * self.pipeline
        return config(devices, self.policy, self.micro_batches, **keys | MODELS[self.model] | changes)

    def __str__(self) -> str:
        return "-".join(f"{name} {x}" for name, x in self._asdict().items() if x != self._field_defaults[name])


@functools.lru_cache(maxsize=16)
def program(conf: Config, vocabulary: int = VOCABULARY) -> Program:
    """The program of a run: the same one for the same settings, so that what tests share compiles once."""
    mesh = make_mesh(**conf.mesh_shape, devices=jax.devices()[: conf.num_devices])
    return build_program(conf, mesh, vocabulary)


@functools.cache
def bert_batch(number: int) -> dict[str, np.ndarray]:
    """Pairs of 5 to T tokens; how many are masked differs widely from row to row."""
    rng, shape = np.random.default_rng(number), (BATCH, T)
    size = rng.integers(5, T + 1, BATCH)[:, None]
    text, chance = np.arange(T) < size, rng.uniform(0.1, 0.9, (BATCH, 1))
    tokens, labels = (rng.integers(0, VOCABULARY, shape, dtype=np.int32) for _ in range(2))
    return {
        "tokens": tokens, "labels": labels, "segments": text.astype(np.int32),
        "token_types": ((np.arange(T) >= size // 2) & text).astype(np.int32),
        "loss_mask": ((rng.random(shape) < chance) & text).astype(np.float32),
        "is_random": rng.integers(0, 2, BATCH, dtype=np.int32),
    }  # fmt: skip


def batch_for(prog: Program, number: int) -> dict[str, np.ndarray]:
    """A batch that a program's model reads."""
    return bert_batch(number) if prog.config.model.type == "bert" else batch(number)


@functools.cache
def batch(number: int, masked: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, VOCABULARY, (BATCH, T + 1), dtype=np.int32)
    mask = rng.random((BATCH, T)) > 0.2 if masked else np.ones((BATCH, T))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask.astype(np.float32)}


def train(prog: Program, steps: int, state=None):
    """State and a [steps, 2] array of loss and gradient norm."""
    state = prog.init() if state is None else state
    rows = []
    for number in range(int(state.step), int(state.step) + steps):
        state, metrics = jax.block_until_ready(prog.step(state, prog.place(batch_for(prog, number))))
        rows.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, np.array(rows)


def whole(prog: Program, params):
    """The stored parameters as whole NumPy arrays."""
    return joined(prog, params) if prog.layout.sharded else jax.tree.map(np.asarray, params)


def joined(prog: Program, shards):
    """A tree of the parameters' shards (parameters of a policy that keeps shards, moments) as whole NumPy arrays."""
    plan = prog.layout.plan

    def gather(shards):
        flat = zip(jax.tree.leaves(shards), plan.leaves, strict=True)
        return plan.unflatten([collectives.gather(x, leaf, to="invarying") for x, leaf in flat])

    stored, full = (
        plan.unflatten([getattr(leaf, spec) for leaf in plan.leaves]) for spec in ("shard_spec", "param_spec")
    )
    mapped = jax.shard_map(gather, mesh=prog.mesh, in_specs=(stored,), out_specs=full)
    return jax.tree.map(np.asarray, jax.jit(mapped)(shards))


def ten_steps(conf: Config, vocabulary: int = VOCABULARY):
    """Rows of loss and gradient norm of ten steps, the first step's clipped gradient, the last parameters."""
    prog = program(conf, vocabulary)
    state, first = train(prog, 1)
    beta = conf.model.optim.betas[0]
    gradient = jax.tree.map(lambda m: m / (1 - beta), joined(prog, first_moment(state.opt)))
    state, rest = train(prog, 9, state)
    return np.concatenate([first, rest]), gradient, whole(prog, state.params)


def first_moment(state):
    """Adam's first moment: after one step from zero, (1 - beta) times the gradient."""
    found = [x.mu for x in jax.tree.leaves(state.inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")]
    return found[0]


def assert_same_training(found, expected):
    """Two results of `ten_steps` agree: losses to 1e-6, gradients to 1e-5 of their leaf's largest, parameters to 1e-4.

    The floor is that of a leaf whose true gradient is zero: 1e-6 of the global norm.
    """
    rows, gradient, params = found
    expected_rows, expected_gradient, expected_params = expected
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-6)
    floor = 1e-6 * np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(expected_gradient)))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        error = np.abs(a.reshape(b.shape) - b).max()
        assert error <= 1e-5 * max(np.abs(b).max(), floor), jax.tree_util.keystr(path)
    same = lambda a, b: np.testing.assert_allclose(a.reshape(b.shape), b, rtol=0, atol=1e-4)
    jax.tree.map(same, params, expected_params)


@functools.cache
def one_device(model: str):
    """`ten_steps` of a model of `MODELS` on one device."""
    return ten_steps(Row(model=model).config(), EVEN_VOCABULARY)


def assert_trains_as_one_device(row: Row):
    assert_same_training(ten_steps(row.config(), EVEN_VOCABULARY), one_device(row.model))


LOW = {
    "remainder": ({"master": "remainder"}, 1e-3),
    "scaled": ({"exp_avg_dtype": "scaled_fp8", "exp_avg_sq_dtype": "scaled_fp16"}, 1e-2),
    "random": (
        {"master": "none", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
        1e-2,
    ),
}


def assert_low_precision_follows_fp32(row: Row, mode: str):
    """bf16 with a mode of `LOW`: the losses are those of float32, and what ranks share they keep alike, bit for bit."""
    optim, rtol = LOW[mode]
    prog = program(row.config(precision="bf16", optim=optim), EVEN_VOCABULARY)
    state, rows = train(prog, 10)
    np.testing.assert_allclose(rows[:, 0], one_device(row.model)[0][:, 0], rtol=rtol)
    for x in jax.tree.leaves(state):
        held: dict = {}
        for shard in x.addressable_shards:
            value = np.asarray(shard.data).tobytes()
            assert held.setdefault(str(shard.index), value) == value


@functools.cache
def reference(conf: Config, steps: int):
    """Plain autodiff and optax.adamw on one device: parameters, and [steps, 2] of loss and gradient norm."""
    prog = program(dataclasses.replace(conf, trainer=dataclasses.replace(conf.trainer, devices=1)))
    model, optim = prog.model, conf.model.optim
    tx = optax.adamw(
        prog.learning_rate, *optim.betas, optim.eps, weight_decay=optim.weight_decay, mask=model.decay
    )  # fmt: skip
    clip = conf.trainer.gradient_clip_val
    params = jax.jit(model.init)(jax.random.key(conf.model.seed))
    state = tx.init(params)

    def loss_fn(params, data):
        outer = {k: v for k, v in params.items() if k != "blocks"}
        x = model.embed(outer, data, None)
        for i in range(conf.model.num_layers):
            x = model.block(jax.tree.map(lambda w, i=i: w[i], params["blocks"]), x, data, None, i)
        return jnp.sum(model.losses(outer, x, data) * data["loss_mask"]) / jnp.sum(data["loss_mask"])

    @jax.jit
    def step(params, state, data):
        loss, grads = jax.value_and_grad(loss_fn)(params, data)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, norm

    rows = []
    for number in range(steps):
        params, state, loss, norm = jax.block_until_ready(step(params, state, batch(number)))
        rows.append([float(loss), float(norm)])
    return jax.tree.map(np.asarray, params), np.array(rows)
