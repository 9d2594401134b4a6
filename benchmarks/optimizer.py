"""Time of the optimizer's update against `optax.adamw`, on GPT-2's parameter shapes.

    python benchmarks/optimizer.py [--devices 1] [--width 384] [--rounds 20] [--json FILE]

On one device: jitted and donated on both sides, results in the order of the donated arguments (or XLA copies); warm
(repeated) and cold (the first update after another program has swept the caches); against a hand-fused loop in C where
there is a compiler, and `torch.optim.AdamW(fused=True)` where torch is installed. On several virtual CPU devices: the
update phase alone against the replicated update, and scatter + update + gather against all-reduce + replicated update.
Every round runs each side once, in alternating order; ratios are taken within a round, medians are printed. Before
that, all sides are checked to compute the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

import c_loop
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jzero

OPTIONS = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def shapes(width: int, layers: int = 12, vocabulary: int = 50304) -> dict[str, tuple[int, ...]]:
    """GPT-2's parameters with another width, layers stacked."""
    up = 4 * width
    return {
        "token": (vocabulary, width), "position": (1024, width), "qkv": (layers, width, 3 * width),
        "qkv_bias": (layers, 3 * width), "out": (layers, width, width), "out_bias": (layers, width),
        "up": (layers, width, up), "up_bias": (layers, up), "down": (layers, up, width), "down_bias": (layers, width),
        "norm1": (layers, width), "norm2": (layers, width), "final_norm": (width,),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    os.environ.setdefault("PJRT_NPROC", str(8 * args.devices))  # a collective holds its thread while it waits
    jax.config.update("jax_num_cpu_devices", args.devices)
    tree = shapes(args.width)
    count = sum(int(jnp.prod(jnp.array(s))) for s in tree.values())
    rows, notes = one_device(tree, args.rounds) if args.devices == 1 else (many(tree, args.devices, args.rounds), [])
    print(f"{count / 1e6:.1f}M parameters, {args.devices} device(s), {args.rounds} rounds")
    for name, ratio in rows.items():
        print(f"{name:60}{ratio:8.3f}")
    print(*notes, sep="\n")
    if args.json:
        result = {"devices": args.devices, "parameters": count, "rounds": args.rounds, "rows": rows, "notes": notes}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def one_device(tree: dict, rounds: int) -> tuple[dict[str, float], list[str]]:
    """Ratios to `optax.adamw`, warm and cold, and what the other sides are."""
    check()
    sides = {"optax.adamw": _optax(tree), "jzero": _jzero(tree, 1)}
    adamw, note = c_loop.load()
    if adamw is not None:
        sides["C loop"] = c_loop.Loop(adamw, _values(tree, 0), _values(tree, 1), OPTIONS).step
    torch = _torch(_values(tree, 0), _values(tree, 1))
    sides |= {"torch fused": torch[0]} if torch else {}
    notes = [note, torch[2] if torch else "no torch.optim.AdamW: torch is not installed"]
    out = {}
    for state, before in (("warm", lambda: None), ("cold", _sweep())):
        times = _alternate(sides, rounds, before)
        out |= {f"{name} / optax.adamw, {state}": _ratio(times[name], times["optax.adamw"])
                for name in sides if name != "optax.adamw"}  # fmt: skip
    return out, notes


def check(steps: int = 3) -> None:
    """Raise unless the sides agree with optax on small parameters."""
    tree = {"w": (17, 5), "b": (7,)}
    expected, grads = _values(tree, 0), _values(tree, 1)
    tx = optax.adamw(**OPTIONS)
    state = tx.init(expected)
    ours, adam = _values(tree, 0), jzero.distributed_fused_adam(**OPTIONS, mesh=jzero.make_mesh(data=1))
    kept = adam.init(ours)
    for _ in range(steps):
        updates, state = tx.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
        ours, kept = adam.step(grads, kept, ours)
    found = [ours]
    adamw, _ = c_loop.load()
    if adamw is not None:
        loop = c_loop.Loop(adamw, _values(tree, 0), grads, OPTIONS)
        found.append(loop.params)
        _times(loop.step, steps)
    torch = _torch(_values(tree, 0), grads)
    if torch:
        _times(torch[0], steps)
        found.append(torch[1]())
    for side in found:
        for name, x in expected.items():
            np.testing.assert_allclose(np.asarray(side[name]), np.asarray(x), rtol=1e-5, atol=1e-7, err_msg=name)


def _times(f, count: int) -> None:
    for _ in range(count):
        f()


def many(tree: dict, devices: int, rounds: int) -> dict[str, float]:
    mesh = jzero.make_mesh(data=devices)
    sides = {
        "replicated update": _replicated(tree, mesh, reduce=False),
        "sharded update": _phases(tree, mesh, whole=False),
        "all-reduce + replicated update": _replicated(tree, mesh, reduce=True),
        "scatter + update + gather": _phases(tree, mesh, whole=True),
    }
    times = _alternate(sides, rounds, lambda: None)
    pairs = [("sharded update", "replicated update"), ("scatter + update + gather", "all-reduce + replicated update")]
    return {f"{a} / {b}": _ratio(times[a], times[b]) for a, b in pairs}


def _alternate(sides: dict, rounds: int, before) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for name in order:
            before()
            start = time.perf_counter()
            sides[name]()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _values(tree: dict, key: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(key), len(tree))
    return {name: 0.02 * jax.random.normal(k, s) for k, (name, s) in zip(keys, tree.items(), strict=True)}


def _loop(step, params, state, grads):
    held = [params, state]

    def run():
        held[0], held[1] = step(held[0], held[1], grads)
        jax.block_until_ready(held)

    return run


def _optax(tree: dict):
    tx = optax.adamw(**OPTIONS)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = _values(tree, 0)
    return _loop(jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params), _values(tree, 1))


