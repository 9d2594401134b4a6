"""Throughput, losses and memory of layouts of data, tensor and pipeline ranks, with ZeRO and without.

    python benchmarks/layouts.py [--rounds 22] [--layouts d4 d2t2 ...] [--precisions bf16 32] [--json FILE]

A configuration (`--model`, of `configs/`; made small, with `--full` in its own size) on virtual CPU devices, real text.
ZeRO on and off (`distributed_fused_adam` and `fused_adam`) take a step each in every round, in turn first; the ratio of
their speeds is taken within a round, and its median printed. Both see the same batches, so they must have the same
losses: the learning rate warms up as the configuration says, as one that makes the loss jump magnifies a last bit at
will. On the CPU times mean nothing in themselves: the ratios do, that of processor time also where the machine has
other work. Memory is counted on the arrays of the state, and read from the compiled step ("needed").

Then GPT-2 124M (`--planned`) is compiled for described A100s (`--target`) in the same layouts, and its memory read;
`--planned none` leaves it out.

A layout is written d2t2p2v2: data 2 × tensor 2 × pipeline 2 × 2 chunks per stage; s: with sequence parallelism.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jzero import make_mesh
from jzero.data import batches, build_datasets, config_tokenizer
from jzero.errors import JzeroError
from jzero.plan import plan
from jzero.train.config import Config, load_config
from jzero.train.config_check import validate
from jzero.train.layout import bytes_per_device
from jzero.train.step import Program, build_program

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
LAYOUTS = ("d4", "d2t2", "d2p2", "d8", "d4t2s", "d2p4", "d2p2v2", "d2t2p2")
KEYS = {
    "t": "tensor_model_parallel_size",
    "p": "pipeline_model_parallel_size",
    "v": "virtual_pipeline_model_parallel_size",
}
SMALL = ("hidden_size=64", "encoder_seq_length=64", "num_layers=4", "num_attention_heads=4", "micro_batch_size=2",
         "global_batch_size=32")  # fmt: skip
OPTIMIZERS = {True: "distributed_fused_adam", False: "fused_adam"}
A100, MIB, WARM, STATE_BYTES = "a100-sxm-80gb", 2**20, 2, {"bf16": 10, "32": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--precisions", nargs="*", choices=STATE_BYTES, default=list(STATE_BYTES))
    parser.add_argument("--model", default="gpt_tiny", help="a file in configs/ for the runs, made small")
    parser.add_argument("--full", action="store_true", help="the runs' model in its own size")
    parser.add_argument("--rounds", type=int, default=22, help="timed; two more compile and warm up")
    parser.add_argument("--planned", default="gpt2_124m", help="a file in configs/, or none")
    parser.add_argument("--target", default=A100, help="the GPU it is compiled for")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, for the runs")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    small = () if args.full else tuple(f"model.{key}" for key in SMALL)
    result: dict[str, Any] = {"model": args.model, "changes": [*small, *args.overrides], "rounds": args.rounds}
    result |= {"rows": [], "pairs": [], "planned": []}
    try:
        layouts = {name: parse(name) for name in args.layouts}
        count = max(devices for devices, _ in layouts.values())
        os.environ.setdefault("PJRT_NPROC", str(8 * count))  # a collective holds its thread while it waits
        jax.config.update("jax_num_cpu_devices", count)
        print(HEADER)
        for precision in args.precisions:
            for name, (devices, keys) in layouts.items():
                changes = [*small, *args.overrides, f"trainer.precision={precision}", *keys]
                rows, pair = measure(args.model, devices, changes, args.rounds)
                kind = {"layout": name, "precision": precision}
                result["rows"] += [kind | row for row in rows]
                result["pairs"].append(kind | pair)
                print(*(line(kind | row) for row in rows), judged(pair), sep="\n", flush=True)
        if args.planned != "none":
            print(f"\n{args.planned} in bf16 compiled for {args.target}, MiB of a device")
            result["planned"] = planned(args.planned, args.target, layouts)
    except JzeroError as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def parse(name: str) -> tuple[int, list[str]]:
    """A layout's devices and the keys of the configuration."""
    if not re.fullmatch(r"d\d+(t\d+)?(p\d+)?(v\d+)?s?", name):
        raise JzeroError(f"layout {name}: expected something like d2t2p2v2 or d4t2s")
    sizes = {letter: int(size) for letter, size in re.findall(r"([dtpv])(\d+)", name)}
    devices = sizes["d"] * sizes.get("t", 1) * sizes.get("p", 1)
    keys = [f"model.{key}={sizes[letter]}" for letter, key in KEYS.items() if letter in sizes]
    return devices, [*keys, *["model.sequence_parallel=true"] * name.endswith("s"), f"trainer.devices={devices}"]


