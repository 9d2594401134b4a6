"""Estimates against computations by hand, from the formulas of docs/plan.md."""

import pytest
from modules import GPU, MESH, module

from jzero.plan import cost, targets

H100 = targets.TARGETS["h100-sxm-80gb"]


def kernel(line: str, others: str = "", target=GPU):
    read = module(f"  ROOT {line}", others)
    return cost.kernel(read, read.entry, read.entry.root, target)


def test_an_elementwise_kernel_is_its_bytes():
    found = kernel("%y = f32[1000]{0} multiply(%x, %x)")
    assert found.bytes == 3 * 4000
    assert found.seconds == pytest.approx(12000 / 1e9 + 2e-6)
    assert not found.moves


def test_a_matrix_product_is_its_operations():
    read = module("""
  %a = bf16[4096,8192]{1,0} bitcast(%x)
  %b = bf16[8192,2048]{1,0} bitcast(%x)
  ROOT %y = f32[4096,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
""")
    found = cost.kernel(read, read.entry, read.entry.root, H100)
    assert found.operations == 2 * 4096 * 2048 * 8192
    assert found.seconds == pytest.approx(2 * 4096 * 2048 * 8192 / (989.4e12 * 0.70) + 2e-6)


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [
        ("bf16", "DEFAULT", 989.4e12),
        ("f32", "DEFAULT", 494.7e12),
        ("f32", "HIGHEST", 66.9e12),
        ("f8e4m3fn", "DEFAULT", 1978.9e12),
    ],
)
def test_cublas_calls_run_at_the_rate_of_their_type(dtype, precision, rate):
    target = "__cublas$lt$matmul$f8" if dtype.startswith("f8") else "__cublas$gemm"
    config = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]},'
        f'"precision_config":{{"operand_precision":["{precision}","DEFAULT"]}}}}}}'
    )
    read = module(f"""
  %a = {dtype}[8192,4096]{{1,0}} bitcast(%x)
  %b = {dtype}[8192,4096]{{1,0}} bitcast(%x)
  ROOT %y = ({dtype}[4096,4096]{{1,0}}, s8[1024]{{0}}) custom-call(%a, %b), custom_call_target="{target}", {config}
""")
    found = cost.kernel(read, read.entry, read.entry.root, H100)
    assert found.operations == 2 * 4096 * 4096 * 8192
    assert found.seconds == pytest.approx(found.operations / (rate * 0.70) + 2e-6)


def test_flash_attention_counts_half_under_a_causal_mask():
    scores = '{"intermediate_tensor_shape":{"dimensions":["8","16","2048","2048"]},"mask_type":"CAUSAL"}'
    config = f'backend_config={{"cudnn_fmha_backend_config":{scores}}}'
    operations = {}
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        read = module(f"""
  %q = bf16[8,2048,16,128]{{3,2,1,0}} bitcast(%x)
  ROOT %y = bf16[8,16,2048,128]{{3,1,2,0}} custom-call(%q, %q, %q), custom_call_target="{name}", {config}
""")
        operations[name] = cost.kernel(read, read.entry, read.entry.root, H100).operations
    product = 2 * 8 * 16 * 2048 * 2048 * 128 / 2
    assert list(operations.values()) == [2 * product, 5 * product]


SLICES = """
%slice (p: f32[24,1000], i: s32[]) -> f32[1,1000] {
  %p = f32[24,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,1000]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,1000}
}
%update (p: f32[24,1000], u: f32[1,1000], i: s32[]) -> f32[24,1000] {
  %p = f32[24,1000]{1,0} parameter(0)
  %u = f32[1,1000]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %b = f32[24,1000]{1,0} bitcast(%p)
  ROOT %d = f32[24,1000]{1,0} dynamic-update-slice(%b, %u, %i, %z)
}
"""


def test_a_slice_of_a_stack_costs_the_slice():
    stack = "  %s = f32[24,1000]{1,0} bitcast(%x)\n  %i = s32[] bitcast(%x)\n  %u = f32[1,1000]{1,0} bitcast(%x)\n"
    for line, expected in (
        ("%y = f32[1,1000]{1,0} fusion(%s, %i), kind=kLoop, calls=%slice", 4000 + 4 + 4000),
        ("%y = f32[24,1000]{1,0} fusion(%s, %u, %i), kind=kLoop, calls=%update", 4000 + 4 + 4000),
    ):
        read = module(f"{stack}  ROOT {line}", SLICES)
        found = cost.kernel(read, read.entry, read.entry.root, GPU)
        assert found.bytes == expected
        assert found.moves


