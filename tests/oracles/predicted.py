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
loss, number of tokens; for a BERT with pairs another before them, of the number of tokens.

Over the tensor axis, of N ranks, per layer and micro-batch, each of the activations [B, T, D] in their own type:

                        forward                           backward                        recomputed (full)
    sequence_parallel   2 all-gather, 2 reduce-scatter    the same, and 2 all-gather      1 reduce-scatter
    otherwise           2 all-reduce                      2 all-reduce                    1 all-reduce

The 2 further all-gathers are Megatron's: what was gathered is not kept. Where all is recomputed they come with it, and
the layer's last sum is not needed again. Once per micro-batch: the embedding is summed as a layer's output is, the head
begins as a layer does (and keeps what it gathered), and the losses need 3 all-reduces of [B, T]: the largest logit, the
sum of the exponentials and the label's own logit. With sequence_parallel, gradients of what is not split over tensor
are all-reduced over it, once a step, as shards. Squares of the split leaves' gradients take one scalar all-reduce.

With S pipeline stages of V chunks, l = L / (S V) layers each, the program's text has, of every tick, a forward and a
backward pass (a stage runs M V of each, in M V + S V + S - 2 ticks). So what there is per micro-batch and layer comes l
times a tick, what there is per micro-batch once a tick (with shards outside of the layers twice: head and embedding),
and all else for the L / S layers of a stage. `gather_twice` gathers every leaf twice, also those that XLA then drops,
and the last of several layers of a chunk once more in vain: the loop is one layer ahead. XLA drops the bias, as it
drops the embedding's sum that stands once more in its backward pass. Over the pipeline axis two activations are sent
per tick; gradients' shards of what is outside of the layers are all-reduced once, as are loss and norm.

