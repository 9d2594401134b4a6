"""The FP8 step compiled for 8 H100s: what is multiplied in eight bits, what is not, and the one reduction of amaxes."""

import math
import re
from pathlib import Path

import pytest
from oracles import hlo

from jzero import make_mesh
from jzero.plan import targets
from jzero.train.config import load_config
from jzero.train.config_check import validate
from jzero.train.step import build_program

CONFIG = Path(__file__).parents[2] / "configs" / "gpt3_1.3b_fp8.yaml"
FP8, MATMUL = "__cublas$lt$matmul$f8", "__cublas$lt$matmul"
pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]
SMALL = (
    "model.num_layers=3", "model.hidden_size=256", "model.num_attention_heads=2", "model.encoder_seq_length=128",
    "model.micro_batch_size=1", "model.global_batch_size=8", "model.vocab_size=1024",
)  # fmt: skip
FULL = ("model.global_batch_size=64",)  # two micro-batches


def compiled(*overrides, target="h100-sxm-80gb"):
    """The program, and the text of its step compiled for 8 GPUs."""
    config = load_config(CONFIG, ["model.attention_implementation=xla", *overrides])
    config = validate(config, config.num_devices)
    prog = build_program(config, make_mesh(**config.mesh_shape, devices=targets.devices(target, 8)))
    return prog, prog.step.lower(prog.abstract, prog.abstract_batch()).compile().as_text()


@pytest.mark.parametrize("overrides", [SMALL, pytest.param(FULL, marks=pytest.mark.slow)], ids=["small", "1.3B"])
def test_layers_multiply_in_eight_bits_and_amaxes_are_reduced_once(overrides):
    prog, text = compiled(*overrides)
    config = prog.config
    m, count, calls = config.model, config.num_micro_batches, hlo.library_calls(text)

    eight = {result: n for (name, result), n in calls.items() if name == FP8}
    tokens, width = m.micro_batch_size * m.encoder_seq_length, m.hidden_size
    rows = lambda result: int(re.findall(r"\d+", result.split("[")[1])[0])
    # XLA joins some products of one weight and two micro-batches: one call of twice the rows
    joined = lambda result: 1 if rows(result) in (tokens, width, 3 * width, 4 * width) else rows(result) // tokens
    assert sum(n * joined(result) for result, n in eight.items()) == m.num_layers * 4 * 3 * count
    assert all(result.startswith("bf16[") for result in eight)

    assert {name for name, _ in calls if "cublas" in name or "cudnn" in name} == {FP8, MATMUL}
    vocabulary = config.padded_vocab_size(m.vocab_size)
    head = [{tokens, vocabulary}, {tokens, width}, {vocabulary, width}]
    dimensions = lambda result: {int(n) for n in re.findall(r"\d+", result.split("[")[1])}
    flat = {result: n for (name, result), n in calls.items() if name == MATMUL and result.count(",") == 1}
    assert sum(flat.values()) == 3 * count, "of the head: forward and two backward"
    assert all(dimensions(result) in head for result in flat)
    batched = {result: n for (name, result), n in calls.items() if name == MATMUL and result not in flat}
    heads = m.num_attention_heads * m.micro_batch_size
    assert all(result.split("[")[1].startswith(f"{heads},") for result in batched), "of the attention alone"

    reduced = re.findall(r" = (\w+\[[\d,]*\])\S* all-reduce(?:-start)?\(", text)
    assert sorted(reduced) == sorted(["f32[3]", f"f32[{m.num_layers},4,3]"])

    rounded = re.findall(r"= f32\[([\d,]+)\]\S* reduce-precision\(.*exponent_bits=8, mantissa_bits=3", text)
    sizes = {math.prod(map(int, shape.split(","))) for shape in rounded}
    weights = {x.size // m.num_layers for x in (prog.model.abstract["blocks"][a][b]["weight"] for a, b in PRODUCTS)}
    assert weights <= sizes, "the compiler removed a cast of a weight"


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_block_scaling_is_one_kernel_per_product_on_a_gpu_that_has_it(tensor):
    split = ("model.num_attention_heads=4", f"model.tensor_model_parallel_size={tensor}")
    prog, text = compiled(*SMALL, *split, "model.fp8_recipe=mxfp8", target="b200-sxm-180gb")
    m, count, calls = prog.config.model, prog.config.num_micro_batches, hlo.library_calls(text)
    blocks = {result: n for (name, result), n in calls.items() if name == "__cudnn$blockScaledDot"}
    assert sum(blocks.values()) == m.num_layers * 4 * 3 * count
    flat = [n for (name, result), n in calls.items() if name == MATMUL and result.count(",") == 1]
    assert sum(flat) == 3 * count, "of the head: forward and two backward"
    assert not any(name == FP8 for name, _ in calls)


@pytest.mark.slow
def test_layers_outside_of_fp8_cost_no_decision():
    """The first and the last multiply as without FP8, and no branch is taken on the device."""
    prog, text = compiled(*SMALL, "model.num_layers=4", "model.first_last_layers_bf16=true")
    calls = hlo.library_calls(text)
    assert sum(n for (name, _), n in calls.items() if name == FP8) == (prog.config.model.num_layers - 2) * 4 * 3
    flat = [n for (name, result), n in calls.items() if name == MATMUL and result.count(",") == 1]
    assert sum(flat) == 2 * 4 * 3 + 3, "of two layers, and of the head"
    assert " conditional(" not in text


PRODUCTS = [("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")]
