"""Step time of `configs/gpt_tiny.yaml` against the same model in plain JAX with replicated `optax.adamw` under `jit`.

    python benchmarks/step_time.py [--devices 4] [--rounds 30] [--json FILE]

Both run in one process, a step of each in turn; the ratio is taken within a round, and medians are printed. The plain
model is timed with and without rematerialisation, and the faster one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero import make_mesh
from jzero.train.config import load_config
from jzero.train.config_check import validate
from jzero.train.schedule import schedule
from jzero.train.step import build_program

VOCABULARY = 257
CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "gpt_tiny.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    os.environ.setdefault("PJRT_NPROC", str(8 * args.devices))  # a collective holds its thread while it waits
    jax.config.update("jax_num_cpu_devices", args.devices)
    rows = measure(args.devices, args.rounds, args.overrides)
    print(f"{'step':28}{'median ms':>12}{'jzero / it':>12}")
    for name, row in rows.items():
        print(f"{name:28}{row['median_ms']:12.1f}{row['ratio']:12.3f}")
    if args.json:
        args.json.write_text(
            json.dumps({"devices": args.devices, "rounds": args.rounds, "rows": rows}, indent=2) + "\n"
        )


def measure(devices: int, rounds: int, overrides: list[str]) -> dict[str, dict[str, float]]:
    config = load_config(CONFIG, [f"trainer.devices={devices}", *_fit(devices), *overrides])
    config = validate(config, devices)
    program = build_program(config, make_mesh(**config.mesh_shape, devices=jax.devices()[:devices]), VOCABULARY)
    rng = np.random.default_rng(0)
    shape = (config.model.global_batch_size, config.model.encoder_seq_length)
    tokens = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
    batch = {"tokens": tokens, "labels": np.roll(tokens, -1, 1), "loss_mask": np.ones(shape, np.float32)}
    sides = {"jzero": _ours(program, batch)}
    sides |= {f"plain JAX{', remat' * remat}": _plain(program, config, batch, remat) for remat in (False, True)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        losses = {}
        for name, run in sides.items():
            start = time.perf_counter()
            losses[name] = run()
            if turn >= 2:  # the first rounds compile and warm up
                times[name].append(time.perf_counter() - start)
        spread = max(losses.values()) - min(losses.values())
        assert spread < 1e-4, f"the sides do not compute the same: {losses}"
    ratio = lambda name: statistics.median(a / b for a, b in zip(times["jzero"], times[name], strict=True))
    return {name: {"median_ms": 1e3 * statistics.median(t), "ratio": ratio(name)} for name, t in times.items()}


def _fit(devices: int) -> list[str]:
    return [f"model.micro_batch_size={16 // devices}"]


def _ours(program, batch):
    state, placed = [program.init()], program.place(batch)

    def run() -> float:
        state[0], metrics = program.step(state[0], placed)
        jax.block_until_ready(state[0])
        return float(metrics["loss"])

    return run


def _plain(program, config, batch, remat):
    from plain import make_step

    mesh = Mesh(program.mesh.devices.reshape(-1), ("data",))
    optim = config.model.optim
    tx = optax.chain(
        optax.clip_by_global_norm(config.trainer.gradient_clip_val),
        optax.adamw(
            schedule(config), *optim.betas, optim.eps, weight_decay=optim.weight_decay, mask=program.model.decay
        ),
    )
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(jax.jit(program.model.init)(jax.random.key(config.model.seed)), whole)
    held = [params, jax.device_put(tx.init(params), whole)]
    step = make_step(tx, remat, VOCABULARY)
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))

    def run() -> float:
        held[0], held[1], loss, _ = step(*held, placed)
        jax.block_until_ready(held)
        return float(loss)

    return run


if __name__ == "__main__":
    main()
