"""Eight virtual CPU devices, and a text to train on. No compilation cache: see `jzero.train.devices.start_devices`."""

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "64")  # a collective holds its thread while it waits: enough for eight devices
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the GPU compiler need not find a driver

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_compilation_cache", False)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # in the processes that tests start, too


@pytest.fixture(scope="session", autouse=True)
def all_devices():
    """Uses JAX's devices once, so that no configuration of a test changes how many there are."""
    return jax.devices()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A .jsonl file of 40 short documents."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(map(str, rng.integers(0, 500, 60)))}) for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def quick_to_compile():
    """For tests of what steps compute, in which compiling takes all the time: half of LLVM's passes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
