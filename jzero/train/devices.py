"""The devices a run trains on: accelerators if there are any, else virtual CPU devices, over one or many hosts.

One process per host. Several hosts find each other through Slurm, Open MPI, Kubernetes or TPU metadata (JAX reads
them), or through JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from jzero.errors import JzeroError
from jzero.mesh import make_mesh
from jzero.train.config import Config, Trainer
from jzero.train.config_check import validate

# What the kernel shows where there is an accelerator: NVIDIA, AMD, WSL, TPU. Looking costs nothing; asking JAX would
# start (or time out in) every installed plugin.
_THREADS_PER_DEVICE = 8  # of XLA's pool, for virtual CPU devices
_DEVICE_FILES = ("nvidia0", "nvidiactl", "kfd", "dxg", "accel0", "accel/accel0", "vfio/0")


def accelerator_present(dev: Path = Path("/dev")) -> bool:
    """Whether the kernel shows an accelerator that JAX may have a plugin for.

    Args:
        dev: the folder of device files.

    Example:
        >>> accelerator_present(Path("/nowhere"))
        False
    """
    return any((dev / name).exists() for name in _DEVICE_FILES)


def start_devices(trainer: Trainer, note: Callable[[str], None] = print) -> int:
    """Makes JAX ready for a run, before its first use: joins the other hosts, creates virtual CPU devices.

    The platforms set by JAX_PLATFORMS (or `jax.config.jax_platforms`) are kept. Without them, and without an
    accelerator, the platform is the CPU. There (also if JAX finds that it has no plugin for the accelerator), as many
    virtual devices as the configuration asks for are created; if JAX was used before, it is left as it is. On several
    CPU devices JAX's compilation cache is switched off: a program that is loaded from it has lost the order of its
    collectives (jaxlib 0.10.2), and crashes.

    Args:
        trainer: the section of the configuration.
        note: called with one line that says what the run trains on, where that is not accelerators.

    Returns:
        The number of devices of all hosts.

    Raises:
        JzeroError: the hosts cannot find each other, or JAX does not find the platform it was told to use.
    """
    if not _platforms() and not accelerator_present():
        _try_update("jax_platforms", "cpu")
    if trainer.devices > 0:  # other platforms do not look at it
        # a collective holds its thread while it waits; with one thread per device two of them can wait for ever
        os.environ.setdefault("PJRT_NPROC", str(_THREADS_PER_DEVICE * trainer.devices))
        _try_update("jax_num_cpu_devices", trainer.devices)
    if trainer.num_nodes > 1 and not jax.distributed.is_initialized():
        _join_hosts(trainer.num_nodes)
    here = _local_devices()
    if here[0].platform == "cpu" and jax.process_index() == 0:
        note(
            "no accelerator in use: running on " + (f"{len(here)} virtual CPU devices" if len(here) > 1 else "the CPU")
        )
    if here[0].platform == "cpu" and len(jax.devices()) > 1:
        _switch_cache_off(note if jax.process_index() == 0 else lambda line: None)
    return len(jax.devices())


def build_mesh(config: Config, note: Callable[[str], None] = print) -> tuple[Config, jax.sharding.Mesh]:
    """The validated configuration (`trainer.devices` a number) and its mesh over the first devices there are.

    Raises:
        JzeroError: the configuration contradicts itself or needs more devices than there are.
    """
    if config.trainer.devices != -1:
        validate(config)  # a mistake is told before devices are made
    config = validate(config, start_devices(config.trainer, note))
    sizes = config.mesh_shape
    devices = jax.devices()[: config.num_devices]
    mesh = make_mesh(sizes["data"], sizes["tensor"], sizes["pipeline"], sizes["replica"], devices=devices)
    return config, mesh


def as_process_0(value: bool) -> bool:
    """What process 0 calls this with; every process of a run has to call it.

    Example:
        >>> as_process_0(True)
        True
    """
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def on_every_host(value: bool) -> bool:
    """Whether every process of the run calls this with True; every one has to call it.

    Example:
        >>> on_every_host(True)
        True
    """
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.int32(value))))


@contextmanager
def together(what: str) -> Iterator[None]:
    """Around what may fail on one host alone: then it fails on all, and none waits for another.

    Args:
        what: the block, for the message of the hosts where it went well.

    Raises:
        JzeroError: another host failed. Where the block itself fails, what it raised.

    Example:
        >>> with together("the data"):
        ...     pass
    """
    try:
        yield
    except Exception:
        on_every_host(False)
        raise
    if not on_every_host(True):
        raise JzeroError(f"{what}: expected every host to open it, found one that could not; its message says why")


def _local_devices() -> list[Any]:
    """JAX's devices of this host. What JAX logs meanwhile is shown if it finds some, else it is the reason."""
    heard, jax_log = _Heard(), logging.getLogger("jax")
    handlers, propagate = jax_log.handlers, jax_log.propagate
    jax_log.handlers, jax_log.propagate = [heard], False  # type: ignore[assignment]
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the platforms it was told to use is there
        reasons = [str(record.exc_info[1]) for record in heard.records if record.exc_info] or [str(error)]
        why = " ".join(reasons[-1].split())[:200]
        raise JzeroError(
            f"JAX_PLATFORMS: expected a platform that JAX finds on this machine, found {_platforms() or 'none'}"
            f"{f' ({why})' if why else ''}; unset it, or install what it needs (for GPUs: NVIDIA's driver and "
            "pip install 'jzero[cuda13]')"
        ) from None
    finally:
        jax_log.handlers, jax_log.propagate = handlers, propagate
    for record in heard.records:
        logging.getLogger(record.name).handle(record)
    return devices


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _platforms() -> str:
    return jax.config.jax_platforms or ""  # type: ignore[attr-defined]  JAX adds it at run time


def _try_update(key: str, value: str | int) -> bool:
    """Sets a value of JAX's configuration; False if JAX's devices are in use already."""
    try:
        jax.config.update(key, value)
    except RuntimeError:
        return False
    return True


def _switch_cache_off(note: Callable[[str], None]) -> None:
    if jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        note("JAX's compilation cache is off: programs of several CPU devices do not survive it")
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # or JAX does not look at the value again


def _join_hosts(num_nodes: int) -> None:
    numbers = {}
    for key, name in (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID")):
        if name in os.environ:
            try:
                numbers[key] = int(os.environ[name])
            except ValueError:
                raise JzeroError(f"{name}: expected a number, found {os.environ[name]!r}") from None
    try:
        jax.distributed.initialize(**numbers)
    except (ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise JzeroError(
            f"trainer.num_nodes: expected {num_nodes} hosts to find each other, found: {why}; "
            "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or start under Slurm or Open MPI"
        ) from error
    if jax.process_count() != num_nodes:
        raise JzeroError(
            f"trainer.num_nodes: expected {num_nodes} processes, one per host, found {jax.process_count()}"
        )