@pytest.mark.parametrize(
    ("inner", "moves"),
    [
        ("copy(%p)", True),
        ("transpose(%p), dimensions={0}", True),
        ("negate(%p)", False),
        ("concatenate(%p), dimensions={0}", True),
        ("convert(%p)", False),
    ],
)
def test_what_counts_as_a_copy(inner, moves):
    head = "%f (p: f32[1000]) -> f32[1000] {\n  %p = f32[1000]{0} parameter(0)"
    others = f"{head}\n  ROOT %r = f32[1000]{{0}} {inner}\n}}\n"
    assert kernel("%y = f32[1000]{0} fusion(%x), kind=kLoop, calls=%f", others).moves == moves


def test_a_sum_down_to_one_number_is_no_copy():
    others = """%f (p: f32[1000]) -> f32[] {
  %p = f32[1000]{0} parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[] reduce(%p, %z), dimensions={0}, to_apply=%add
}
%g (i: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  ROOT %j = s32[] add(%i, %i)
}
"""
    assert not kernel("%y = f32[] fusion(%x), kind=kInput, calls=%f", others).moves
    read = module("  %i = s32[] bitcast(%x)\n  ROOT %y = s32[] fusion(%i), kind=kLoop, calls=%g", others)
    assert cost.kernel(read, read.entry, read.entry.root, GPU).moves  # an index


def test_a_kernel_on_a_stream_of_its_own_costs_what_it_runs():
    others = """%f (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %r = f32[1000]{0} multiply(%p, %p)
}
"""
    found = kernel("%y = ((f32[1000]{0}), f32[1000]{0}) async-start(%x), calls=%f", others)
    assert (found.bytes, found.moves) == (12000, False)


def collective(line: str, others: str = "", domain: int = 8, partitions: int = 8):
    read = module(f"  ROOT {line}", others, partitions)
    return cost.collective(
        read, read.entry, read.entry.root, GPU, MESH if partitions == 8 else {"data": partitions}, domain
    )


DATA, TENSOR = "{{0,2,4,6},{1,3,5,7}}", "{{0,1},{2,3},{4,5},{6,7}}"
IOTA, PAIRS = "replica_groups=[2,4]<=[4,2]T(1,0)", "source_target_pairs={{0,2},{2,4},{4,6}}"
HOPS = cost.COLLECTIVE_SECONDS + 3 * cost.LINK_HOP_SECONDS


@pytest.mark.parametrize(
    ("line", "kind", "axis", "size", "seconds"),
    [
        (f"%y = f32[4000]{{0}} all-gather(%x), replica_groups={DATA}", "all-gather", "data", 16000, 12e-6 + HOPS),
        (f"%y = f32[250]{{0}} reduce-scatter(%x), replica_groups={DATA}", "reduce-scatter", "data", 4000, 3e-6 + HOPS),
        (f"%y = f32[1000]{{0}} all-reduce(%x), {IOTA}", "all-reduce", "data", 4000, 6e-6 + HOPS + 6e-6),
        (f"%y = f32[1000]{{0}} all-to-all(%x), replica_groups={TENSOR}", "all-to-all", "tensor", 4000, 2e-6 + 12e-6),
        (f"%y = f32[1000]{{0}} collective-permute(%x), {PAIRS}", "collective-permute", "data", 4000, 16e-6),
        (f"%y = f32[1000]{{0}} ragged-all-to-all(%x), replica_groups={TENSOR}", "ragged-all-to-all", "tensor", 4000,
         14e-6),
    ],
)  # fmt: skip
def test_synchronous_collectives(line, kind, axis, size, seconds):
    found = collective(line)
    assert (found.kind, found.axis, found.bytes, found.asynchronous) == (kind, axis, size, False)
    assert found.seconds == pytest.approx(seconds)


def test_without_global_numbers_all_partitions_take_part():
    found = collective("%y = f32[1000]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add")
    assert found.axis == "data+tensor"


def test_across_machines_a_ring_waits_for_the_network():
    """Two machines of 8: each rank's links bring 15/16, and the 8 ports of a machine bring the other half."""
    gpu = targets.TARGETS["h100-sxm-80gb"]
    everybody = (tuple(range(16)),)
    size = 10**9
    inside, across = size * 15 / 16 / (450e9 * 0.8), size / 2 / (50e9 * 0.8 * 8)
    hops = 14 * cost.LINK_HOP_SECONDS + cost.NETWORK_HOP_SECONDS
    found = cost.collective_seconds("all-gather", size, everybody, gpu, 8)
    assert found == pytest.approx(max(inside, across) + cost.COLLECTIVE_SECONDS + hops)
    one_each = tuple((i, i + 8) for i in range(8))
    found = cost.collective_seconds("all-gather", size, one_each, gpu, 8)
    assert found == pytest.approx(size / 2 / (50e9 * 0.8) + cost.COLLECTIVE_SECONDS + cost.NETWORK_HOP_SECONDS)
    assert cost.collective_seconds("all-reduce", 4, everybody, gpu, 8) < 80e-6  # a tree, not a ring there and back
    assert cost.collective_seconds("all-gather", size, ((0,), (1,)), gpu, 8) == 0.0