# --- runs ------------------------------------------------------------------------------------------------------------


class Side:
    """One run: its program, its compiled step, its state, what it measured."""

    def __init__(self, config: Config, batch: dict[str, Any]):
        devices = jax.devices()[: config.num_devices]
        vocabulary = config_tokenizer(config).vocab_size
        sizes = config.mesh_shape
        mesh = make_mesh(sizes["data"], sizes["tensor"], sizes["pipeline"], sizes["replica"], devices=devices)
        self.program: Program = build_program(config, mesh, vocabulary)
        self.state = self.program.init()
        self.step = self.program.step.lower(self.state, self.program.place(batch)).compile()
        self.times: list[float] = []
        self.work: list[float] = []  # seconds of all cores
        self.losses: list[float] = []

    def run(self, batch: dict[str, Any]) -> None:
        placed = jax.block_until_ready(self.program.place(batch))
        start, before = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, placed)
        jax.block_until_ready(self.state)
        self.times.append(time.perf_counter() - start)
        self.work.append(time.process_time() - before)
        self.losses.append(float(metrics["loss"]))

    def evaluate(self, held_out: list[dict[str, Any]]) -> float:
        """Mean loss per token."""
        total = count = 0.0
        for batch in held_out:
            losses, tokens = self.program.evaluate(self.state.params, self.program.place(batch), self.state.fp8)
            total, count = total + float(losses), count + float(tokens)
        return total / count

    def row(self, zero: bool, held_out: list[dict[str, Any]]) -> dict[str, Any]:
        memory = self.step.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        mesh = {axis: size for axis, size in self.program.mesh.shape.items() if axis != "replica"}
        return mesh | {
            "zero": zero,
            "steps_per_s": 1 / statistics.median(self.times[WARM:]),
            "train_loss": self.losses[-1],
            "train_losses": self.losses,
            "val_loss": self.evaluate(held_out),
            "parameters_mib": bytes_per_device(self.state.params) / MIB,
            "state_mib": bytes_per_device(self.state.opt) / MIB,
            "needed_mib": (needed + memory.temp_size_in_bytes) / MIB,
        }


