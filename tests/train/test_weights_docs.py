"""The commands and the code of docs/weights.md, to the letter, on a small model."""

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from jzero.cli import main
from jzero.models import GPTConfig, functions, hf

pytest.importorskip("safetensors")
TEXT = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
SMALL = ["trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=1"]


@pytest.mark.slow
def test_every_command_and_the_code(tmp_path, monkeypatch, text_file, capsys):
    monkeypatch.chdir(tmp_path)
    config = GPTConfig(vocab_size=257, num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=16)
    hf.save("gpt2", config, jax.tree.map(lambda x: np.full(x.shape, 0.02, x.dtype), functions(config).abstract))
    for name in ("text", "other"):
        built = ["--input", str(text_file), "--tokenizer", "bytes", "--output", f"data/{name}"]
        assert main(["data", "build", *built]) == 0
    commands = [
        shlex.split(line, comments=True) for line in re.search(r"```bash\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()
    ]
    assert len(commands) == 6
    for command, *arguments in commands:
        assert command == "jzero"
        assert main([*arguments, *(SMALL if arguments[0] == "train" else [])]) == 0, arguments
    assert "perplexity" in capsys.readouterr().out
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], {})
    assert (hf.load("copy")["embedding"]["token"] == hf.load("gpt2_tuned")["embedding"]["token"]).all()
