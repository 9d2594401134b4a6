"""GPUs that can be compiled for without having one: facts, and the described devices that XLA compiles for.

With the `plan` extra (`pip install "jzero[plan]"`: the CUDA plugin for JAX, without CUDA libraries) XLA compiles for a
described GPU. JAX itself runs on the CPU meanwhile: `devices` says so to JAX where nobody did (JAX_PLATFORMS=cpu).

The facts are NVIDIA's own and what CUDA reports; docs/plan.md has them as a table, with sources.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jzero.errors import JzeroError

GB, TERA = 10**9, 10**12


@dataclasses.dataclass(frozen=True)
class Target:
    """Facts of one kind of GPU, and of the machine it usually stands in.

    Attributes:
        name: as CUDA reports it.
        capability: compute capability, (major, minor).
        memory: bytes that CUDA reports.
        bandwidth: of the memory, bytes/s.
        rates: matrix products per type, dense, operations/s (an addition and a multiplication are two).
        efficiency: share of `rates` that large products reach; measured by others, see docs/plan.md.
        link: bytes/s in each direction between GPUs of one machine (NVLink; PCIe for H100 PCIe).
        network: bytes/s in each direction of one GPU's share of the network between machines.
        span: GPUs that `link` reaches, where that is more than one machine.
        cores, clock, l2, shared, fpus: multiprocessors, GHz, bytes of cache, bytes of shared memory per multiprocessor,
            fp32 units per multiprocessor.
        links: NVLink links of a GPU.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    rates: Mapping[str, float]
    efficiency: float
    link: float
    network: float
    cores: int
    clock: float
    l2: int
    shared: int
    fpus: int
    links: int = 18
    span: int = 0

    @property
    def config(self) -> str:
        """The description in the form that XLA reads (text of a `GpuTargetConfigProto`)."""
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        interconnect = f"device_interconnect_info {{ active_links: {self.links} }}" if self.links else ""
        return f"""
            gpu_device_info {{
              name: "{self.name}" device_vendor: "NVIDIA Corporation"
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
              core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.l2}
              shared_memory_per_core: {self.shared} shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
              dnn_version: "9.10.0"
              {interconnect}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """

    def rate(self, dtype: str) -> float:
        """Operations/s of matrix products of this type; fp32 runs as TF32, JAX's default precision on GPU."""
        kind = (
            "fp8"
            if dtype.startswith("f8")
            else {"f32": "tf32", "f16": "bf16", "s8": "fp8", "u8": "fp8"}.get(dtype, dtype)
        )
        return self.rates.get(kind, self.rates["bf16"] if kind == "fp8" else self.rates["fp32"])


def _rates(bf16: float, fp8: float | None, fp32: float, fp64: float) -> dict[str, float]:
    """Rates in teraops; TF32 has half of bf16's in all of them."""
    rates = {"bf16": bf16, "tf32": bf16 / 2, "fp32": fp32, "f64": fp64} | ({"fp8": fp8} if fp8 else {})
    return {name: value * TERA for name, value in rates.items()}


_A100 = Target(
    name="NVIDIA A100-SXM4-80GB", capability=(8, 0), memory=85_100_068_864, bandwidth=2039 * GB,
    rates=_rates(312, None, 19.5, 19.5), efficiency=0.80, link=300 * GB, network=25 * GB,
    cores=108, clock=1.41, l2=40 * 2**20, shared=164 * 1024, fpus=64, links=12,
)  # fmt: skip
_H100 = Target(
    name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=84_942_979_072, bandwidth=3352.32 * GB,
    rates=_rates(989.4, 1978.9, 66.9, 66.9), efficiency=0.70, link=450 * GB, network=50 * GB,
    cores=132, clock=1.98, l2=50 * 2**20, shared=228 * 1024, fpus=128,
)  # fmt: skip
_B200 = Target(
    name="NVIDIA B200", capability=(10, 0), memory=191_514_411_008, bandwidth=7672.32 * GB,
    rates=_rates(2250, 4500, 75, 37), efficiency=0.70, link=900 * GB, network=50 * GB,
    cores=148, clock=1.965, l2=132_644_864, shared=228 * 1024, fpus=128,
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "h100-sxm-80gb": _H100,
    "a100-sxm-40gb": dataclasses.replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory=42_331_013_120, bandwidth=1555.2 * GB
    ),
    "a100-sxm-80gb": _A100,
    # the NVLink bridge joins pairs only, so eight of them talk over PCIe 5.0 x16
    "h100-pcie-80gb": dataclasses.replace(
        _H100, name="NVIDIA H100 PCIe", bandwidth=2039 * GB, rates=_rates(756, 1513, 51, 51), cores=114, clock=1.755,
        link=64 * GB, network=25 * GB, links=0,
    ),
    "h200-sxm-141gb": dataclasses.replace(
        _H100, name="NVIDIA H200 141GB HBM3e", memory=int(139.80 * 2**30), bandwidth=4800 * GB
    ),
    "b200-sxm-180gb": _B200,
    "gb200-nvl72-186gb": dataclasses.replace(
        _B200, name="NVIDIA GB200", memory=197_897_748_480, bandwidth=7928 * GB, rates=_rates(2500, 5000, 80, 40),
        cores=152, clock=2.062, l2=135_528_448, span=72,
    ),
}  # fmt: skip

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_INSTALL = "the GPU compiler is not installed: pip install 'jzero[plan]'"


def find(name: str) -> Target:
    """The target of a name in `TARGETS`.

    Raises:
        JzeroError: an unknown name.

    Example:
        >>> find("h100-sxm-80gb").cores
        132
    """
    if name not in TARGETS:
        raise JzeroError(f"target '{name}': expected one of {', '.join(TARGETS)}; choose one of them")
    return TARGETS[name]


def available() -> bool:
    """Whether the GPU compiler is installed and JAX, as it is set up, may start it without a GPU."""
    if not any(_found(name) for name in _PLUGINS):
        return False
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]  JAX adds it at run time
    return platforms != "" or os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == "1" or _set_cpu()


def require() -> None:
    """Raises a `JzeroError` that says what to install where the GPU compiler is missing."""
    if not available():
        raise JzeroError(_INSTALL)


def cudnn_available() -> bool:
    """Whether cuDNN's library is installed, so that flash attention can be compiled (the `plan-cudnn` extra)."""
    spec = importlib.util.find_spec("nvidia.cudnn") if _found("nvidia") else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(list(Path(folder).glob("lib/libcudnn.so*")) for folder in folders)


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
    facts = find(target)
    if count < 1 or hosts < 1 or count % hosts:
        raise JzeroError(f"devices {count}: expected a positive multiple of the {hosts} hosts; change one of them")
    require()
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target,
            topology=f"1x{hosts}x{count // hosts}",
            target_config=facts.config,
        )
    except NotImplementedError as error:  # JAX looked for a GPU when it started, and gave the compiler up
        raise JzeroError(
            "the GPU compiler did not start: expected JAX on the CPU; set JAX_PLATFORMS=cpu before jax is used"
        ) from error
    return list(topology.devices)


def _set_cpu() -> bool:
    """Lets JAX use the CPU where there is no GPU driver, as the CUDA plugin would refuse to start otherwise."""
    if not os.path.exists("/dev/nvidiactl"):
        try:
            jax.config.update("jax_platforms", "cpu")
        except RuntimeError:
            return True  # JAX is in use already; `devices` says what to do if the plugin is missing
    return True


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
