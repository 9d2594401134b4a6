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


def test_fp8_parameters_are_gathered_as_bytes_and_all_amaxes_reduced_at_once():
    """A scan over layers whose FP8 weights are shards, differentiated by JAX, for 8 GPUs."""
    mesh = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8))
    layers, width, inner, recipe = 4, 512, 1024, DelayedScaling()

    def whole(shard):
        value = jax.lax.all_gather(shard.value, "data", axis=0, tiled=True)
        return Quantised(value, jax.lax.pcast(shard.scale, ("data",), to="varying"))

    def layer(x, each):
        up, down, scales = each
        hidden = jax.nn.gelu(fp8.dot(x, whole(up), scales[0], recipe=recipe))
        return x + fp8.dot(hidden, whole(down), scales[1], recipe=recipe), None

    def gradients(weights, scales, x):
        body = jax.checkpoint(layer, prevent_cse=False)
        loss = lambda w, s: jnp.mean(jax.lax.scan(body, x, (*w, s))[0].astype(jnp.float32) ** 2)
        value, vjp = jax.vjp(loss, weights, jax.lax.pcast(scales, ("data",), to="varying"))
        dw, amaxes = vjp(jnp.ones_like(value))
        return [each.value for each in dw], jax.lax.pmax(amaxes, "data")

    place = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    leaf = lambda *shape: Quantised(place(shape, jnp.float8_e4m3fn, None, "data"), place(shape[:1], jnp.float32))
    weights = [leaf(layers, width, inner), leaf(layers, inner, width)]
    args = weights, place((layers, 2, 3), jnp.float32), place((16, 256, width), jnp.bfloat16, "data")
    in_specs = ([Quantised(P(None, "data"), P())] * 2, P(), P("data"))
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=in_specs, out_specs=([P(None, "data")] * 2, P()))
    options = {"xla_gpu_enable_triton_gemm": False}
    text = jax.jit(mapped, compiler_options=options).lower(*args).compile().as_text()
    lines = lambda kind: re.findall(rf" = (.*?) {kind}(?:-start)?\(", text)
    assert {call[2] for call in calls(text)} == {MATMUL}
    assert lines("all-gather")
    assert all(set(re.findall(r"(\w+)\[", line)) == {E4M3} for line in lines("all-gather"))
    assert all("bf16" in line for line in lines("reduce-scatter"))
    assert [line[:9] for line in lines("all-reduce")] == ["f32[4,2,3"]
