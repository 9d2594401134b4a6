"""What plans say of GPT-3 on described H100s, and what they cost to compile.

    python benchmarks/plan.py overlap [--micro-batches 1 4] [--json FILE]   1.3B on 8 GPUs: what is exposed, per policy
    python benchmarks/plan.py compile [--rounds 3] [--json FILE]            24 against 96 layers; 175B on 1,024 GPUs

`overlap` counts bytes of the layers' weights and gradients as hidden by the share of their collective's time in which
something is computed; a collective that also carries the embedding counts with the layers' part of its bytes. `compile`
plans in fresh processes, 24 and 96 layers in turn; ratios are taken within a round, and medians are printed. On a busy
machine the seconds of CPU (of the whole command) mean more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from jzero import make_mesh
from jzero.plan import Report, devices, plan
from jzero.train.config import load_config
from jzero.train.step import build_program

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
H100, POLICIES = "h100-sxm-80gb", ("replicated", "gather_on_forward", "gather_twice")
XLA = "model.attention_implementation=xla"  # the same numbers with and without cuDNN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overlap", "compile"))
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 4], help="per step and device")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, on top")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.what == "overlap":
        rows = overlap(args.micro_batches, args.policies, args.overrides)
    else:
        rows = compiling(args.rounds, args.overrides)
    if args.json:
        args.json.write_text(json.dumps({"target": H100, "what": args.what, "rows": rows}, indent=2) + "\n")


# --- overlap ---------------------------------------------------------------------------------------------------------


def overlap(micro_batches: list[int], policies: Sequence[str], overrides: list[str]) -> list[dict[str, Any]]:
    print(f"{'policy':18}{'micro-batches':>14}{'sum':>9}{'step ms':>10}{'exposed ms':>12}{'%':>7}", end="")
    print(f"{'scatter':>9}{'gather':>9}")
    rows = []
    for count in micro_batches:
        for accumulation in ("local", "sharded") if count > 1 else ("local",):
            for policy in policies:
                keys = [
                    XLA, "model.micro_batch_size=8", f"model.global_batch_size={64 * count}",
                    f"model.optim.policy={policy}", f"model.optim.overlap_param_sync={policy != 'replicated'}",
                    f"model.grad_accumulation={accumulation}", *overrides,
                ]  # fmt: skip
                rows.append({"policy": policy, "micro_batches": count, "accumulation": accumulation} | numbers(keys))
                r = rows[-1]
                print(
                    f"{policy:18}{count:14}{accumulation:>9}{r['step_ms']:10.1f}{r['exposed_ms']:12.2f}"
                    f"{100 * r['exposed_ms'] / r['step_ms']:7.2f}{percent(r['layers']['reduce-scatter'])}"
                    f"{percent(r['layers']['all-gather'])}",
                    flush=True,
                )
    return rows


def percent(share: float) -> str:
    return f"{100 * share:8.1f}%"


def numbers(keys: list[str]) -> dict[str, Any]:
    config = load_config(CONFIGS / "gpt3_1.3b.yaml", keys)
    report = plan(config, H100)
    program = build_program(config, make_mesh(**config.mesh_shape, devices=devices(H100, config.num_devices)))
    outer = {
        s for leaf in program.layout.outer.leaves if len(leaf.shape) > 1 for s in (leaf.shape, leaf.shard_local_shape)
    }
    large = [u for u in report.collectives if not u.asynchronous and u.bytes / u.count > 2**20]
    return {
        "step_ms": report.step_ms,
        "exposed_ms": report.exposed_ms,
        "copies_ms": report.copies_ms,
        "temporaries": report.memory.temporaries,
        "synchronous_over_1_MiB": len(large),
        "layers": {kind: hidden(report, kind, outer) for kind in ("reduce-scatter", "all-gather")},
    }


def hidden(report: Report, kind: str, outer: set[tuple[int, ...]]) -> float:
    """Share of the layers' bytes of this kind that are hidden."""
    total = covered = 0.0
    for call in report.timeline.calls:
        if call.collective.kind != kind or not call.collective.axis:
            continue
        computation = report.module.computations[call.site[0]]
        sent = [a for o in computation.operands(computation.by_name[call.site[1]]) for a in o.arrays]
        size = call.count * sum(a.bytes for a in sent if a.dims not in outer)
        total, covered = total + size, covered + size * call.hidden
    return covered / total if total else 1.0


# --- compile ---------------------------------------------------------------------------------------------------------


def compiling(rounds: int, overrides: list[str]) -> list[dict[str, Any]]:
    found: dict[int, list[dict[str, Any]]] = {24: [], 96: []}
    for _ in range(rounds):
        for layers, plans in found.items():
            sizes = [f"model.num_layers={layers}", "model.micro_batch_size=1", "model.global_batch_size=8"]
            plans.append(planned("gpt3_1.3b", *sizes, *overrides))
    rows = []
    for layers, plans in found.items():
        row = {"what": f"GPT-3 1.3B, {layers} layers", "rounds": rounds}
        for key in ("compile_seconds", "cpu_seconds"):
            row[key] = statistics.median(p[key] for p in plans)
            row[f"{key} / 24 layers"] = statistics.median(
                b[key] / a[key] for a, b in zip(found[24], plans, strict=True)
            )
        rows.append(row)
    large = planned("gpt3_175b", *overrides)
    kept = {key: large[key] for key in ("compile_seconds", "cpu_seconds", "command_seconds")}
    rows.append({"what": "GPT-3 175B on 1,024 GPUs", **kept, "fits": large["memory"]["fits"]})
    for row in rows:
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return rows


def planned(name: str, *overrides: str) -> dict[str, Any]:
    """The JSON of `jzero plan` in a process of its own, with that one's seconds of wall and of CPU."""
    command = [sys.executable, "-m", "jzero", "plan", str(CONFIGS / f"{name}.yaml"), "--json", "-", "--quick", XLA]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *overrides], stdout=subprocess.PIPE, text=True, check=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout) | {"cpu_seconds": cpu, "command_seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
