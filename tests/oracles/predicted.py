"""The collectives that a step must consist of, from the model's shapes and the policy alone.

Per leaf of n elements on a rank (padded to a multiple of the data axis) and M micro-batches:

                       reduce-scatter            all-gather
    replicated         1 (M into shards)         1, after the update, the layers in one piece
    gather_on_forward  1 (M into shards)         1
    gather_twice       1 (M into shards)         layers 2 M, the last layer M, the rest 1

A layer's leaf counts once per layer. The last layer's backward pass follows its forward pass: its weights are gathered
once; the bias that a layer adds last is not needed in its backward pass at all, nor is that of the attention's output,
whose sum is kept (unless all is recomputed). With replicas
each reduce-scatter is followed by an all-reduce of the shard. On top there is one all-reduce of three scalars: norm,
loss, number of tokens.

Over the tensor axis, of N ranks, per layer and micro-batch, each of the activations [B, T, D] in their own type:

                        forward                           backward                        recomputed (full)
    sequence_parallel   2 all-gather, 2 reduce-scatter    the same, and 2 all-gather      1 reduce-scatter
    otherwise           2 all-reduce                      2 all-reduce                    1 all-reduce

The 2 further all-gathers are Megatron's: what was gathered is not kept. Where all is recomputed they come with it, and
the layer's last sum is not needed again. Once per micro-batch: the embedding is summed as a layer's output is, the head
begins as a layer does (and keeps what it gathered), and the losses need 3 all-reduces of [B, T]: the largest logit, the
sum of the exponentials and the label's own logit. With sequence_parallel, gradients of what is not split over tensor
are all-reduced over it, once a step, as shards. Squares of the split leaves' gradients take one scalar all-reduce.
"""

from __future__ import annotations

import collections
import math

from oracles.stablehlo import Collective

SPLIT = (
    "embedding/token",
    "head/weight",
    "qkv/weight",
    "qkv/bias",
    "out/weight",
    "up/weight",
    "up/bias",
    "down/weight",
)
"""Ends of the paths of all that the tensor axis splits."""


def step_collectives(prog) -> collections.Counter[Collective]:
    """Predicted collectives of one step of a `Program`, as `oracles.stablehlo.collectives` reports them."""
    config, mesh = prog.config, prog.mesh
    zero = config.model.optim.name == "distributed_fused_adam"
    data = mesh.shape["data"] if zero else 1
    batch_axes = tuple(name for name in ("replica", "data") if mesh.shape[name] > 1)
    policy, count = config.policy, config.num_micro_batches
    scatters = count if config.model.grad_accumulation == "sharded" else 1
    found: collections.Counter[Collective] = collections.Counter()

    def add(times, kind, axes, dtype, elements):
        if axes and math.prod(mesh.shape[a] for a in axes) > 1:
            found[Collective(kind, axes, dtype, elements * (2 if dtype == "bf16" else 4))] += times

    for path, leaf in leaves(prog.model.abstract):
        layers = leaf.shape[0] if path[0] == "blocks" else 1
        split = "/".join(path).endswith(SPLIT)
        size = math.prod(leaf.shape) // layers // (mesh.shape["tensor"] if split else 1)
        padded = math.ceil(size / data) * data
        dtype = "bf16" if leaf.dtype == "bfloat16" else "f32"
        reduced = ("data",) if zero else ()
        add(layers * scatters, "reduce-scatter", reduced, "f32", padded)
        add(layers * scatters, "all-reduce", ("replica",) if zero else batch_axes, "f32", padded // data)
        if config.model.sequence_parallel and not split:
            add(1, "all-reduce", ("tensor",), "f32", padded // data * layers)
        if not zero:
            continue
        if policy == "replicated":
            add(1, "all-gather", reduced, dtype, padded * layers)
        else:
            unread = path[1:] == ("mlp", "down", "bias") or (
                path[1:] == ("attention", "out", "bias") and config.model.activations_checkpoint_granularity != "full"
            )
            again = 0 if unread else layers - 1
            twice = policy == "gather_twice" and path[0] == "blocks"
            add((layers + again) * count if twice else layers, "all-gather", reduced, dtype, padded)
    add(1, "all-reduce", batch_axes, "f32", 3)
    found += tensor_collectives(prog)
    return found


def tensor_collectives(prog) -> collections.Counter[Collective]:
    """Those of activations, losses and the norm over the tensor axis."""
    m, count, found = prog.config.model, prog.config.num_micro_batches, collections.Counter()
    if m.tensor_model_parallel_size == 1:
        return found
    tokens = m.micro_batch_size * m.encoder_seq_length
    dtype = "bf16" if prog.config.trainer.precision == "bf16" else "f32"
    size = tokens * m.hidden_size * (2 if dtype == "bf16" else 4)
    layers, recomputed = m.num_layers * count, m.activations_checkpoint_granularity == "full"
    sums = layers * (5 if recomputed else 4) + 2 * count
    if m.sequence_parallel:
        found[Collective("all-gather", ("tensor",), dtype, size)] = layers * 6 + 2 * count
        found[Collective("reduce-scatter", ("tensor",), dtype, size)] = sums
    else:
        found[Collective("all-reduce", ("tensor",), dtype, size)] = sums
    found[Collective("all-reduce", ("tensor",), "f32", 4 * tokens)] += 3 * count
    found[Collective("all-reduce", ("tensor",), "f32", 4)] += 1
    return found


def found_again(prog) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    """Bytes by kind and axes that XLA spares: the last layer's backward pass follows its forward pass outside of the
    loops, so it sees that what is gathered again was gathered before."""
    m, count = prog.config.model, prog.config.num_micro_batches
    width = 2 if prog.config.trainer.precision == "bf16" else 4
    size = m.micro_batch_size * m.encoder_seq_length * m.hidden_size * width
    spared = 2 * size * count if m.sequence_parallel else 0
    return collections.Counter({("all-gather", ("tensor",)): spared})


def by_axes(found) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    """Bytes by kind and axes."""
    out: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for item, times in found.items():
        out[item.kind, item.axes] += times * item.bytes
    return out


def leaves(tree, path=()):
    """(path, leaf) of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def totals(found) -> collections.Counter[str]:
    """Bytes per kind of collective."""
    out: collections.Counter[str] = collections.Counter()
    for item, times in found.items():
        out[item.kind] += times * item.bytes
    return out
