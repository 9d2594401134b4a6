"""The collectives that a step must consist of, from the model's shapes and the policy alone.

Per leaf of n elements on a rank (padded to a multiple of the data axis) and M micro-batches:

                       reduce-scatter            all-gather
    replicated         1 (M into shards)         1, after the update, the layers in one piece
    gather_on_forward  1 (M into shards)         1
    gather_twice       1 (M into shards)         layers 2 M, the last layer M, the rest 1

A layer's leaf counts once per layer. The last layer's backward pass follows its forward pass: its weights are gathered
once; the bias that a layer adds last is not needed in its backward pass at all. With replicas each reduce-scatter is
followed by an all-reduce of the shard. On top there is one all-reduce of three scalars: norm, loss, number of tokens.
"""

from __future__ import annotations

import collections
import math

from oracles.stablehlo import Collective


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
        size = math.prod(leaf.shape) // layers
        padded = math.ceil(size / data) * data
        dtype = "bf16" if leaf.dtype == "bfloat16" else "f32"
        reduced = ("data",) if zero else ()
        add(layers * scatters, "reduce-scatter", reduced, "f32", padded)
        add(layers * scatters, "all-reduce", ("replica",) if zero else batch_axes, "f32", padded // data)
        if not zero:
            continue
        if policy == "replicated":
            add(1, "all-gather", reduced, dtype, padded * layers)
        else:
            again = 0 if path[1:] == ("mlp", "down", "bias") else layers - 1
            twice = policy == "gather_twice" and path[0] == "blocks"
            add((layers + again) * count if twice else layers, "all-gather", reduced, dtype, padded)
    add(1, "all-reduce", batch_axes, "f32", 3)
    return found


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