FP8 products with delayed scaling add one all-reduce (a maximum) over all axes of 3 amaxes for each of a layer's 4
products. With current scaling it is one number for each operand that the tensor axis cuts, per layer and micro-batch:
the 4 weights, the inputs of 2 products and the gradients of the other 2. (Where all is recomputed, the first 6 twice.)
"""

from __future__ import annotations

import collections
import math

from oracles.stablehlo import Collective

SPLIT = (
    "/embedding/token",
    "/head/weight",
    "/head/bias",
    "qkv/weight",
    "qkv/bias",
    "out/weight",
    "up/weight",
    "up/bias",
    "down/weight",
)
"""Ends of the paths, "/" in front, of all that the tensor axis splits."""


def step_collectives(prog) -> collections.Counter[Collective]:
    """Predicted collectives of one step of a `Program`, as `oracles.stablehlo.collectives` reports them."""
    config, mesh = prog.config, prog.mesh
    zero = config.model.optim.name == "distributed_fused_adam"
    data = mesh.shape["data"] if zero else 1
    batch_axes = tuple(name for name in ("replica", "data") if mesh.shape[name] > 1)
    policy, count = config.policy, config.num_micro_batches
    sharded, stages = config.model.grad_accumulation == "sharded", mesh.shape["pipeline"]
    ticks, per_chunk = pipeline_shape(config)
    found: collections.Counter[Collective] = collections.Counter()

    def add(times, kind, axes, dtype, elements):
        if axes and math.prod(mesh.shape[a] for a in axes) > 1:
            found[Collective(kind, axes, dtype, elements * (2 if dtype == "bf16" else 4))] += times

    for path, leaf in leaves(prog.model.abstract):
        block = path[0] == "blocks"
        layers = leaf.shape[0] // stages if block else 1
        whole = math.prod(leaf.shape) // (leaf.shape[0] if block else 1)
        scatters = layers * (count if sharded else 1)
        if sharded and stages > 1:
            scatters = ticks * (per_chunk if block else 2)
        split = "".join(f"/{name}" for name in path).endswith(SPLIT)
        size = whole // (mesh.shape["tensor"] if split else 1)
        padded = math.ceil(size / data) * data
        dtype = "bf16" if leaf.dtype == "bfloat16" else "f32"
        reduced = ("data",) if zero else ()
        add(scatters, "reduce-scatter", reduced, "f32", padded)
        add(scatters, "all-reduce", ("replica",) if zero else batch_axes, "f32", padded // data)
        if config.model.sequence_parallel and not split:
            add(1, "all-reduce", ("tensor",), "f32", padded // data * layers)
        if stages > 1 and not block:
            add(1, "all-reduce", ("pipeline",), "f32", padded // data)
        if not zero:
            continue
        if policy == "replicated":
            add(1, "all-gather", reduced, dtype, padded * layers)
        else:
            unread = path[1:] == ("mlp", "down", "bias") or (
                path[1:] == ("attention", "out", "bias") and config.model.activations_checkpoint_granularity != "full"
            )
            again = 0 if unread else layers - 1
            ahead = per_chunk + (per_chunk > 1)
            twice = (layers + again) * count if stages == 1 else 2 * ahead * ticks
            times = twice if policy == "gather_twice" and block else layers
            add(times, "all-gather", reduced, dtype, padded)
    add(1, "all-reduce", batch_axes, "f32", 3)
    if prog.model.has_sample_loss:  # how many tokens are masked
        add(1, "all-reduce", batch_axes, "f32", 1)
    if config.model.fp8 and config.model.fp8_recipe == "delayed":
        every = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
        add(1, "all-reduce", every, "f32", config.model.num_layers * 4 * 3)
    return found + tensor_collectives(prog) + pipeline_collectives(prog)


def pipeline_shape(config) -> tuple[int, int]:
    """Ticks of a step, and layers of a chunk; without stages, micro-batches and layers."""
    m, count = config.model, config.num_micro_batches
    stages, chunks = m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size or 1
    return count * chunks + (stages > 1) * (stages * chunks + stages - 2), m.num_layers // (stages * chunks)


def pipeline_collectives(prog) -> collections.Counter[Collective]:
    """Activations and cotangents sent between stages, the loss, and the norm of what both axes split."""
    m, found = prog.config.model, collections.Counter()
    if m.pipeline_model_parallel_size == 1:
        return found
    ticks, _ = pipeline_shape(prog.config)
    dtype, width = ("bf16", 2) if prog.config.trainer.precision == "bf16" else ("f32", 4)
    positions = m.encoder_seq_length // (m.tensor_model_parallel_size if m.sequence_parallel else 1)
    size = m.micro_batch_size * positions * m.hidden_size * width
    found[Collective("collective-permute", ("pipeline",), dtype, size)] = 2 * ticks
    found[Collective("all-reduce", ("pipeline",), "f32", 4)] = 2
    if m.tensor_model_parallel_size > 1:
        found[Collective("all-reduce", ("pipeline", "tensor"), "f32", 4)] = 1
    return found


def tensor_collectives(prog) -> collections.Counter[Collective]:
    """Those of activations, losses and the norm over the tensor axis."""
    m, found = prog.config.model, collections.Counter()
    if m.tensor_model_parallel_size == 1:
        return found
    tokens = m.micro_batch_size * m.encoder_seq_length
    dtype = "bf16" if prog.config.trainer.precision == "bf16" else "f32"
    size = tokens * m.hidden_size * (2 if dtype == "bf16" else 4)
    count, per_chunk = pipeline_shape(prog.config)
    layers, recomputed = per_chunk * count, m.activations_checkpoint_granularity == "full"
    sums = layers * (5 if recomputed else 4) + (2 if m.pipeline_model_parallel_size == 1 else 3) * count
    if m.sequence_parallel:
        found[Collective("all-gather", ("tensor",), dtype, size)] = layers * 6 + 2 * count
        found[Collective("reduce-scatter", ("tensor",), dtype, size)] = sums
    else:
        found[Collective("all-reduce", ("tensor",), dtype, size)] = sums
    found[Collective("all-reduce", ("tensor",), "f32", 4 * tokens)] += 3 * count
    found[Collective("all-reduce", ("tensor",), "f32", 4)] += 1
    if prog.model.has_sample_loss and m.sequence_parallel:  # the first rank has [CLS]: two logits per sample
        found[Collective("all-reduce", ("tensor",), "f32", 8 * m.micro_batch_size)] += count
    if m.fp8 and m.fp8_recipe == "current":
        found[Collective("all-reduce", ("tensor",), "f32", 4)] += layers * (14 if recomputed else 8)
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
