"""The scales of a run's FP8 products: in the training state, into the layers, and from what those saw the next ones.

    state    of delayed scaling, whole on every rank: scale [L, P, 3], history [H, L, P, 3]; of other recipes nothing
    slots    this stage's layers [V l, P, 3], marked as each rank's own: otherwise autodiff would sum the amaxes
    seen     their cotangents, the largest over micro-batches
    next     one all-reduce of all amaxes over every axis: ranks that share a tensor or hold parts of it take the
             maximum, stages put theirs between zeros; then `recipes.update`. A step that is not finite changes nothing

What is kept of gradients is that of the mean loss over all ranks, where a rank has the gradient of its own mean: so the
state does not depend on the mesh.

Letters: L layers, P products of a layer, H steps of history, V l layers of this stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.fp8 import BlockScaling, DelayedScaling, DelayedState, Quantised, Slots, numerics, recipes
from jzero.fp8.recipes import Recipe
from jzero.mesh import BATCH_AXES, data_ranks
from jzero.models.config import Piece
from jzero.optim import collectives, regions
from jzero.parallel.pipeline import Pipeline
from jzero.parallel.tensor import AXIS

_FIRST_GRADIENT = 16.0  # times the weight of one position: more than was seen of any model, and E5M2 has 30 binades
_OPERANDS = ("input", "weight", "gradient")


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """How the scales of a run travel.

    Attributes:
        recipe: None: no FP8.
        products: paths of the weights in a layer's tree, in the order of the slots.
        layers: L.
        pipeline: how the layers are spread over stages.
        mesh: the device mesh.
        positions: of a whole batch, for the first scale of gradients.
        pieces: which layers have no FP8 products: what is seen of them is 0, and their scales stay.
    """

    recipe: Recipe | None
    products: tuple[tuple[str, ...], ...]
    layers: int
    pipeline: Pipeline
    mesh: Mesh
    positions: int
    pieces: tuple[Piece, ...]

    @property
    def delayed(self) -> DelayedScaling | None:
        """The recipe, if it has a state."""
        return self.recipe if isinstance(self.recipe, DelayedScaling) else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of all scales, [L, P, 3]."""
        return self.layers, len(self.products), 3

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes over which a step's activations vary, but for the pipeline's."""
        return (*BATCH_AXES, *((AXIS,) if self.mesh.shape[AXIS] > 1 else ()))

    # --- state -------------------------------------------------------------------------------------------------------

    def init(self, blocks: Any) -> DelayedState | tuple[()]:
        """The state before the first step: scales of weights from their values, of gradients a safe guess, of inputs 1.

        Args:
            blocks: the float32 shards of all layers' weights, each [L, ...], or [V, L / V, ...] for V chunks per stage.
        """
        if self.delayed is None:
            return ()
        amax = jnp.zeros(self.shape, jnp.float32).at[..., 2].set(_FIRST_GRADIENT / self.positions)
        for i, path in enumerate(self.products):
            weight = functools.reduce(lambda tree, key: tree[key], (*path, "weight"), blocks)
            stacked = 1 if self.pipeline.chunks == 1 else 2
            each = jnp.max(jnp.abs(weight), axis=range(stacked, weight.ndim))
            amax = amax.at[:, i, 1].set(each.reshape(-1))
        return recipes.init(self.delayed, self.shape, amax)

    def abstract(self) -> DelayedState | tuple[()]:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        if self.delayed is None:
            return ()
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.eval_shape(functools.partial(recipes.init, self.delayed, self.shape))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)

    # --- in a step ---------------------------------------------------------------------------------------------------

    def slots(
        self, state: DelayedState | tuple[()], *, everywhere: bool = False, observe: bool = False
    ) -> Slots | None:
        """What this stage's layers are handed; None where the recipe needs nothing.

        Args:
            state: the scales.
            everywhere: for a computation that every rank repeats.
            observe: also of recipes without a state, and with slots for the shares of what the casts lose.
        """
        if self.recipe is None or (self.delayed is None and not observe):
            return None
        scale = state.scale * self._per_rank() if isinstance(state, DelayedState) else jnp.ones(self.shape)
        shares = None
        if observe and not isinstance(self.recipe, BlockScaling):
            shares = jnp.zeros((*self.shape, 2))
        own = jax.tree.map(self.pipeline.own_layers, Slots(scale, shares))
        return own if everywhere else jax.tree.map(lambda x: collectives.vary(x, self.axes), own)

    def next(self, state: Any, seen: Slots | None, finite: Array) -> Any:
        """The state after a step in which this rank's layers saw these amaxes."""
        if self.delayed is None or seen is None:
            return state
        after = recipes.update(self.delayed, state, self.amaxes(seen))
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)

    def amaxes(self, seen: Slots) -> Array:
        """Float32 [L, P, 3], of all layers and over all ranks; infinite where any was not finite."""
        own = jnp.where(jnp.isfinite(seen.scales), seen.scales, jnp.inf)  # a maximum on GPUs may drop NaN
        whole = jax.lax.pmax(self.pipeline.in_place(own), (*self.axes, *self.pipeline.axes))
        return whole * self._per_rank()

    def observed(self, state: Any, seen: Slots | None, micro_batches: int) -> dict[str, Array]:
        """What layers saw that were handed slots to `observe`, by name: float32 [L, P, 3], of all layers and ranks."""
        if seen is None:
            raise JzeroError("observe: there are no FP8 products; set model.fp8=true")
        amax = self.amaxes(seen)
        if seen.shares is None or isinstance(self.recipe, BlockScaling | None):
            return {"amax": amax}
        total = jax.lax.psum(self.pipeline.in_place(seen.shares), (*self.axes, *self.pipeline.axes))
        shares = total / (data_ranks(self.mesh) * self.mesh.shape[AXIS] * micro_batches)
        scale = state.scale if self.delayed else self.recipe.scale(amax, jnp.ones_like(amax))
        return {"amax": amax, "scale": scale, "saturated": shares[..., 0], "flushed": shares[..., 1]}

    def with_weights(self, observed: dict[str, Array], weights: Sequence[Quantised]) -> dict[str, Array]:
        """`observed`, where weights are FP8 parameters with the amaxes and scales that these have.

        Args:
            observed: as above; a product says nothing of a weight that it does not cast.
            weights: this rank's part of each product's, [V l, ...]; empty where they are none.
        """
        if not weights:
            return observed
        amax = lambda w: numerics.amax(w.value.astype(jnp.float32), tuple(range(1, w.value.ndim))) / w.scale
        own = jnp.stack([jnp.stack([amax(w), w.scale], -1) for w in weights], 1)
        axes = (*self.axes, *self.pipeline.axes)
        whole = jax.lax.pmax(self.pipeline.in_place(collectives.vary(own, axes)), axes)
        return {
            **observed,
            **{name: observed[name].at[..., 1].set(whole[..., i]) for i, name in enumerate(("amax", "scale"))},
        }

    def named(self, observed: Mapping[str, Any]) -> dict[str, float]:
        """What `observed` gives of layers in FP8, as scalars for the metrics: "fp8/amax/layer 0/qkv/input"."""
        out, wide = {}, {i for piece in self.pieces if piece.wide for i in range(piece.start, piece.stop)}
        for kind, values in observed.items():
            for (layer, product, operand), value in np.ndenumerate(np.asarray(values)):
                if layer in wide:
                    continue
                out[f"fp8/{kind}/layer {layer}/{self.products[product][-1]}/{_OPERANDS[operand]}"] = float(value)
        return out

    def nothing_seen(self, slots: Slots | None) -> Slots | None:
        """Zeros like the cotangents of these slots."""
        zero = lambda x: collectives.vary(jnp.zeros(x.shape, x.dtype), tuple(sorted(regions.varying_axes(x))))
        return jax.tree.map(zero, slots)

    def _per_rank(self) -> np.ndarray:
        """What turns amaxes of a rank into those of the mean, and scales back; powers of two: nothing rounds."""
        return np.asarray([1, 1, 2.0 ** (1 - data_ranks(self.mesh).bit_length())], np.float32)
