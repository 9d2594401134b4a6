"""What tests of the loop share: some text, and a language model small enough to train in milliseconds.

The model has the interface of `jzero.train.step.Program`. It sees the last two tokens: embeddings, one hidden layer,
logits. Trained with optax.adam; the batch is split over the mesh, the parameters and the optimizer's state are split
where they divide, so checkpoints really are sharded.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jzero.data.text import build
from jzero.mesh import batch_spec
from jzero.optim.partition import make_plan
from jzero.train.metrics import read_metrics


class State(NamedTuple):
    step: jax.Array
    params: Any
    opt: Any
    fp8: Any = ()


class SmallProgram:
    def __init__(self, config: Any, mesh: jax.sharding.Mesh, vocab_size: int = 257, width: int = 32):
        self.config, self.mesh, self.vocab_size, self.width = config, mesh, vocab_size, width
        self.tx = optax.adam(1e-2)
        self.abstract = jax.tree.map(self._split, jax.eval_shape(self._new))
        self.layout = SimpleNamespace(plan=make_plan(jax.eval_shape(self._new).params, mesh, axis="data"))
        self.step = jax.jit(self._step, donate_argnums=0)
        self.measure = jax.jit(self._measure)
        self.logits = jax.jit(self._logits)

    def init(self) -> State:
        return jax.jit(self._new, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract))()

    def local_rows(self, size: int) -> slice:
        return slice(0, size)

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(batch, NamedSharding(self.mesh, batch_spec()))

    def summary(self) -> list[tuple[str, str]]:
        return [("parameters", str(sum(x.size for x in jax.tree.leaves(self.abstract.params))))]

    def _split(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        divides = x.ndim and x.shape[-1] % self.mesh.shape["data"] == 0
        spec = PartitionSpec(*[None] * (x.ndim - 1), "data") if divides else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    def _new(self) -> State:
        keys = jax.random.split(jax.random.key(self.config.model.seed), 3)
        V, D = self.vocab_size, self.width
        params = {
            "embedding": jax.random.normal(keys[0], (V, D)),
            "hidden": jax.random.normal(keys[1], (2 * D, D)) / np.sqrt(2 * D),
            "head": {"kernel": jax.random.normal(keys[2], (D, V)) / np.sqrt(D), "bias": jnp.zeros(V, jnp.bfloat16)},
        }
        return State(jnp.int32(0), params, self.tx.init(params))

    def _logits(self, params: Any, tokens: jax.Array, fp8: Any = ()) -> jax.Array:
        x = params["embedding"][tokens]
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = jax.nn.gelu(jnp.concatenate([x, before], -1) @ params["hidden"])
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    def _losses(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(self._logits(params, batch["tokens"]), batch["labels"])
        return losses * batch["loss_mask"]

    def _step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(lambda p: self._losses(p, batch).mean())(state.params)
        updates, opt = self.tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        new = State(state.step + 1, params, opt)
        new = jax.lax.with_sharding_constraint(new, jax.tree.map(lambda x: x.sharding, self.abstract))
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": jnp.float32(1e-2)}

    def _measure(
        self, params: Any, batch: dict[str, jax.Array], fp8: Any = ()
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        return {"loss": (self._losses(params, batch).sum(), batch["loss_mask"].sum())}


@pytest.fixture(scope="session")
def small_program():
    """The class above, called like `build_program`."""
    return SmallProgram


@pytest.fixture(scope="session")
def text_prefix(text_file):
    """The indexed byte tokens of `text_file`."""
    prefix = text_file.with_suffix("")
    build([text_file], "bytes", prefix, progress=False)
    return str(prefix)


@pytest.fixture(scope="session")
def without_times():
    """A function: the metrics of a run folder without what no two runs have in common."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = read_metrics(run / "metrics.jsonl")
        return [{k: v for k, v in line.items() if k not in ("step_time_s", "tokens_per_s")} for line in lines]

    return read