def _jzero(tree: dict, devices: int):
    tx = jzero.distributed_fused_adam(**OPTIONS, mesh=jzero.make_mesh(data=devices))
    params = _values(tree, 0)
    step = lambda params, state, grads: tx.step(grads, state, params)
    return _loop(jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params), _values(tree, 1))


def _replicated(tree: dict, mesh, *, reduce: bool):
    tx = optax.adamw(**OPTIONS)
    whole, split = PartitionSpec(), PartitionSpec("data")

    def step(params, state, grads):
        if reduce:  # one gradient per rank
            grads = jax.tree.map(lambda g: jax.lax.pmean(g[0], "data"), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = (whole, whole, split if reduce else whole)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=whole)
    params = jax.device_put(_values(tree, 0), NamedSharding(mesh, whole))
    state = jax.device_put(tx.init(params), NamedSharding(mesh, whole))
    return _loop(jax.jit(mapped, donate_argnums=(0, 1)), params, state, _gradients(tree, mesh, per_rank=reduce))


def _phases(tree: dict, mesh, *, whole: bool):
    """All three phases on local gradients, or the update alone on shards."""
    tx = jzero.distributed_fused_adam(**OPTIONS, mesh=mesh)
    params = jax.device_put(_values(tree, 0), NamedSharding(mesh, PartitionSpec()))
    state, specs, plan = tx.init(params), tx.state_specs(params), tx.plan(params)

    if whole:

        def step(params, state, grads):
            return tx.step(jax.tree.map(lambda g: g[0], grads), state, params)

        grads, grad_specs, param_specs = _gradients(tree, mesh, per_rank=True), PartitionSpec("data"), PartitionSpec()
    else:

        def step(params, state, grads):
            new, state, _ = tx.update_shards(jax.tree.leaves(grads), state, jax.tree.leaves(params))
            return plan.unflatten(new), state

        param_specs = plan.unflatten([leaf.shard_spec for leaf in plan.leaves])
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        grads, grad_specs = jax.tree.map(place, _values(tree, 1), param_specs), param_specs
        params = jax.tree.map(place, params, param_specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(param_specs, specs, grad_specs), out_specs=(param_specs, specs))
    return _loop(jax.jit(mapped, donate_argnums=(0, 1)), params, state, grads)


def _gradients(tree: dict, mesh, *, per_rank: bool):
    grads = _values(tree, 1)
    if not per_rank:
        return jax.device_put(grads, NamedSharding(mesh, PartitionSpec()))
    stack = jax.jit(
        lambda g: jax.tree.map(lambda x: jnp.broadcast_to(x, (mesh.shape["data"], *x.shape)), g),
        out_shardings=NamedSharding(mesh, PartitionSpec("data")),
    )
    return stack(grads)


def _sweep():
    """Another program that reads and writes more than the caches hold."""
    held = [jnp.ones(64 * 2**20 // 4)]
    step = jax.jit(lambda x: x * 1.0001, donate_argnums=0)

    def run():
        held[0] = jax.block_until_ready(step(held[0]))

    return run


def _torch(values: dict, grads: dict):
    """The step, a function that reads the parameters, and a note; None where torch is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]  optional
    except ImportError:
        return None
    params = {name: torch.nn.Parameter(torch.from_numpy(np.array(x))) for name, x in values.items()}
    for name, p in params.items():
        p.grad = torch.from_numpy(np.array(grads[name]))
    o = OPTIONS
    tx = torch.optim.AdamW(
        params.values(), o["learning_rate"], (o["b1"], o["b2"]), o["eps"], o["weight_decay"], fused=True
    )
    note = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    return tx.step, lambda: {name: p.detach().numpy() for name, p in params.items()}, note


if __name__ == "__main__":
    main()
