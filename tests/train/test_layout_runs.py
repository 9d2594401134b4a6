"""A run of the real trainer that goes on over other tensor ranks and stages: its checkpoints hold whole arrays."""

import numpy as np
import pytest

from jzero.train.config import load_config
from jzero.train.generate import generate_from_run
from jzero.train.loop import train
from jzero.train.metrics import read_metrics

KEYS = [
    "trainer={precision: 32, val_check_interval: 2, limit_val_batches: 1}",
    "exp_manager.checkpoint.every_n_steps=2",
    "model={global_batch_size: 4, micro_batch_size: 2, encoder_seq_length: 16}",
    "model={num_layers: 4, hidden_size: 32, num_attention_heads: 4}",
    "model.optim.sched={max_steps: 5, warmup_steps: 1}",
]
ONE = ["trainer.devices=1"]
TENSOR = [
    "trainer.devices=4", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true",
    "model.optim.policy=gather_on_forward",
]  # fmt: skip
PIPELINE = ["trainer.devices=4", "model.pipeline_model_parallel_size=2", "model.optim.policy=gather_twice"]
CHUNKS = [
    "trainer.devices=2", "model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2",
]  # fmt: skip


def run(name, steps, layout, prefix, folder, tokens=0):
    keys = [f"exp_manager.exp_dir={folder}", f"exp_manager.name={name}", f"model.data.data_prefix={prefix}"]
    keys += [f"trainer.max_steps={steps}", f"generate.tokens={tokens}", "generate.temperature=0", *KEYS, *layout]
    return train(load_config(None, keys)), read_metrics(folder / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_prefix):
    """The lines of a run that stays on one device."""
    return run("whole", 5, ONE, text_prefix, tmp_path_factory.mktemp("whole"))[1]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.slow),
        pytest.param(CHUNKS, id="chunks", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_over_other_ranks(layout, tmp_path, text_prefix, whole):
    run("moved", 2, layout, text_prefix, tmp_path)
    run("moved", 4, ONE, text_prefix, tmp_path)
    result, moved = run("moved", 5, layout, text_prefix, tmp_path, tokens=4)
    for key in ("loss", "val_loss"):
        found, expected = ([line[key] for line in lines if key in line] for lines in (moved, whole))
        assert len(found) >= 3
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    options = {"tokens": 4, "temperature": 0, "top_k": 0, "seed": 0}
    text = "".join(generate_from_run(tmp_path / "moved", "def ", checkpoint="last", **options))
    assert text == result.sample
