"""What the GPU compiler makes of the FP8 product: all three are FP8 matmuls, and the casts are still there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.fp8 import dot as fp8
from jzero.fp8.numerics import Quantised
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling
from jzero.plan import targets

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),  # nothing can load a GPU's program
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]
CALL = re.compile(r'%\S+ = \((\w+)\[.*? custom-call\((.*?)\), custom_call_target="(__cu[^"]*)"')
SHAPES = {"qkv": ((2, 256, 512), (512, 4, 3, 128), 1), "out": ((2, 256, 4, 128), (4, 128, 512), 2)}


def module(recipe, shape="qkv", target="h100-sxm-80gb", quantised=False):
    """The compiled forward and backward pass of one product in bfloat16."""
    mesh = jzero.make_mesh(data=1, devices=targets.devices(target, 1))
    place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    x, w, contract = SHAPES[shape]
    dy = x[: len(x) - contract] + w[contract:]

    def step(x, w, scales, dy):
        y, vjp = jax.vjp(lambda *a: fp8.dot(*a, recipe=recipe, contract=contract), x, w, scales)
        return y, vjp(dy)

    weight = place(w, jnp.bfloat16)
    if quantised:
        weight = Quantised(place(w, jnp.float8_e4m3fn), place((), jnp.float32))
    args = place(x, jnp.bfloat16), weight, place((3,), jnp.float32), place(dy, jnp.bfloat16)
    options = {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(step, compiler_options=options).lower(*args).compile().as_text()


def calls(text):
    """Of each library call: dtype of the result, dtypes of its two operands, name."""
    dtype = dict(re.findall(r"(%\S+) = (\w+)\[", text))
    found = []
    for result, operands, name in CALL.findall(text):
        names = [operand.strip().split()[-1] for operand in operands.split(",")][:2]
        found.append((result, tuple(sorted(dtype[name] for name in names)), name))
    return sorted(found)


E4M3, E5M2, MATMUL = "f8e4m3fn", "f8e5m2", "__cublas$lt$matmul$f8"
HYBRID = [("bf16", (E4M3, E4M3), MATMUL), *[("bf16", (E4M3, E5M2), MATMUL)] * 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [DelayedScaling(), DelayedScaling(power_of_two=True), CurrentScaling()])
def test_all_three_products_are_fp8_with_results_in_bfloat16(recipe, shape):
    assert calls(module(recipe, shape)) == HYBRID


def test_a_quantised_weight_is_never_cast_up():
    text = module(DelayedScaling(), quantised=True)
    assert calls(text) == HYBRID
    assert not re.findall(r"= (?:bf16|f32|f16)\[512,4,3,128\]\S* (?:convert|parameter)", text)


def test_rounding_is_in_the_module():
    """Both casts round in float32, by an operation that no pass removes, before they change the dtype."""
    text = module(DelayedScaling())
    assert len(re.findall(r"reduce-precision\(.*exponent_bits=8, mantissa_bits=3", text)) >= 2
    assert len(re.findall(r"reduce-precision\(.*exponent_bits=8, mantissa_bits=2", text)) >= 1


def test_a_gpu_without_fp8_multiplies_the_same_values_in_bfloat16():
    text = module(DelayedScaling(), target="a100-sxm-80gb")
    assert [call[2] for call in calls(text)] == ["__cublas$lt$matmul"] * 3
    assert "mantissa_bits=3" in text


@pytest.mark.parametrize(
    ("target", "name"), [("b200-sxm-180gb", "__cudnn$blockScaledDot"), ("h100-sxm-80gb", "__cublas$lt$matmul")]
)
def test_block_scaling_is_one_kernel_where_the_gpu_has_it(target, name):
    assert [call[2] for call in calls(module(BlockScaling(), target=target))] == [name] * 3