def measure(model: str, devices: int, changes: list[str], rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows with ZeRO off and on, and what they are to one another."""
    configs = {
        zero: validate(load_config(CONFIGS / f"{model}.yaml", [*changes, f"model.optim.name={name}"]), devices)
        for zero, name in OPTIMIZERS.items()
    }
    config = configs[True]
    data = build_datasets(config, config_tokenizer(config))
    if data["train"] is None or data["validation"] is None:
        raise JzeroError("model.data: expected documents for training and validation, found none; see splits_string")
    train = batches(data["train"], batch_size=config.model.global_batch_size)
    held_out = take(data["validation"], config.model.global_batch_size, 4)
    try:
        first = next(train)
        sides = {zero: Side(config, first) for zero, config in configs.items()}
        for turn in range(rounds + WARM):
            batch = first if turn == 0 else next(train)
            for zero in (True, False) if turn % 2 else (False, True):
                sides[zero].run(batch)
    finally:
        train.close()
    rows = {zero: sides[zero].row(zero, held_out) for zero in (False, True)}
    return list(rows.values()), compare(sides[True], sides[False], rows)


def take(dataset: Any, size: int, count: int) -> list[dict[str, Any]]:
    stream = batches(dataset, batch_size=size)
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def compare(on: Side, off: Side, rows: dict[bool, dict[str, Any]]) -> dict[str, Any]:
    ratios, worked = (
        [b / a for a, b in zip(mine[WARM:], other[WARM:], strict=True)]
        for mine, other in ((on.times, off.times), (on.work, off.work))
    )
    losses = [*zip(on.losses, off.losses, strict=True), tuple(rows[zero]["val_loss"] for zero in (True, False))]
    expected = expected_saving(on.program)
    return {
        "speed_on_of_off": statistics.median(ratios),
        "processor_on_of_off": statistics.median(worked),
        "speed_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [ratios[0]] * 2,
        "largest_loss_difference": max(abs(a - b) / b for a, b in losses),
        "saved_mib": rows[False]["state_mib"] - rows[True]["state_mib"],
        "expected_mib": expected / MIB,
    }


def expected_saving(program: Program) -> float:
    """P × bytes of state × (1 - 1/d), P the parameters that a device has."""
    leaves = program.layout.plan.leaves
    width = STATE_BYTES["bf16" if program.config.param_dtype == jnp.bfloat16 else "32"]
    return sum(math.prod(leaf.local_shape) for leaf in leaves) * width * (1 - 1 / program.mesh.shape["data"])


HEADER = (
    f"{'precision':11}{'layout':9}{'ZeRO':6}{'data':>5}{'tensor':>7}{'pipeline':>9}{'throughput':>13}{'train loss':>12}"
    f"{'val loss':>10}{'parameters':>12}{'state':>8}{'needed':>8} MiB"
)


def line(row: dict[str, Any]) -> str:
    sizes = f"{row['data']:5}{row['tensor']:7}{row['pipeline']:9}"
    numbers = f"{row['steps_per_s']:9.2f}it/s{row['train_loss']:12.4f}{row['val_loss']:10.4f}"
    memory = f"{row['parameters_mib']:12.3f}{row['state_mib']:8.3f}{row['needed_mib']:8.2f}"
    return f"{row['precision']:11}{row['layout']:9}{'Yes' if row['zero'] else 'No':6}{sizes}{numbers}{memory}"


def judged(pair: dict[str, Any]) -> str:
    low, high = pair["speed_quartiles"]
    return (
        f"{'':20}speed on / off {pair['speed_on_of_off']:.3f} ({low:.3f} to {high:.3f}), by processor time "
        f"{pair['processor_on_of_off']:.3f}, losses differ by up to {pair['largest_loss_difference']:.1e}, "
        f"state saved {pair['saved_mib']:.3f} of {pair['expected_mib']:.3f} MiB"
    )


# --- plans -----------------------------------------------------------------------------------------------------------


def planned(name: str, target: str, layouts: dict[str, tuple[int, list[str]]]) -> list[dict[str, Any]]:
    """Memory that the step of a configuration has on described GPUs, without ZeRO and with it."""
    print(
        f"{'layout':9}{'ZeRO':6}{'parameters':>12}{'state':>9}{'temporaries':>13}{'peak':>9}{'saved':>9}{'expected':>10}"
    )
    rows = []
    for layout, (devices, keys) in layouts.items():
        off = None
        for zero in (False, True):
            changes = [*keys, f"model.optim.name={OPTIMIZERS[zero]}", "model.optim.overlap_param_sync=false"]
            changes += ["model.attention_implementation=xla", "trainer.precision=bf16"]
            config = validate(load_config(CONFIGS / f"{name}.yaml", changes), devices)
            memory = plan(config, target, devices).memory
            row = {"layout": layout, "zero": zero, "parameters": memory.parameters, "state": memory.optimizer}
            row |= {"temporaries": memory.temporaries, "peak": memory.peak}
            sizes = [row[key] / MIB for key in ("parameters", "state", "temporaries", "peak")]
            saved = ""
            if off:
                row["saved"], data = off - memory.optimizer, config.data_parallel_size
                row["expected"] = int(memory.parameters / config.param_dtype.itemsize * 10 * (1 - 1 / data))
                saved = f"{row['saved'] / MIB:9.1f}{row['expected'] / MIB:10.1f}"
            off = memory.optimizer
            rows.append(row)
            numbers = "{:12.1f}{:9.1f}{:13.1f}{:9.1f}".format(*sizes)
            print(f"{layout:9}{'Yes' if zero else 'No':6}{numbers}{saved}", flush=True)
    return rows


if __name__ == "__main__":
    main()
