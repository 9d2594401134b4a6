"""Plans of the real configurations, for as many GPUs as they ask for, and a sweep with real processes.

What a step costs to compile depends on how many different kernels it has, hardly on their sizes: full-size models are
as cheap as small ones, and a model of one layer, without a loop over its layers, is cheaper.
"""

import collections
import functools
import json
import math
import time
from pathlib import Path

import jax
import pytest
from oracles import hlo, predicted
from test_unrolled import agree

from jzero import make_mesh
from jzero.cli import main
from jzero.plan import TARGETS, available, devices, plan
from jzero.plan.memory import Buffers
from jzero.train.config import load_config
from jzero.train.step import build_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]
CONFIGS = Path(__file__).parents[2] / "configs"
H100 = "h100-sxm-80gb"
XLA = "model.attention_implementation=xla"  # so that the numbers do not depend on whether cuDNN is here
POLICIES = ("replicated", "gather_on_forward", "gather_twice")
OPTIMIZERS = ("distributed_fused_adam", "fused_adam")


@functools.cache
def planned(name: str, *overrides: str):
    """The configuration, its plan, and CPU seconds of this process."""
    config = load_config(CONFIGS / f"{name}.yaml", [XLA, *overrides])
    start = time.process_time()
    return config, plan(config, H100), time.process_time() - start


def gpt3_1_3b(policy: str, *overrides: str):
    gathers = f"model.optim.overlap_param_sync={policy != 'replicated'}"
    sizes = ["model.micro_batch_size=8", "model.global_batch_size=64"]
    return planned("gpt3_1.3b", *sizes, f"model.optim.policy={policy}", gathers, *overrides)


def program_of(config):
    mesh = make_mesh(**config.mesh_shape, devices=devices(H100, config.num_devices, config.trainer.num_nodes))
    return build_program(config, mesh)


def is_as_predicted(config, report):
    """An independent reader of the module, and the design's prediction, find the same bytes."""
    kinds = collections.Counter()
    for use in report.collectives:
        kinds[use.kind] += use.bytes
    assert dict(kinds) == dict(hlo.collective_bytes(report.text))
    expected = collections.Counter()
    for item, times in predicted.step_collectives(program_of(config)).items():
        expected[item.kind, "+".join(item.axes)] += times * item.bytes
    # the compiler drops the gather of a bias that the backward pass turns out not to read
    assert {key: use.bytes for key, use in report.totals().items()} == pytest.approx(dict(expected), rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_gpt3_1_3b_on_8_gpus(policy):
    config, report, _ = gpt3_1_3b(policy)
    is_as_predicted(config, report)
    agree(report.text, TARGETS[H100], report.mesh)
    memory = report.memory
    assert memory.fits
    assert 0.2 < report.mfu < 0.7
    assert any("layers.py" in temporary.name for temporary in memory.largest[:3])
    assert not any("plan" in temporary.name for temporary in memory.largest)
    # bf16 parameters; a 16-bit remainder and two float32 moments, sharded over 8
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(program_of(config).model.abstract))
    stored = count * (2 + 10 / 8 if policy == "replicated" else (2 + 10) / 8)
    assert memory.parameters + memory.optimizer == pytest.approx(stored, rel=0.01)


def test_gpt3_175b_on_1024_gpus_plans_in_two_minutes_of_two_cores():
    config, report, seconds = planned("gpt3_175b")
    assert seconds < 120
    assert report.memory.fits
    is_as_predicted(config, report)
    gathers = [use for use in report.collectives if use.kind == "all-gather" and use.loop]
    assert gathers
    assert all(use.axis == "data" for use in gathers)


def test_gpt3_175b_in_a_pipeline_fits_with_zero_and_does_not_without():
    """Tensor 8 × pipeline 4 × data 32, gradients summed in float32 on the rank."""
    sizes = {"tensor": 8, "pipeline": 4}
    grid = ["model.sequence_parallel=true", *(f"model.{axis}_model_parallel_size={n}" for axis, n in sizes.items())]
    keys = [*grid, "model.optim.policy=replicated", "model.grad_accumulation=local"]
    memory = [planned("gpt3_175b", *keys, f"model.optim.name={n}")[1].memory for n in OPTIMIZERS]
    assert [m.fits for m in memory] == [True, False]
    state, whole = (m.optimizer for m in memory)
    assert state == pytest.approx(whole / 32, rel=1e-3)


