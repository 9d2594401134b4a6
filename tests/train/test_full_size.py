"""The real configurations, on as many described H100s as they ask for: nothing is allocated, nothing runs."""

from pathlib import Path

import pytest
from oracles import hlo, predicted, stablehlo

from jzero import make_mesh
from jzero.plan import plan, targets
from jzero.train.config import load_config
from jzero.train.config_check import validate
from jzero.train.layout import bytes_per_device
from jzero.train.step import build_program

CONFIGS = Path(__file__).parents[2] / "configs"
pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]


def program(name, *overrides):
    """For H100s; attention as XLA compiles it, since cuDNN need not be there."""
    config = load_config(CONFIGS / f"{name}.yaml", ["model.attention_implementation=xla", *overrides])
    config = validate(config, config.num_devices)
    devices = targets.devices("h100-sxm-80gb", config.num_devices, config.trainer.num_nodes)
    return build_program(config, make_mesh(**config.mesh_shape, devices=devices))


@pytest.mark.parametrize("name", ["bert_base", "gpt2_124m", "gpt3_1.3b", "gpt3_175b"])
def test_lowers_with_the_predicted_collectives(name):
    prog = program(name)
    lowered = prog.step.lower(prog.abstract, prog.abstract_batch())
    found = stablehlo.collectives(lowered, prog.mesh)
    expected = predicted.step_collectives(prog)
    assert {c: n for c, n in found.items() if c.axes} == expected
    assert predicted.totals(expected)["all-reduce"] <= 64 * 1024


def test_a_bert_split_over_tensor_ranks_lowers_with_the_predicted_collectives():
    for sequence in ("true", "false"):
        prog = program("bert_base", "model.tensor_model_parallel_size=2", f"model.sequence_parallel={sequence}")
        found = stablehlo.collectives(prog.step.lower(prog.abstract, prog.abstract_batch()), prog.mesh)
        assert {c: n for c, n in found.items() if c.axes} == predicted.step_collectives(prog)


@pytest.mark.parametrize(("name", "tensor"), [("gpt3_1.3b", 2), ("gpt3_175b", 8)])
def test_tensor_ranks_share_what_crosses_the_data_axis(name, tensor):
    """Per gradient reduction: (blocks + embedding + head) / tensor, in float32; norms and last biases whole."""
    prog = program(name, f"model.tensor_model_parallel_size={tensor}", "model.sequence_parallel=true")
    lowered = prog.step.lower(prog.abstract, prog.abstract_batch())
    found = stablehlo.collectives(lowered, prog.mesh)
    expected = predicted.step_collectives(prog)
    assert {c: n for c, n in found.items() if c.axes} == expected
    matrices = sum(leaf.size for path, leaf in predicted.leaves(prog.model.abstract) if path[-1] in ("weight", "token"))
    m, reductions = prog.config.model, 1
    if m.grad_accumulation == "sharded":
        reductions = prog.config.num_micro_batches
    scattered = predicted.by_axes(found)["reduce-scatter", ("data",)] / reductions
    small = m.num_layers * 15 * m.hidden_size + m.encoder_seq_length * m.hidden_size + 2 * m.hidden_size
    assert 0 <= scattered - 4 * matrices / tensor <= 4 * small


@pytest.mark.parametrize("name", ["bert_55m", "bert_large", "gpt2_124m", "gpt3_1.3b", "gpt3_175b"])
@pytest.mark.parametrize("policy", ["replicated", "gather_on_forward", "gather_twice"])
def test_bytes_per_device_are_the_formula(name, policy):
    """bf16 with fp32 masters: 2 bytes replicated (or 2/d) and 12/d sharded, plus padding."""
    prog = program(
        name, f"model.optim.policy={policy}", f"model.optim.overlap_param_sync={policy != 'replicated'}",
        "model.optim.master=fp32",
    )  # fmt: skip
    ranks, count, padded = prog.mesh.shape["data"], 0, 0
    for path, leaf in predicted.leaves(prog.model.abstract):
        layers = leaf.shape[0] if path[0] == "blocks" else 1
        count += leaf.size
        padded += -(-(leaf.size // layers) // ranks) * ranks * layers
    expected = (2 * count if policy == "replicated" else 2 * padded // ranks) + 12 * padded // ranks
    counters = 3 * 4
    assert 0 <= bytes_per_device((prog.abstract.params, prog.abstract.opt)) - expected <= counters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_124m", "gpt3_1.3b", "gpt3_175b"])
def test_compiles_and_moves_the_predicted_bytes(name):
    prog = program(name)
    compiled = prog.step.lower(prog.abstract, prog.abstract_batch()).compile()
    found = hlo.collective_bytes(compiled.as_text())
    assert dict(found) == dict(predicted.totals(predicted.step_collectives(prog)))
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert held + memory.temp_size_in_bytes < 80e9


@pytest.mark.slow
def test_a_pipeline_hides_what_crosses_its_data_and_pipeline_axes():
    """GPT-3 1.3B on data 2 × tensor 2 × pipeline 2, 16 micro-batches of 4: at most 2% of the step; idle time apart."""
    sizes = ["micro_batch_size=4", "global_batch_size=128", "tensor_model_parallel_size=2"]
    sizes += ["pipeline_model_parallel_size=2", "sequence_parallel=true", "attention_implementation=xla"]
    report = plan(load_config(CONFIGS / "gpt3_1.3b.yaml", [f"model.{size}" for size in sizes]), "h100-sxm-80gb")
    crossing = [use for use in report.collectives if use.axis in ("data", "pipeline")]
    assert {use.axis for use in crossing} == {"data", "pipeline"}
    exposed = sum(use.exposed_ms for use in crossing)
    print(f"{exposed:.1f} of {report.step_ms:.0f} ms")
    assert 0 < exposed <= 0.02 * report.step_ms
