"""The README's code runs, and its keys exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from jzero.train.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODEL = """
import jax.numpy as jnp
params = {"w": jnp.ones((16, 8)), "b": jnp.ones(3)}
loss = lambda p, batch: jnp.mean((batch @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2)
batches = [jnp.ones((8, 16))] * 3
"""
SHOW = """
print(len(jax.devices()), len(batch.sharding.device_set), batch.addressable_shards[0].data.shape)
print([bool((new < 1).all()) for new in jax.tree.leaves(params)])
"""


def test_the_loop_of_ones_own_runs_and_splits_the_batch():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1].replace("\nmesh =", MODEL + "\nmesh =")
    done = subprocess.run([sys.executable, "-c", code + SHOW], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 4 (2, 16)", "[True, True]"]


def test_its_train_commands_have_keys_that_exist():
    commands = re.findall(r"jzero train (configs/\S+)((?:\s+[\w.]+=\S+)*)", README)
    assert len(commands) >= 4
    for config, overrides in commands:
        load_config(ROOT / config, shlex.split(re.sub("[`.]+$|`.*", "", overrides)))
