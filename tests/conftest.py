"""Eight virtual CPU devices, programs that compile quickly, and a text to train on.

Nearly all the time of the tests is XLA's, so it compiles for the CPU with half of LLVM's passes and no fusion
emitters: a fourth of the time, and the same arithmetic. What is compiled for GPUs is read, so that stays as users have
it. No compilation cache: see `jzero.train.devices.start_devices`.
"""

import gc
import json
import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "64")  # a collective holds its thread while it waits: enough for eight devices
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the GPU compiler need not find a driver
# XLA ends the process at a flag that it does not know, and later ones may not know these
if version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")

import jax
import numpy as np
import pytest

gc.freeze()  # tracing makes many objects and little garbage: looking for it less often saves a seventh of its time
gc.set_threshold(100_000, 20, 20)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_compilation_cache", False)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # in the processes that tests start, too


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the test's fixtures: LLVM's expensive passes only for what is compiled for GPUs."""
    quick = item.get_closest_marker("gpu_compiler") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))


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