def test_four_times_the_layers_are_the_same_program():
    """Loops run longer, nothing else changes; `benchmarks/plan.py` measures that this costs no time to compile.

    With an eighth of the samples, or XLA would recompute what does not fit.
    """
    fewer = ["model.num_layers=96", "model.micro_batch_size=1", "model.global_batch_size=8"]
    reports = [gpt3_1_3b("gather_on_forward")[1], gpt3_1_3b("gather_on_forward", *fewer)[1]]
    sizes = [sum(len(c.instructions) for c in r.module.computations.values()) for r in reports]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    loops = [{use.loop.split(" ×")[0] for use in r.collectives if use.loop} for r in reports]
    assert loops == [{"backward", "forward"}] * 2
    scattered = [r.totals()["reduce-scatter", "data"].bytes for r in reports]
    assert scattered[1] > 3 * scattered[0]


def test_what_gather_twice_holds():
    """Besides activations: three layers' gathered weights, two layers' gradients, sums in shards, and the embedding's.

    Activations are told by the rows of a micro-batch, 5, which divide no dimension of a weight.
    """
    overrides = [
        "model.num_layers=6", "model.hidden_size=512", "model.num_attention_heads=4", "model.vocab_size=1024",
        "model.encoder_seq_length=160", "model.micro_batch_size=5", "model.global_batch_size=40",
        "model.optim.policy=gather_twice",
    ]  # fmt: skip
    config, report, _ = planned("gpt3_1.3b", *overrides)
    abstract = program_of(config).model.abstract
    size = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    layer = size(abstract["blocks"]) // 6
    outer = size(abstract) - 6 * layer
    fullest = [b for b in Buffers(report.module).largest(1000) if not any(n % 5 == 0 for n in b.array.dims)]
    gathered = sum(b.bytes for b in fullest if "all_gather" in b.name and b.array.dims[0] != 1024)
    assert 0 < gathered <= 3 * 2 * layer
    # a gradient is made in bf16 and scattered in float32; the embedding is gathered, and its gradient summed in float32
    allowed = 3 * 2 * layer + 2 * (2 + 4) * layer + 4 * 6 * layer // 8 + (2 + 2 + 4 + 4) * outer
    assert sum(b.bytes for b in fullest) <= allowed
    assert allowed < 2 * 6 * layer * 2  # what `gather_on_forward` keeps of the layers, twice


def test_shards_inside_a_machine_spare_the_network():
    """Replicas over 2 machines: the all-reduce of shards crosses the network, gathers and scatters do not."""
    overrides = [
        "trainer.num_nodes=2",
        "model.num_layers=1",
        "model.optim.policy=gather_twice",
        "model.global_batch_size=64",
    ]
    _, across, _ = planned("gpt3_1.3b", *overrides)
    _, inside, _ = planned("gpt3_1.3b", *overrides, "model.replica_parallel_size=2")
    times = lambda report, kind: sum(use.estimated_ms for use in report.collectives if use.kind == kind)
    assert times(inside, "all-gather") < times(across, "all-gather")
    assert {use.axis for use in inside.collectives if use.kind == "all-gather"} == {"data"}
    assert {use.axis for use in inside.collectives if use.kind == "all-reduce" and use.bytes > 2**20} == {"replica"}


def test_a_sweep_with_real_processes_and_its_best_plans_as_promised(tmp_path, capsys):
    config = tmp_path / "small.yaml"
    config.write_text(
        "exp_manager: {name: small}\nmodel: {num_layers: 1, hidden_size: 64, num_attention_heads: 2, "
        "encoder_seq_length: 64, micro_batch_size: 1, global_batch_size: 16, vocab_size: 256, hidden_dropout: 0.0, "
        f"attention_dropout: 0.0, {XLA.removeprefix('model.').replace('=', ': ')}}}\n"
    )
    best, results, rows = (tmp_path / name for name in ("best.yaml", "results.jsonl", "sweep.json"))
    fixed = ["model.activations_checkpoint_granularity=full", "model.grad_accumulation=local"]
    fixed += ["model.optim.policy=gather_twice", "model.optim.overlap_param_sync=true"]
    arguments = ["--sweep", "--devices", "8", "--results", str(results), *fixed]
    assert main(["plan", str(config), *arguments, "--write", str(best), "--json", str(rows)]) == 0
    assert "2 layouts: 2 fit" in capsys.readouterr().out
    promised = json.loads(rows.read_text())[0]["numbers"]
    report = plan(load_config(best), H100)
    found = report.json() | report.json()["memory"]
    same = set(promised) - {"compile_seconds"}
    assert {key: found[key] for key in same} == {key: promised[key] for key in same}
    assert f"{report.tokens_per_second:,.0f} tokens/s" in best.read_text().splitlines()[1]
    start = time.perf_counter()
    assert main(["plan", str(config), *arguments]) == 0  # everything is known
    assert time.perf_counter() - start < 20
