"""XLA's options of the training step on GPUs, a table per jaxlib: names come, go and change meaning between versions.

They are given per compile (`jax.jit(..., compiler_options=...)`), which refuses a name that XLA does not know. The
planner compiles the trainer's own step, and so with the same options.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from jax.sharding import Mesh

GPU: dict[tuple[int, ...], dict[str, Any]] = {
    (0, 10): {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # this estimator takes writing a layer's residuals for writing those of all layers, and so puts a gather that
        # the next iteration needs behind everything that could have hidden it
        "xla_gpu_enable_analytical_sol_latency_estimator": False,
        # with one at a time, the gather of the next weights and the scatter of the last gradient wait for each other
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
        "xla_gpu_enable_while_loop_double_buffering": True,  # or weights gathered ahead are copied once a layer
        "xla_gpu_enable_triton_gemm": False,  # cuBLAS: Triton's tiles do not fit every shape when nothing can be timed
    },
}
"""Options from this version of jaxlib on, until the next entry."""

BUCKETS: dict[tuple[int, ...], dict[str, str]] = {
    (0, 10): {
        "xla_gpu_all_gather_combine_threshold_bytes": "gathered",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "scattered",
        "xla_gpu_all_reduce_combine_threshold_bytes": "scattered",
    },
}
"""Options, from this version on, that say up to which size of their results (bytes) collectives are merged into one."""


def compiler_options(mesh: Mesh, *, gathered: int, scattered: int) -> dict[str, Any]:
    """XLA options of the step on this kind of device; none on CPU, which has no combiner and no such scheduler.

    Args:
        mesh: the device mesh; its devices may be described ones.
        gathered: bytes of whole weights up to which XLA merges all-gathers.
        scattered: bytes of a rank's shard of the gradient up to which it merges reduce-scatters, and all-reduces.

    Example:
        >>> import jax
        >>> compiler_options(jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1]), gathered=1, scattered=1)
        {}
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    sizes = {"gathered": gathered, "scattered": scattered}
    return {**newest(GPU), **{name: sizes[of] for name, of in newest(BUCKETS).items()}}


def newest(tables: dict[tuple[int, ...], Any], jaxlib: str | None = None) -> Any:
    """The entry for a version of jaxlib: the last one that is not newer, or the first.

    Args:
        tables: version -> entry.
        jaxlib: its version; None: of the one that is installed.

    Example:
        >>> newest({(0, 10): "a", (0, 12): "b"}, "0.11.3")
        'a'
    """
    installed = tuple(int(part) for part in (jaxlib or version("jaxlib")).split(".")[:2])
    return tables[max((v for v in tables if v <= installed), default=min(tables))]
