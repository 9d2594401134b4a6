"""GPUs that can be compiled for without having one.

With the `plan` extra (`pip install "jzero[plan]"`: the CUDA plugin for JAX, without CUDA libraries) XLA compiles for a
described GPU. Set `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` before jax starts, so that the plugin does not look for a driver.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from jzero.errors import JzeroError

# Facts of the GPU in the form XLA reads (GpuTargetConfigProto): NVIDIA H100 SXM data sheet and CUDA device properties.
H100_SXM = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  name: "NVIDIA H100 80GB HBM3"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

TARGETS = {"h100-sxm-80gb": H100_SXM}
_PACKAGES = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12", "jax_cuda13_plugin", "jax_cuda12_plugin")


def available() -> bool:
    """Whether the GPU compiler is installed and may start without a driver."""
    return os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == "1" and any(_found(name) for name in _PACKAGES)


def devices(target: str, count: int, hosts: int = 1) -> list[Any]:
    """Described GPUs, to build a mesh of and compile for; nothing can run on them.

    Args:
        target: a name in `TARGETS`.
        count: GPUs in all.
        hosts: machines they stand in.

    Raises:
        JzeroError: an unknown target, a count that the hosts do not divide, or the `plan` extra is missing.

    Example:
        >>> gpus = devices("h100-sxm-80gb", 8) if available() else []
        >>> len(gpus) in (0, 8)
        True
    """
    if target not in TARGETS:
        raise JzeroError(f"target '{target}': expected one of {', '.join(TARGETS)}; choose one of them")
    if count < 1 or hosts < 1 or count % hosts:
        raise JzeroError(f"devices {count}: expected a positive multiple of the {hosts} hosts; change one of them")
    if not available():
        raise JzeroError(
            "the GPU compiler is not there: pip install 'jzero[plan]' and set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before "
            "jax starts"
        )
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target,
        topology=f"1x{hosts}x{count // hosts}",
        target_config=TARGETS[target],
    )
    return list(topology.devices)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
