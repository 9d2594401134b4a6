"""What goes over from one run to another where FP8 is switched on, and checkpoints of interleaved pipelines with it."""

import jax
import numpy as np
import pytest
from programs import program, train
from test_fp8 import PIPELINE, VOCABULARY
from test_fp8_params import assert_close, narrow, weights

from jzero import make_mesh
from jzero.errors import JzeroError
from jzero.fp8 import dequantise
from jzero.train.checkpoint import Checkpoints, load_params
from jzero.train.config import load_config
from jzero.train.loop import train as train_run
from jzero.train.step import build_program
from jzero.train.weights import initial_values

pytestmark = pytest.mark.slow
KEYS = [
    "trainer={precision: bf16, limit_val_batches: 0, max_steps: 2}",
    "exp_manager.checkpoint.every_n_steps=2",
    "generate.tokens=0",
    "model={global_batch_size: 4, micro_batch_size: 4, encoder_seq_length: 16, num_layers: 2, hidden_size: 32}",
    "model.num_attention_heads=4",
    "model.optim.sched={max_steps: 4, warmup_steps: 1}",
]


def scales(state):
    """Scales and histories of products and of FP8 parameters: the same numbers however layers are stored."""
    found = jax.tree_util.tree_leaves_with_path((state.fp8, state.opt.fp8))
    return {jax.tree_util.keystr(path): np.array(x).ravel() for path, x in found}


@pytest.mark.parametrize("changes", [{}, {"optim": {"master": "scaled_fp16"}}], ids=["fp32 masters", "scaled masters"])
def test_an_interleaved_pipeline_goes_on_bit_for_bit_and_elsewhere_to_a_thousandth(tmp_path, changes):
    interleaved = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
    prog = program(narrow(4, "gather_on_forward", 2, **interleaved, **changes), VOCABULARY)
    state, _ = train(prog, 2)
    checkpoints = Checkpoints(tmp_path, async_save=False)
    checkpoints.save(2, state, {"model": {}})
    kept = scales(state)
    unbroken, rows = train(prog, 2, state)
    again, found = train(prog, 2, checkpoints.restore(prog.abstract)[0])
    np.testing.assert_array_equal(found, rows)
    bits = lambda x: np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 and x.ndim else np.asarray(x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), again, unbroken)
    other = program(narrow(2, "gather_twice", 2, num_layers=4, **changes), VOCABULARY)
    moved = Checkpoints(tmp_path, read_only=True, plan=other.layout.plan).restore(other.abstract)[0]
    for name, found in scales(moved).items():
        np.testing.assert_array_equal(found, kept[name], err_msg=name)
    assert_close(train(other, 2, moved)[1], rows, 1e-3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, text_prefix):
    """Where runs are, and their keys: one without FP8, one with FP8 products, and one with FP8 parameters."""
    root = tmp_path_factory.mktemp("runs")
    keys = [f"exp_manager.exp_dir={root}", f"model.data.data_prefix={text_prefix}", *KEYS]
    for name, own in RUNS.items():
        train_run(load_config(None, [*keys, f"exp_manager.name={name}", *own]))
    return root, keys


RUNS = {
    "plain": (),
    "products": ("model.fp8=true", "model.fp8_amax_history_len=3"),
    "parameters": ("model.fp8=true", "model.fp8_amax_history_len=3", "model.fp8_params=true"),
}


@pytest.mark.parametrize(
    ("run", "now", "message"),
    [
        ("plain", "products", r"fp8/\w+: expected \w+\[.*\], found no such leaf \(.*model\.fp8 was False, is True"),
        ("plain", "parameters", r"params/blocks/.*/weight/scale: expected .*model\.fp8_params was False, is True"),
        ("products", "parameters", r"params/blocks/.*/weight/scale: expected .*model\.fp8_params was False, is True"),
        ("parameters", "products", r"params/blocks/.*/weight: expected .*model\.fp8_params was True, is False"),
    ],
)
def test_a_run_that_goes_on_with_other_fp8_says_what_to_do(folders, run, now, message):
    root, keys = folders
    config = load_config(None, [*keys, f"exp_manager.name={run}", *RUNS[now], "trainer.max_steps=4"])
    with pytest.raises(JzeroError, match=message) as error:
        train_run(config)
    expected = f"or train under another exp_manager.name, from these weights by model.restore_from_path={root / run}"
    assert str(error.value).endswith(expected)


@pytest.mark.parametrize(("run", "now"), [(a, b) for a in RUNS for b in RUNS if b != "plain"])
def test_a_new_run_starts_from_the_weights_of_another(folders, run, now):
    """Weights alone go over, rounded to E4M3 if they were FP8 parameters; scales are those of these weights."""
    root, keys = folders
    config = load_config(None, [*keys, "exp_manager.name=new", *RUNS[now], f"model.restore_from_path={root / run}"])
    prog = build_program(config, make_mesh(devices=jax.devices()[:1]), 257)
    state = prog.start(initial_values(config, prog, 257, lambda line: None))
    saved = load_config(root / run / "config.yaml")
    before = build_program(saved, make_mesh(devices=jax.devices()[:1]), 257)
    params = load_params(root / run, before.abstract.params, "last", plan=before.layout.plan)
    for i, (old, new) in enumerate(
        (params["blocks"][a][b]["weight"], state.params["blocks"][a][b]["weight"]) for a, b in prog.model.products
    ):
        amax = np.abs(np.asarray(dequantise(old, np.float32), np.float32)).reshape(2, -1).max(1)
        if now == "parameters":
            np.testing.assert_allclose(new.scale, 448 / amax, rtol=1e-6)
        else:
            np.testing.assert_array_equal(np.asarray(new), np.asarray(dequantise(old)))
            np.testing.assert_allclose(state.fp8.scale[:, i, 1], 448 / amax, rtol=1e-6)
        np.testing.assert_array_equal(state.fp8.scale[:, i, 0], 1)
    assert not np.asarray(state.fp8.amax_history).any()
    assert (int(state.fp8.count), int(state.step)) == (0, 0)
    assert len(weights(state.params)) == 4
