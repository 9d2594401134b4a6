"""One compiled training step: a single `shard_map` over the whole mesh in which every collective is written by hand.

    micro-batches   forward and backward of each; weights gathered and gradients scattered in the layers' bodies
    update          the optimizer on this rank's shards
    gather          policy `replicated` only: the new parameters to every rank

Three policies decide what a rank keeps between steps (`model.optim.policy`):

    replicated          every parameter; gathered after the update
    gather_on_forward   its shards; gathered layer by layer in the step's first forward pass, kept until it ends
    gather_twice        its shards; gathered layer by layer in every forward and every backward pass (ZeRO-3)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.mesh import BATCH_AXES, batch_spec, data_ranks
from jzero.models.attention import flash_attention_fits
from jzero.models.functions import Functions, functions
from jzero.optim import collectives
from jzero.optim.convert import from_shards
from jzero.parallel import stack
from jzero.parallel.tensor import tensor_parallel
from jzero.train import pipelined
from jzero.train.config import Config, model_config
from jzero.train.layout import BLOCKS, Layout, make_layout, threefry_key
from jzero.train.micro_batches import accumulate_gradients, layers_of
from jzero.train.schedule import schedule

Batch = dict[str, Array]


class TrainState(NamedTuple):
    """Everything that a step changes, and all that a checkpoint holds."""

    step: Array  # int32 []: steps done
    opt: Any  # jzero.ZeroState; before the parameters, or XLA copies 16-bit state on GPUs
    params: Any  # as the policy stores them: whole, or shards (Leaf.shard_shape)
    fp8: Any = ()  # jzero.fp8.DelayedState of the layers' scales [L, P, 3], where they are delayed


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A model's training on a mesh, compiled. Made by `build_program`.

    Attributes:
        config: the run's configuration.
        mesh: the device mesh.
        model: pure functions of the model.
        layout: how parameters are stored, gathered and scattered, and the optimizer that matches.
        learning_rate: schedule, from the step count to a float32 scalar.
    """

    config: Config
    mesh: Mesh
    model: Functions
    layout: Layout
    learning_rate: Callable[[Any], Any]

    # --- state -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def abstract(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with their shardings: what a checkpoint is restored into."""
        params = self.layout.abstract_params()
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        fp8 = self.layout.scaling.abstract()
        return TrainState(step, self.layout.tx.init(params), params, fp8)  # type: ignore[arg-type]  abstract arrays

    @functools.cached_property
    def specs(self) -> TrainState:
        """The `PartitionSpec` of every array of the state."""
        return jax.tree.map(lambda x: x.sharding.spec, self.abstract)

    def init(self) -> TrainState:
        """A new state, from `model.seed`: the same on every mesh. Each device computes only what it keeps."""
        return self.create(threefry_key(self.config.model.seed))

    @functools.cached_property
    def create(self) -> Callable[[Array], TrainState]:
        """`key -> state`, jitted: what `init` does, of any key."""

        def build(key: Array) -> TrainState:
            return self._first(self.layout.cut_all(self.model.init(key, self.layout.pipeline.chunks)))

        return jax.jit(build, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract))

    @functools.cached_property
    def start(self) -> Callable[[Any], TrainState]:
        """`values -> state`, jitted: from float32 shards of the parameters, of which masters keep every bit."""
        return jax.jit(self._first, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract))

    def _first(self, values: Any) -> TrainState:
        params, opt = from_shards(self.layout.tx, values, self.abstract.params)
        return TrainState(jnp.int32(0), opt, params, self.layout.scaling.init(values[BLOCKS]))

    # --- batches -----------------------------------------------------------------------------------------------------

    def local_rows(self, size: int) -> slice:
        """Which rows of a batch of `size` samples this process must provide to `place`."""
        sharding = NamedSharding(self.mesh, batch_spec())
        rows = [(index or (slice(0, size),))[0] for index in sharding.addressable_devices_indices_map((size,)).values()]
        return slice(min(r.start or 0 for r in rows), max(size if r.stop is None else r.stop for r in rows))

    def place(self, batch: dict[str, np.ndarray]) -> Batch:
        """This process's rows of a batch -> global arrays, split over replica and data.

        Args:
            batch: arrays [rows of this process, T], or [rows of this process].
        """
        sharding = NamedSharding(self.mesh, batch_spec())
        return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}

    def abstract_batch(self) -> dict[str, Any]:
        """A training batch as `jax.ShapeDtypeStruct`s: [global_batch_size, encoder_seq_length], or without the last."""
        data = self.config.model.data
        optional = {"positions": data.reset_position_ids, "segments": data.reset_attention_mask}
        inputs = {**self.model.inputs, **{name: 2 for name, there in optional.items() if there}}
        shape = (self.config.model.global_batch_size, self.config.model.encoder_seq_length)
        sharding = NamedSharding(self.mesh, batch_spec())
        dtype = lambda name: jnp.float32 if name == "loss_mask" else jnp.int32
        return {name: jax.ShapeDtypeStruct(shape[:n], dtype(name), sharding=sharding) for name, n in inputs.items()}

    # --- the compiled functions --------------------------------------------------------------------------------------

    @functools.cached_property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
        """`(state, batch) -> (state, metrics)`, jitted; the state's buffers are donated.

        Metrics are float32 scalars of this step: loss (mean over the batch's tokens), grad_norm (before clipping), lr.
        """
        mapped = jax.shard_map(
            self._step, mesh=self.mesh, in_specs=(self.specs, batch_spec()), out_specs=(self.specs, PartitionSpec())
        )
        return jax.jit(mapped, donate_argnums=0, compiler_options=self.layout.compiler_options or None)

    @functools.cached_property
    def measure(self) -> Callable[..., dict[str, tuple[Array, Array]]]:
        """`(params, batch, fp8=()) -> {name of a mean: (sum, number of terms)}`, float32 [], over the whole batch.

        The loss is the sum of all means whose names end in "loss"; that of the tokens is the first of them.
        `fp8` is that of the state: delayed scales, which stay as they are.
        """
        mapped = jax.shard_map(
            self._measure,
            mesh=self.mesh,
            in_specs=(self.specs.params, batch_spec(), PartitionSpec()),
            out_specs=PartitionSpec(),
        )

        def measure(params: Any, batch: Batch, fp8: Any = ()) -> dict[str, tuple[Array, Array]]:
            return mapped(params, batch, self._known(fp8))

        return jax.jit(measure)

    def evaluate(self, params: Any, batch: Batch, fp8: Any = ()) -> tuple[Array, Array]:
        """Sum of the tokens' losses and number of tokens that count, float32 scalars over the whole batch."""
        found = self.measure(params, batch, fp8)
        return found[next(name for name in found if name.endswith("loss"))]

    @functools.cached_property
    def logits(self) -> Callable[..., Array]:
        """`(params, tokens [B, T], fp8=()) -> float32 [B, T, V]`, for any B; every data rank computes all of it.

        In the place of the tokens there may be a batch with what else the model reads. With sequence parallelism T is a
        multiple of the tensor axis. `fp8` as for `measure`.
        """
        mapped = jax.shard_map(
            self._logits,
            mesh=self.mesh,
            in_specs=(self.specs.params, PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
        )

        def logits(params: Any, tokens: Array | Batch, fp8: Any = ()) -> Array:
            return mapped(params, tokens, self._known(fp8))

        return jax.jit(logits)

    def _known(self, fp8: Any) -> Any:
        """The scales that were handed in."""
        if self.layout.scaling.delayed and not fp8:
            raise JzeroError("model.fp8: delayed scaling needs its scales, found none; hand in `state.fp8` too")
        return fp8

    @functools.cached_property
    def observe(self) -> Callable[[TrainState, Batch], dict[str, Array]]:
        """`(state, batch) -> what FP8 products would see in a step`, which is not taken; float32 [L, P, 3] each.

        Keys: amax, scale, saturated, flushed (the last two: shares of the elements); with MX blocks amax alone.
        """
        in_specs = (self.specs, batch_spec())
        mapped = jax.shard_map(self._observe, mesh=self.mesh, in_specs=in_specs, out_specs=PartitionSpec())
        return jax.jit(mapped, compiler_options=self.layout.compiler_options or None)

    def _complete(self, batch: Batch, step: Array) -> Batch:
        """This rank's part of a batch, with the numbers of its samples and what each term counts in the loss."""
        rows, ranks, mask = batch["tokens"].shape[0], data_ranks(self.mesh), batch["loss_mask"]
        first = step * (rows * ranks) + _batch_rank(self.mesh) * rows
        batch = {**batch, "sample": first + jnp.arange(rows, dtype=jnp.int32)}
        if self.model.has_sample_loss:
            # Two means over different numbers of terms: that of the tokens has to be known before their sum's gradient.
            tokens = collectives.total(jnp.sum(mask), BATCH_AXES)
            every = jnp.full((rows,), 1 / rows, jnp.float32)
            return {**batch, "weight": mask * (ranks / jnp.maximum(tokens, 1.0)), "sample_weight": every}
        # The mean over all positions until the number of tokens that count is known: one all-reduce at the step's end
        # then sums all three scalars, and no collective runs beside the loop over the layers.
        return {**batch, "weight": mask / mask.size}

    def _gradients(self, state: TrainState, batch: Batch, slots: Any) -> tuple[Array, Any, Any]:
        """Loss, gradients and what FP8 products found; as `accumulate_gradients` gives them."""
        batch, params = self._complete(batch, state.step), state.params
        if self.model.has_sample_loss:
            params = self.layout.in_order(batch["weight"], params)
        return accumulate_gradients(self.model, self.layout, params, batch, self.config.num_micro_batches, slots)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """This rank's part of a step."""
        count, positions, ranks = jnp.sum(batch["loss_mask"]), batch["loss_mask"].size, data_ranks(self.mesh)
        loss, grads, seen = self._gradients(state, batch, self.layout.scaling.slots(state.fp8))
        shards, own = jax.tree.leaves(grads), self.layout.own_shards(state.params)
        norm, (loss, tokens) = collectives.norm_and_totals(shards, self.layout.plan.leaves, [loss, count], BATCH_AXES)
        per_token = 1.0 if self.model.has_sample_loss else positions * ranks / jnp.maximum(tokens, 1.0)
        params, opt, norm = self.layout.tx.update_shards(
            [g * per_token for g in shards], state.opt, own, norm=norm * per_token, gather=self.layout.keep
        )
        metrics = {
            "loss": loss / ranks * per_token,
            "grad_norm": norm,
            "lr": jnp.asarray(self.learning_rate(state.step), jnp.float32),
        }
        fp8 = self.layout.scaling.next(state.fp8, self.layout.in_order(norm, seen), jnp.isfinite(norm))
        return TrainState(state.step + 1, opt, params, fp8), metrics

    def _observe(self, state: TrainState, batch: Batch) -> dict[str, Array]:
        scaling, count = self.layout.scaling, self.config.num_micro_batches
        seen = self._gradients(state, batch, scaling.slots(state.fp8, observe=True))[2]
        return scaling.with_weights(scaling.observed(state.fp8, seen, count), self.layout.fp8_weights(state.params))

    def _measure(self, params: Any, batch: Batch, fp8: Any) -> dict[str, tuple[Array, Array]]:
        weights = self.layout.start(params, self.layout.scaling.slots(fp8))
        if self.layout.pipeline.size > 1:
            sums = pipelined.evaluate(self.model, self.layout, weights, batch, self.config.model.micro_batch_size)
        else:
            x = self.model.embed(weights.outer, batch, None)
            x = self.layout.in_order(weights.outer, x)
            x = stack.apply(layers_of(self.model, batch), weights.blocks, x, self.layout.blocks, slots=weights.slots)
            sums = self.model.measures(weights.outer, x, batch)
        counts = jax.tree.map(lambda x: collectives.vary(x, BATCH_AXES), self.model.counts(batch))
        sums, counts = collectives.total((sums, counts), BATCH_AXES)
        return {name: (sums[name], counts[name]) for name in sums}

    def _logits(self, params: Any, tokens: Array | Batch, fp8: Any) -> Array:
        slots = self.layout.scaling.slots(fp8, everywhere=True)
        weights = self.layout.start_everywhere(params, slots)
        batch = tokens if isinstance(tokens, dict) else {"tokens": tokens}
        if self.layout.pipeline.size > 1:
            return pipelined.logits(self.model, self.layout, weights, batch)
        x = self.model.embed(weights.outer, batch, None)
        x = self.layout.in_order(weights.outer, x)
        x = stack.apply(layers_of(self.model, batch), weights.blocks, x, self.layout.blocks, "invarying", weights.slots)
        return self.model.logits(weights.outer, x)

    # --- what the user sees before the first step --------------------------------------------------------------------

    def summary(self) -> list[tuple[str, str]]:
        """Rows of a short table: parameters, bytes per device with and without ZeRO, mesh, policy."""
        return self.layout.summary()


def _batch_rank(mesh: Mesh) -> Array:
    """Number of this rank among those that split the batch, replica-major."""
    return jax.lax.axis_index("replica") * mesh.shape["data"] + jax.lax.axis_index("data")


def build_program(config: Config, mesh: Mesh, vocab_size: int | None = None) -> Program:
    """The training program of a configuration on a mesh. Nothing is compiled until it is called.

    Args:
        config: a validated configuration.
        mesh: the device mesh, of CPUs, GPUs or described GPUs.
        vocab_size: number of token ids, before padding; None where `model.vocab_size` says it.

    Example:
        >>> from jzero import make_mesh
        >>> program = build_program(Config(), make_mesh(devices=jax.devices()[:1]), 257)
        >>> program.abstract.params["embedding"]["token"].shape
        (384, 768)
    """
    architecture = model_config(config, vocab_size)
    # The mesh may be described, so its platform need not be this process's. cuDNN's attention has no dropout.
    platform, dropout = mesh.devices.flat[0].platform, architecture.attention_dropout
    fits = flash_attention_fits(architecture.param_dtype, architecture.head_width, platform) and not dropout
    if fits and architecture.attention_implementation == "auto":
        architecture = dataclasses.replace(architecture, attention_implementation="cudnn")
    model = functions(architecture, tensor_parallel(mesh, sequence=config.model.sequence_parallel))
    learning_rate = schedule(config)
    return Program(config, mesh, model, make_layout(config, mesh, model, learning_rate), learning_rate)
