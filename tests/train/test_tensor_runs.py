"""A run of the real trainer that goes on over other tensor ranks: its checkpoints hold whole arrays."""

import numpy as np

from jzero.train.config import load_config
from jzero.train.generate import generate_from_run
from jzero.train.loop import train
from jzero.train.metrics import read_metrics

KEYS = [
    "trainer={precision: 32, val_check_interval: 2, limit_val_batches: 1}",
    "exp_manager.checkpoint.every_n_steps=2",
    "model={global_batch_size: 4, micro_batch_size: 2, encoder_seq_length: 16}",
    "model={num_layers: 2, hidden_size: 32, num_attention_heads: 4}",
    "model.optim.sched={max_steps: 5, warmup_steps: 1}",
]
ONE = ["trainer.devices=1"]
TENSOR = [
    "trainer.devices=4", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true",
    "model.optim.policy=gather_on_forward",
]  # fmt: skip


def test_a_run_goes_on_over_other_tensor_ranks(tmp_path, text_prefix):
    def run(name, steps, layout, tokens=0):
        keys = [f"exp_manager.exp_dir={tmp_path}", f"exp_manager.name={name}", f"model.data.data_prefix={text_prefix}"]
        keys += [f"trainer.max_steps={steps}", f"generate.tokens={tokens}", "generate.temperature=0", *KEYS, *layout]
        return train(load_config(None, keys)), read_metrics(tmp_path / name / "metrics.jsonl")

    _, whole = run("whole", 5, ONE)
    run("moved", 2, TENSOR)
    run("moved", 4, ONE)
    result, moved = run("moved", 5, TENSOR, tokens=4)
    for key in ("loss", "val_loss"):
        found, expected = ([line[key] for line in lines if key in line] for lines in (moved, whole))
        assert len(found) >= 3
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    options = {"tokens": 4, "temperature": 0, "top_k": 0, "seed": 0}
    text = "".join(generate_from_run(tmp_path / "moved", "def ", checkpoint="last", **options))
    assert text == result.sample
