"""Out of memory as one line that says what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jzero.errors import JzeroError
from jzero.train.config import Config

_FULL = re.compile("RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY", re.IGNORECASE)
_BYTES = re.compile(r"allocat\D*(\d+)")


@contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turns a device's (or the host's) lack of memory inside the block into a one-line JzeroError.

    Args:
        config: of the run; its settings that cost memory are named.

    Example:
        >>> with memory_errors(Config()):
        ...     raise MemoryError
        Traceback (most recent call last):
            ...
        jzero.errors.JzeroError: memory: expected room for the run, found none; lower model.micro_batch_size (4), ...
    """
    try:
        yield
    except MemoryError as error:
        raise JzeroError(_line(config, "none")) from error
    except jax.errors.JaxRuntimeError as error:
        if not _FULL.search(str(error)):
            raise
        size = _BYTES.search(str(error))
        found = f"none for another {int(size[1]) / 2**30:,.2f} GiB on a device" if size else "none on a device"
        raise JzeroError(_line(config, found)) from error


def _line(config: Config, found: str) -> str:
    m = config.model
    ways = []
    if m.micro_batch_size > 1:
        ways.append(f"lower model.micro_batch_size ({m.micro_batch_size})")
    if m.activations_checkpoint_granularity != "full":
        now = m.activations_checkpoint_granularity or "null"
        ways.append(f"set model.activations_checkpoint_granularity=full ({now})")
    if config.zero and config.policy != "gather_twice":
        ways.append(f"model.optim.policy=gather_twice ({config.policy})")
    if not config.zero:
        ways.append("model.optim.name=distributed_fused_adam (fused_adam)")
    ways.append("use more devices")
    advice = ", ".join(ways[:-1]) + (" or " if len(ways) > 1 else "") + ways[-1]
    return f"memory: expected room for the run, found {found}; {advice}; `jzero plan` shows what takes how much"
