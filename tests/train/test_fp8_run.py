"""A run of the real trainer with FP8 products: what it logs, and that it goes on from a checkpoint bit for bit."""

import math

import pytest

from jzero.train.config import load_config
from jzero.train.generate import generate_from_run
from jzero.train.loop import train
from jzero.train.metrics import read_metrics

KEYS = [
    "trainer={precision: 32, val_check_interval: 2, limit_val_batches: 1, log_fp8_every_n_steps: 2}",
    "exp_manager.checkpoint.every_n_steps=2",
    "model={global_batch_size: 4, micro_batch_size: 2, encoder_seq_length: 16, fp8: true, fp8_amax_history_len: 3}",
    "model={num_layers: 1, hidden_size: 32, num_attention_heads: 4}",
    "model.optim.sched={max_steps: 4, warmup_steps: 1}",
]


@pytest.mark.slow
def test_a_run_logs_its_amaxes_and_goes_on_bit_for_bit(tmp_path, text_prefix, without_times):
    def run(name, steps, tokens=0):
        keys = [f"exp_manager.exp_dir={tmp_path}", f"exp_manager.name={name}", f"model.data.data_prefix={text_prefix}"]
        return train(load_config(None, [*keys, f"trainer.max_steps={steps}", f"generate.tokens={tokens}", *KEYS]))

    run("whole", 4)
    run("halves", 2)
    result = run("halves", 4, tokens=4)
    assert without_times(tmp_path / "halves") == without_times(tmp_path / "whole")
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    observed = [line for line in lines if "fp8/amax/layer 0/qkv/input" in line]
    assert [line["step"] for line in observed] == [2, 4]
    assert all(len(line) == 1 + 4 * 4 * 3 for line in observed)
    assert all(math.isfinite(value) for line in observed for value in line.values())
    options = {"tokens": 4, "temperature": 0.8, "top_k": 50, "seed": 1234}
    assert "".join(generate_from_run(tmp_path / "halves", "def ", checkpoint="last", **options)) == result.sample
