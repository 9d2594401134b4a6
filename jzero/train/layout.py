"""How parameters are stored between steps, gathered for use and scattered as gradients: one policy, as data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jzero.fp8 import E4M3, Quantised, Slots
from jzero.fp8.parameters import is_quantised
from jzero.mesh import BATCH_AXES
from jzero.models.dropout import Dropout
from jzero.models.functions import Functions
from jzero.optim import ZeroTransformation, collectives, distributed_fused_adam
from jzero.optim.partition import Leaf, Plan, make_plan
from jzero.parallel.pipeline import Pipeline, make_pipeline
from jzero.parallel.stack import DataParallel, Layers
from jzero.parallel.tensor import AXIS
from jzero.train.config import Config
from jzero.train.scaling import Scaling
from jzero.train.xla_options import compiler_options

BLOCKS = "blocks"
EMBEDDING = "embedding"


class Weights(NamedTuple):
    """The weights that a micro-batch starts from."""

    outer: Any  # whole, varying over the batch axes
    blocks: Layers  # whole and varying, or shards
    slots: Slots | None = None  # of the layers' FP8 products


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The policy of a run and everything that follows from it.

    Attributes:
        policy: "replicated", "gather_on_forward" or "gather_twice".
        mesh: the device mesh.
        plan: how each parameter of the model is cut into shards.
        tx: the optimizer of what is stored.
        outer, blocks: the collectives of the parameters outside the layers, and of the stacked layers.
        pipeline: how the layers are spread over stages.
        accumulate_locally: sum micro-batches on the rank and reduce once.
        granularity: activation checkpointing.
        dtype: of the parameters, and of the activations.
        dropout_seed: seed of all dropout masks, or None where there is no dropout.
        scaling: the scales of FP8 products.
        compiler_options: XLA options of the step.
    """

    policy: str
    mesh: Mesh
    plan: Plan
    tx: ZeroTransformation
    outer: DataParallel
    blocks: DataParallel
    pipeline: Pipeline
    accumulate_locally: bool
    granularity: str | None
    dtype: Any
    dropout_seed: int | None
    scaling: Scaling
    compiler_options: dict[str, Any]

    @property
    def sharded(self) -> bool:
        """Whether parameters are stored as shards between steps."""
        return self.policy != "replicated"

    @property
    def keeps_gathered(self) -> bool:
        """Whether the first micro-batch's gathered weights serve the others."""
        return self.policy == "gather_on_forward"

    # --- trees -------------------------------------------------------------------------------------------------------

    def split(self, tree: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """A tree like the parameters -> (without the layers, the layers)."""
        return {k: v for k, v in tree.items() if k != BLOCKS}, tree[BLOCKS]

    def join(self, outer: dict[str, Any], blocks: Any) -> dict[str, Any]:
        """The inverse of `split`."""
        return {**outer, BLOCKS: blocks}

    # --- storing -----------------------------------------------------------------------------------------------------

    def abstract_params(self) -> Any:
        """The stored parameters as `jax.ShapeDtypeStruct`s with shardings."""

        def one(leaf: Leaf) -> Any:
            shape, spec = (leaf.shard_shape, leaf.shard_spec) if self.sharded else (leaf.shape, leaf.param_spec)
            value = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))
            if not leaf.quantised:
                return value
            layers = NamedSharding(self.mesh, leaf.layers_spec)
            return Quantised(value, jax.ShapeDtypeStruct(leaf.layers, jnp.float32, sharding=layers))

        return self.plan.unflatten([one(leaf) for leaf in self.plan.leaves])

    def cut_all(self, params: Any) -> Any:
        """Whole parameters (traced, outside any manual region; layers [L, ...]) as float32 shards."""

        def one(x: Array, leaf: Leaf) -> Array:
            x = x.reshape(leaf.shape).astype(jnp.float32)
            if leaf.split is None:
                return self.cut(x, leaf)
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, leaf.shard_spec))

        flat = self.plan.flatten(params, "parameters")
        return self.plan.unflatten([one(x, leaf) for x, leaf in zip(flat, self.plan.leaves, strict=True)])

    def cut(self, x: Array, leaf: Leaf) -> Array:
        """A small parameter that is flattened, whole on every rank for a moment -> its shards."""
        cut = lambda x: collectives.take(x, leaf)
        return jax.shard_map(cut, mesh=self.mesh, in_specs=leaf.param_spec, out_specs=leaf.shard_spec)(x)

    def fp8_weights(self, params: Any) -> list[Quantised]:
        """This rank's part of the FP8 parameters as they are stored, in the order of the products, each [V l, ...]."""
        blocks = self.in_one(params[BLOCKS])
        found = [
            functools.reduce(lambda tree, key: tree[key], (*path, "weight"), blocks) for path in self.scaling.products
        ]
        return [w for w in found if is_quantised(w)]

    def own_shards(self, params: Any) -> list[Any]:
        """This rank's shards of the stored parameters, in the plan's order."""
        flat = self.plan.flatten(params, "parameters")
        if self.sharded:
            return flat
        return [collectives.take(x, leaf) for x, leaf in zip(flat, self.plan.leaves, strict=True)]

    def keep(self, shards: list[Any]) -> Any:
        """The updated float32 shards as the policy stores them: phase `gather` where it replicates."""
        out = []
        for x, leaf in zip(shards, self.plan.leaves, strict=True):
            dtype = jnp.dtype(leaf.dtype)
            if leaf.quantised:
                out.append(x if self.sharded else collectives.gather(x, leaf, to="invarying"))
            elif self.sharded:
                out.append(x.astype(dtype))
            else:
                full = collectives.gather(x, leaf, dtype=self.blocks.param_dtype or dtype, to="invarying")
                out.append(full.astype(dtype))
        return self.plan.unflatten(out)

    # --- using -------------------------------------------------------------------------------------------------------

    def start(self, params: Any, slots: Slots | None = None) -> Weights:
        """What a forward pass starts from: whole and varying, but for the layers of a sharded policy."""
        outer, blocks = self.split(params)
        layers = Layers((self.in_one(self.blocks.local(blocks)),), shards=self.sharded)
        return Weights(self.outer.whole(outer) if self.sharded else self.outer.local(outer), layers, slots)

    def start_everywhere(self, params: Any, slots: Slots | None = None) -> Weights:
        """The same for a computation that every rank repeats: nothing varies."""
        outer, blocks = self.split(params)
        layers = Layers((self.in_one(blocks),), shards=self.sharded)
        return Weights(self.outer.whole(outer, "invarying") if self.sharded else outer, layers, slots)

    def in_one(self, blocks: Any) -> Any:
        """This rank's layers, stored as [chunks of the stage, layers of a chunk, ...] or [layers, ...]; the latter."""
        return blocks if self.pipeline.chunks == 1 else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)

    def as_stored(self, blocks: Any) -> Any:
        """The inverse of `in_one`."""
        chunks = self.pipeline.chunks
        return blocks if chunks == 1 else jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), blocks)

    def in_order(self, first: Any, then: Any) -> Any:
        """`then`; on CPU, what uses it waits for all of `first`.

        XLA's CPU runtime holds one of its threads per waiting collective. A collective outside a loop that depends on
        nothing in it could run beside those inside it, each device in its own order, until all threads wait.
        """
        return collectives.after(first, then) if self.mesh.devices.flat[0].platform == "cpu" else then

    def scatter_outer(self, grads: dict[str, Any], blocks: Any) -> dict[str, Any]:
        """Full gradients outside the layers -> shards of the mean; those of the embedding last and one by one.

        They are complete when the backward pass is. Merged with the first layer's they would make that one late, and
        behind the largest of them the norm of all others can be computed.

        Args:
            grads: as the backward pass leaves them.
            blocks: the layers' shards, which come before.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(grads)
        sizes = [(path[0].key == EMBEDDING) * x.size for path, x in flat]
        order, out = sorted(range(len(flat)), key=lambda i: sizes[i]), {}
        for i in order:
            grad = collectives.after((blocks, out), flat[i][1]) if sizes[i] else flat[i][1]
            out[i] = self.outer.scatter_one(grad, i)
        return treedef.unflatten([out[i] for i in range(len(flat))])

    def zero_sums(self, *, full: bool) -> tuple[Any, Any]:
        """Float32 zeros to add gradients to: of full size, or of the shards' size; (outer, blocks as `in_one`)."""

        def one(leaf: Any) -> Array:
            shape, axes = leaf.shard_local_shape, leaf.axes
            if full:
                shape, axes = leaf.local_shape, (*BATCH_AXES, *(name for names in leaf.spec for name in names))
            axes = tuple(dict.fromkeys((*axes, *self.pipeline.axes)))
            if self.outer.tensor.partial(leaf.axes):
                axes = (*axes, AXIS)
            return collectives.vary(jnp.zeros(shape, jnp.float32), axes) if axes else jnp.zeros(shape, jnp.float32)

        outer, blocks = self.split(self.plan.unflatten([one(leaf) for leaf in self.plan.leaves]))
        return outer, self.in_one(blocks)

    def complete(self, shards: tuple[Any, Any]) -> tuple[Any, Any]:
        """Shards of the step's gradients, (outer, blocks): the parts that tensor ranks have, added up once."""
        return self.outer.complete(shards[0]), self.blocks.complete(shards[1])

    def dropout(self, samples: Array) -> Dropout | None:
        """The dropout masks of these global sample numbers (int32 [B]), or None where there is no dropout."""
        return None if self.dropout_seed is None else Dropout(threefry_key(self.dropout_seed), samples)

    # --- what it costs -----------------------------------------------------------------------------------------------

    def summary(self) -> list[tuple[str, str]]:
        """Rows of the table shown before the first step."""
        state = self.tx.init(self.abstract_params())
        params = self.abstract_params()
        count = sum(math.prod(leaf.shape) for leaf in self.plan.leaves)
        whole = sum(math.prod(leaf.local_shape) * jnp.dtype(leaf.dtype).itemsize for leaf in self.plan.leaves)
        with_zero = bytes_per_device(params) + bytes_per_device(state)
        without = whole + bytes_without_zero(state)
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items() if size > 1) or "one device"
        return [
            ("parameters", f"{count:,}"),
            ("mesh", shape),
            ("policy", self.policy),
            ("parameters + optimizer state per device", f"{with_zero / 2**20:,.1f} MiB"),
            ("the same without ZeRO", f"{without / 2**20:,.1f} MiB"),
        ]


