"""The step with FP8 parameters compiled for 8 H100s: bytes on the wire, one reduction of amaxes, and what overlaps."""

import math

import pytest
from test_fp8_step_module import CONFIG, FP8, PRODUCTS, SMALL

from jzero import make_mesh
from jzero.plan import hlo, targets
from jzero.train.config import load_config
from jzero.train.config_check import validate
from jzero.train.layout import bytes_per_device
from jzero.train.step import build_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]
PARAMETERS = ("model.fp8_params=true", "model.optim.overlap_param_sync=false", "model.optim.policy=replicated")
FULL = ("model.micro_batch_size=2", "model.global_batch_size=16")  # no activation has the size of a weight


def compiled(*overrides):
    config = load_config(CONFIG, ["model.attention_implementation=xla", *PARAMETERS, *overrides])
    config = validate(config, config.num_devices)
    prog = build_program(config, make_mesh(**config.mesh_shape, devices=targets.devices("h100-sxm-80gb", 8)))
    return prog, prog.step.lower(prog.abstract, prog.abstract_batch()).compile()


def weights(prog):
    """Types of the FP8 parameters: the layers' four weights, [L, ...] each."""
    return [prog.abstract.params["blocks"][a][b]["weight"].value for a, b in PRODUCTS]


def of_kind(module, kind):
    """The arrays that collectives of a kind make."""
    found = [i for i, _, _ in hlo.walk(module, module.entry) if i.opcode in (kind, f"{kind}-start")]
    results = [i.shape[1] if i.opcode.endswith("-start") and isinstance(i.shape[0], tuple) else i.shape for i in found]
    return [a for shape in results for a in hlo.flat(shape)]


@pytest.mark.parametrize("overrides", [SMALL, FULL], ids=["small", "1.3B"])
def test_a_step_with_fp8_parameters(overrides):
    prog, executable = compiled(*overrides)
    module, layers = hlo.parse(executable.as_text()), prog.config.model.num_layers
    sizes = [w.size for w in weights(prog)]

    calls = [(i, times) for i, _, times in hlo.walk(module, module.entry) if i.attribute("custom_call_target") == FP8]
    assert sum(times for _, times in calls) == layers * 4 * 3

    gathered = of_kind(module, "all-gather")
    assert sorted(a.size for a in gathered if hlo.bits(a.dtype) == 8) == sorted(sizes), "a byte per weight"
    assert not [a for a in gathered if hlo.bits(a.dtype) > 8 and a.size in sizes]
    assert sorted(a.size for a in of_kind(module, "all-reduce")) == [3, layers * 4 * (3 + 1)]

    _check_no_cast(module, sizes, layers)
    _check_overlap(module)
    _check_memory(prog, executable)


def _check_no_cast(module, stacks, layers):
    """Weights go from their bytes into the products: nothing casts a whole one, up or down, in a kernel or between."""
    for computation in module.computations.values():
        for i in computation.instructions:
            found = i.arrays[0] if i.opcode in ("convert", "reduce-precision") else None
            stacked = found and found.dims and found.dims[0] == layers  # of all layers: whole, or this rank's shards
            if found and (found.size in stacks or (not stacked and found.size * layers in stacks)):
                read = computation.operands(i)[0].arrays[0]
                assert "f8" not in read.dtype + found.dtype, f"{computation.name}: {i.name}"
                assert i.opcode == "convert", f"{computation.name}: {i.name} rounds"


def _check_overlap(module):
    """The first gather of bytes starts before the last large kernel of the update."""
    order = module.entry.instructions
    updates = [n for n, i in enumerate(order) if i.opcode == "fusion" and "zero_update" in i.op_name]
    written = {n: order[n].bytes for n in updates}
    starts = [
        n for n, i in enumerate(order) if i.opcode == "all-gather-start" and any(a.dtype == "u8" for a in i.arrays)
    ]
    later = sum(size for n, size in written.items() if n > starts[0])
    assert later > 0.1 * sum(written.values()), f"{later} of {sum(written.values())} bytes are updated behind it"


def _check_memory(prog, executable):
    """Parameters and state as the optimizer's table: 1 + 12 / 8 bytes per weight in FP8, 2 + 10 / 8 of all others."""
    narrow = sum(w.size for w in weights(prog))
    others = sum(math.prod(leaf.shape) for leaf in prog.layout.plan.leaves) - narrow
    scales = 4 * prog.config.model.num_layers * (4 * 3 + 4) * (1 + prog.config.model.fp8_amax_history_len)
    held = sum(map(bytes_per_device, (prog.abstract.params, prog.abstract.opt, prog.abstract.fp8)))
    assert held - scales == pytest.approx(narrow * (1 + 12 / 8) + others * (2 + 10 / 8), rel=1e-3)
    batch = sum(x.size * x.dtype.itemsize for x in prog.abstract_batch().values()) // 8
    assert executable.memory_analysis().argument_size_in_bytes == pytest.approx(held + batch, rel=1e-3)
