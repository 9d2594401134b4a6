"""Tensor and sequence parallelism: every collective over the mesh axis "tensor", and nothing else.

Each rank holds a part of every matrix (Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053): some query
groups with their heads, some feed-forward channels, some rows of the vocabulary. What lies between the matrices is
whole on every rank, or, with sequence parallelism (Korthikanti et al., https://arxiv.org/abs/2205.05198), split by
positions:

                                     whole                                 split by positions
    enter   before qkv, up, head     - ; backward: all-reduce              all-gather ; backward: reduce-scatter
    leave   after out, down, lookup  all-reduce ; backward: -              reduce-scatter ; backward: all-gather

No weight ever crosses this axis. The activation that `enter` gathers is not kept: the backward pass gathers it again,
since `jax.checkpoint` around a layer recomputes whatever is no matrix product. Parameters that the axis does not split
(norms, biases added after `leave`, positions) see only a part of the positions then, so each rank's gradient of them is
a part of the sum: `complete` adds the parts, once a step.

Autodiff tracks over which axes a value varies (`jax.shard_map(..., check_vma=True)`), and needs it.

Letters: B batch, T sequence, D model, V vocabulary, N tensor ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import JzeroError
from jzero.optim import regions

AXIS = "tensor"
SPLIT = frozenset({"vocab", "groups", "heads", "ffn"})
"""Logical dimensions of parameters that the axis splits."""
_NEVER = -1e30  # a logit whose exponential is 0


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a model is spread over the tensor axis; it takes this where it would communicate.

    With one rank every method is the identity and asks for no mesh, so the same model runs outside of `jax.shard_map`.

    Args:
        size: N, the size of the mesh axis "tensor".
        sequence: split activations between the matrices by positions.

    Example:
        >>> TensorParallel().enter(jnp.ones((2, 8, 4))).shape
        (2, 8, 4)
        >>> TensorParallel(4).spec(("layers", "embed", "ffn")) == PartitionSpec(None, None, "tensor")
        True
    """

    size: int = 1
    sequence: bool = False

    # --- parameters --------------------------------------------------------------------------------------------------

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """How a parameter with these logical dimensions lies on the mesh."""
        names = [AXIS if self.size > 1 and name in SPLIT else None for name in axes]
        return PartitionSpec(*names) if any(names) else PartitionSpec()

    def partial(self, axes: Sequence[str]) -> bool:
        """Whether the gradient of a parameter split over these mesh axes is a part of the sum on each rank."""
        return self.size > 1 and self.sequence and AXIS not in axes

    def complete(self, parts: Sequence[Array]) -> list[Array]:
        """Gradients of parameters that are `partial`, or shards of them -> the sums, the same on every tensor rank."""
        return list(jax.lax.psum(tuple(parts), AXIS)) if parts else []

    # --- activations -------------------------------------------------------------------------------------------------

    def enter(self, x: Array) -> Array:
        """Into a product whose outputs are split: [B, T or T/N, D] -> [B, T, D], to be used by this rank's part."""
        if self.size == 1:
            return x
        self._check_tracking()
        if self.sequence:
            return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)
        return jax.lax.pcast(x, AXIS, to="varying")

    def leave(self, y: Array) -> Array:
        """Out of a product whose inputs are split: this rank's summand [B, T, D] -> the sum [B, T or T/N, D]."""
        if self.size == 1:
            return y
        if self.sequence:
            self._check_length(y.shape[1])
            return jax.lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)
        return jax.lax.psum(y, AXIS)

    def own_positions(self, x: Array, dimension: int = 0) -> Array:
        """The positions of a whole sequence that this rank computes between the matrices."""
        if self.size == 1 or not self.sequence:
            return x
        self._check_length(x.shape[dimension])
        count = x.shape[dimension] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.first(count), count, dimension)

    def from_first_position(self, value: Array) -> Array:
        """What was computed from the first of this rank's positions -> what the sequence's first position gives."""
        if self.size == 1 or not self.sequence:
            return value
        return jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == 0, value, 0), AXIS)

    def first_position(self, count: int) -> Array | int:
        """Where the `count` positions begin that this rank computes between the matrices."""
        return self.first(count) if self.sequence else 0

    def first(self, count: int) -> Array | int:
        """Number of this rank's first part, of `count` on every rank: of heads, rows of the vocabulary, …"""
        return 0 if self.size == 1 else jax.lax.axis_index(AXIS) * count

    # --- vocabulary --------------------------------------------------------------------------------------------------

    def lookup(self, table: Array, ids: Array, wire: Any = None) -> Array:
        """Rows of a table whose rows are split: table [V/N, D], ids int [B, T] -> [B, T or T/N, D].

        Args:
            table: this rank's rows.
            ids: numbers of rows of the whole table.
            wire: type in which the rows cross the axis; None: the table's.
        """
        if self.size == 1:
            return table[ids]
        local = ids - self.first(table.shape[0])
        here = (local >= 0) & (local < table.shape[0])
        rows = table.at[jnp.where(here, local, table.shape[0])].get(mode="fill", fill_value=0)  # dropped in backward
        return self.leave(rows.astype(wire or table.dtype)).astype(table.dtype)

    def cross_entropy(self, logits: Array, labels: Array, padding: int = 0) -> Array:
        """-log softmax(logits)[label] of each token, with the vocabulary split and the logits never gathered.

        The backward pass needs the logits and makes their cotangent in one pass, softmax - one-hot, without a scatter
        and without communication.

        Args:
            logits: float32 [B, T, V/N].
            labels: int [B, T], of the whole vocabulary.
            padding: how many of the vocabulary's last entries are no tokens: their probability is 0.

        Returns:
            Float32 [B, T].
        """
        return _cross_entropy(self, padding, logits, labels)

    def whole_vocabulary(self, logits: Array) -> Array:
        """Logits [B, T, V/N] -> [B, T, V], for drawing tokens."""
        if self.size == 1:
            return logits
        return jax.lax.all_gather(logits, AXIS, axis=2, tiled=True, to="invarying")

    def likeliest(self, logits: Array, padding: int = 0) -> Array:
        """The token of the largest of the logits [B, T, V/N], int32 [B, T]; of equal ones the first, never padding."""
        logits = _without_padding(self, padding, logits)
        own = jnp.argmax(logits, -1).astype(jnp.int32)
        if self.size == 1:
            return own
        largest = logits.max(-1)
        first = self.first(logits.shape[-1])
        candidate = jnp.where(largest == jax.lax.pmax(largest, AXIS), own + first, jnp.iinfo(jnp.int32).max)
        return jax.lax.pmin(candidate, AXIS)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_length(self, length: int) -> None:
        if length % self.size:
            raise JzeroError(
                f"sequence of {length} tokens: expected a multiple of model.tensor_model_parallel_size {self.size} "
                "with model.sequence_parallel; pad it, or switch sequence_parallel off"
            )

    def _check_tracking(self) -> None:
        if not regions.tracks_varying(AXIS):
            raise ValueError("tensor parallelism: expected jax.shard_map with check_vma=True, found False")