def threefry_key(seed: int) -> Array:
    """A key whose numbers do not depend on the mesh, nor on the user's default generator."""
    return jax.random.key(seed, impl="threefry2x32")


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of arrays (or abstract arrays) with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_without_zero(tree: Any) -> int:
    """Bytes that one device would hold of such arrays if the data axis split none, padding included."""

    def one(x: Any) -> int:
        names = [name for entry in x.sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
        return bytes_per_device(x) * (x.sharding.mesh.shape["data"] if "data" in names else 1)

    return sum(map(one, jax.tree.leaves(tree)))


def make_layout(config: Config, mesh: Mesh, model: Functions, learning_rate: Any) -> Layout:
    """The layout of a run.

    Args:
        config: a validated configuration.
        mesh: the device mesh.
        model: the model's functions, for this mesh.
        learning_rate: schedule.
    """
    axis, replica = ("data", ("replica",)) if config.zero else (None, BATCH_AXES)
    m = config.model
    pipeline = make_pipeline(mesh, m.virtual_pipeline_model_parallel_size, m.num_layers)
    stacked = lambda path: pipeline.stacked_dimensions * path.startswith(f"['{BLOCKS}']")
    plan = _plan(config, mesh, model, pipeline, axis=axis, stacked=stacked)
    wire = (config.grad_sync_dtype or jnp.float32, config.param_sync_dtype)
    parallel = DataParallel((), replica, (*BATCH_AXES, *pipeline.axes), *wire, model.tensor)
    is_block = [leaf.path.startswith(f"['{BLOCKS}']") for leaf in plan.leaves]
    pick = lambda chosen: dataclasses.replace(
        parallel, leaves=tuple(leaf for leaf, b in zip(plan.leaves, is_block, strict=True) if b == chosen)
    )
    dropout = m.hidden_dropout > 0 or m.attention_dropout > 0
    return Layout(
        policy=config.policy,
        mesh=mesh,
        plan=plan,
        tx=_optimizer(config, mesh, model, plan, learning_rate, axis=axis, replica_axis=replica, stacked=stacked),
        outer=pick(False),
        blocks=pick(True),
        pipeline=pipeline,
        accumulate_locally=m.grad_accumulation == "local",
        granularity=m.activations_checkpoint_granularity,
        dtype=config.param_dtype,
        dropout_seed=m.seed if dropout else None,
        scaling=Scaling(
            recipe=model.fp8,
            products=model.products,
            layers=m.num_layers,
            pipeline=pipeline,
            mesh=mesh,
            positions=m.global_batch_size * m.encoder_seq_length,
            pieces=model.pieces,
        ),
        compiler_options=compiler_options(mesh, **bucket_bytes(pick(True), m.optim.bucket_cap_mb)),
    )


def _plan(
    config: Config, mesh: Mesh, model: Functions, pipeline: Pipeline, *, axis: str | None, stacked: Callable[[str], int]
) -> Plan:
    """How each parameter of the model is cut into shards, and which are FP8 ones."""
    spec = lambda axes: pipeline.spec(axes, model.tensor.spec(axes))
    specs = jax.tree.map(spec, model.axes, is_leaf=lambda x: isinstance(x, tuple))
    as_stored = lambda x: jax.ShapeDtypeStruct(pipeline.stacked(x.shape), x.dtype)
    abstract = {**model.abstract, BLOCKS: jax.tree.map(as_stored, model.abstract[BLOCKS])}
    plan = make_plan(abstract, mesh, axis=axis, stacked=stacked, param_specs=specs, share=True)
    return stored_plan(plan, config.param_dtype, model.products if config.model.fp8_params else ())


def _optimizer(
    config: Config, mesh: Mesh, model: Functions, plan: Plan, learning_rate: Any, **options: Any
) -> ZeroTransformation:
    """The optimizer of what is stored; `options` go to it as they are."""
    optim, sharded = config.model.optim, config.policy != "replicated"
    shards = lambda leaf: sharded or leaf.shares_split_dimension  # the optimizer would flatten it
    return distributed_fused_adam(
        learning_rate,
        *optim.betas,
        optim.eps,
        optim.weight_decay,
        model.decay,
        mesh=mesh,
        master=optim.master,
        state_dtype=config.state_dtype,
        stochastic_rounding=optim.stochastic_rounding,
        param_sync_dtype=None if sharded else config.param_sync_dtype,
        clip_norm=config.trainer.gradient_clip_val or None,
        skip_nonfinite=config.trainer.skip_nonfinite,
        param_specs=plan.unflatten([leaf.shard_spec if shards(leaf) else leaf.param_spec for leaf in plan.leaves]),
        fp8_recipe=model.fp8 if config.model.fp8_params else None,  # type: ignore[arg-type]  `validate` refuses MX blocks
        **options,
    )


def stored_plan(plan: Plan, dtype: Any, products: Sequence[tuple[str, ...]]) -> Plan:
    """The plan of the same parameters in a type, but for the weights of these products of a layer: FP8 parameters."""
    names = {"".join(f"[{key!r}]" for key in (BLOCKS, *path, "weight")) for path in products}

    def one(leaf: Leaf) -> Leaf:
        narrow = leaf.path in names
        return dataclasses.replace(leaf, dtype=E4M3.name if narrow else jnp.dtype(dtype).name, quantised=narrow)

    return plan._replace(leaves=tuple(map(one, plan.leaves)))


def bucket_bytes(blocks: DataParallel, cap_mb: float | None) -> dict[str, int]:
    """Up to which sizes small collectives are merged: of whole weights gathered, and of gradient shards scattered.

    Without a cap, the size of one layer: all that a layer needs comes in one call, and nothing else joins it.

    Args:
        blocks: the collectives of the stacked layers.
        cap_mb: `bucket_cap_mb`, MiB of whole weights or gradients.
    """
    layer = blocks.layer().leaves
    if cap_mb:
        cap = int(cap_mb * 2**20)
        return {"gathered": cap, "scattered": max(1, cap // layer[0].ranks)}
    wire = lambda leaf: jnp.dtype((None if leaf.quantised else blocks.param_dtype) or leaf.dtype).itemsize
    width = jnp.dtype(blocks.grad_dtype).itemsize
    return {
        "gathered": sum(math.prod(leaf.local_shape) * wire(leaf) for leaf in layer),
        "scattered": sum(math.prod(leaf.shard_local_shape) * width for leaf in layer),
    }
