"""Out of memory as one line."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jzero import JzeroError
from jzero.train.config import Config, Model, Optim
from jzero.train.memory import memory_errors


def test_a_real_failure_to_allocate_names_what_to_change():
    message = (
        r"^memory: expected room for the run, found none for another 4,294,967,296.00 GiB on a device; "
        r"lower model.micro_batch_size \(4\), set model.activations_checkpoint_granularity=full \(null\), "
        r"model.optim.policy=gather_twice \(replicated\) or use more devices; `jzero plan` shows what takes how much$"
    )
    with pytest.raises(JzeroError, match=message), memory_errors(Config()):
        jax.block_until_ready(jnp.zeros((1 << 60,)))


def test_what_is_at_its_limit_is_not_advised():
    optim = Optim(policy="gather_twice")
    model = Model(micro_batch_size=1, activations_checkpoint_granularity="full", optim=optim)
    with (
        pytest.raises(JzeroError, match=r"found none; use more devices; `jzero plan`"),
        memory_errors(Config(model=model)),
    ):
        raise MemoryError
    model = dataclasses.replace(model, optim=Optim(name="fused_adam"))
    with (
        pytest.raises(JzeroError, match=r"model.optim.name=distributed_fused_adam"),
        memory_errors(Config(model=model)),
    ):
        raise MemoryError


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: no"), ValueError("out of memory"), JzeroError("x")]
)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, memory_errors(Config()):
        raise error
    assert caught.value is error