def tensor_parallel(mesh: Mesh, *, sequence: bool = False) -> TensorParallel:
    """How a model is spread over the tensor axis of a mesh.

    Example:
        >>> from jzero import make_mesh
        >>> tensor_parallel(make_mesh(data=-1))
        TensorParallel(size=1, sequence=False)
    """
    return TensorParallel(mesh.shape[AXIS], sequence)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(tensor: TensorParallel, padding: int, logits: Array, labels: Array) -> Array:
    return _cross_entropy_forward(tensor, padding, logits, labels)[0]


def _without_padding(tensor: TensorParallel, padding: int, logits: Array) -> Array:
    """Logits with those of padding so low that their exponential is 0; made again in the backward pass, not kept."""
    if not padding:
        return logits
    count = logits.shape[-1]
    return jnp.where(jnp.arange(count) + tensor.first(count) < tensor.size * count - padding, logits, _NEVER)


def _cross_entropy_forward(tensor: TensorParallel, padding: int, logits: Array, labels: Array):
    raw, logits = logits, _without_padding(tensor, padding, logits)
    largest = logits.max(-1)
    if tensor.size > 1:
        largest = jax.lax.pmax(largest, AXIS)
    total = jnp.exp(logits - largest[..., None]).sum(-1)
    local = labels - tensor.first(logits.shape[-1])
    own = jnp.take_along_axis(raw, jnp.clip(local, 0, logits.shape[-1] - 1)[..., None], -1)[..., 0]
    if tensor.size > 1:
        own = jnp.where((local >= 0) & (local < logits.shape[-1]), own, 0)
        total, own = jax.lax.psum((total, own), AXIS)
    log_total = jnp.log(total) + largest
    return log_total - own, (raw, local, log_total)


def _cross_entropy_backward(tensor: TensorParallel, padding: int, saved: tuple[Array, Array, Array], cotangent: Array):
    logits, local, log_total = saved
    own = jnp.arange(logits.shape[-1]) == local[..., None]
    softmax = jnp.exp(_without_padding(tensor, padding, logits) - log_total[..., None])
    return (softmax - own) * cotangent[..., None], None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
