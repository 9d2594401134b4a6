"""Eight virtual CPU devices, a compilation cache that survives runs, and a text to train on."""

import json
import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "64")  # a collective holds its thread while it waits: enough for eight devices
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the GPU compiler need not find a driver

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
_cache = pathlib.Path(os.environ.get("JZERO_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "jzero-test-cache"))
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True)
def _no_cache_for_described_gpus(request):
    """What was compiled for a described GPU can be written to the cache but not read back without its client."""
    if request.node.get_closest_marker("gpu_compiler") is None:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


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
