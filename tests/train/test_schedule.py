"""The schedules against NeMo's classes written out step by step in plain Python floats."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero.errors import JzeroError
from jzero.train.config import Config, Model, Optim, Sched, Trainer
from jzero.train.schedule import SHAPES, schedule


def nemo_cosine(step, lr, min_lr, warmup, constant, last):
    """WarmupAnnealHoldPolicy.get_lr with CosineAnnealing's methods, in the order of NeMo's branches."""

    def megatron():
        decay = last - constant - warmup
        if warmup > 0 and step <= warmup:
            return lr * step / warmup
        if step > warmup + decay:
            return min_lr
        return min_lr + (lr - min_lr) * 0.5 * (math.cos(math.pi * (step - warmup) / decay) + 1)

    if warmup > 0 and step <= warmup:
        return megatron() if constant else lr * (step + 1) / (warmup + 1)
    if step > last:
        return min_lr
    if constant:
        return megatron()
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup)))


def nemo_warmup_policy(step, lr, min_lr, warmup, constant, last):
    if warmup > 0 and step <= warmup:
        return lr * (step + 1) / (warmup + 1)
    return min_lr if step > last else lr


def rate_of(last, lr=1.0, **sched):
    return schedule(Config(trainer=Trainer(max_steps=last), model=Model(optim=Optim(lr=lr, sched=Sched(**sched)))))


ORACLES = {"CosineAnnealing": nemo_cosine, "WarmupPolicy": nemo_warmup_policy}


@pytest.mark.parametrize(
    ("name", "warmup", "constant", "last"),
    [
        ("CosineAnnealing", 5, 0, 20),
        ("CosineAnnealing", 0, 0, 20),
        ("CosineAnnealing", 1, 0, 2),
        ("CosineAnnealing", 20, 0, 20),  # the warm-up is the whole run
        ("CosineAnnealing", 30, 0, 20),  # and longer than it
        ("CosineAnnealing", 5, 7, 20),
        ("CosineAnnealing", 0, 7, 20),
        ("CosineAnnealing", 5, 15, 20),  # no step is left for the cosine
        ("CosineAnnealing", 5, 18, 20),
        ("CosineAnnealing", 500, 50_000, 100_000),
        ("WarmupPolicy", 5, 0, 20),
        ("WarmupPolicy", 0, 0, 20),
    ],
)
def test_every_step_equals_nemo(name, warmup, constant, last):
    lr, min_lr = 3e-3, 2e-5
    rate = rate_of(last, lr, name=name, warmup_steps=warmup, constant_steps=constant, min_lr=min_lr)
    steps = np.unique(np.concatenate([np.arange(40), np.arange(0, last + 10, max(1, last // 300)), [last, last + 1]]))
    found = np.asarray(jax.jit(rate)(jnp.asarray(steps, jnp.int32)))
    wanted = [ORACLES[name](int(s), lr, min_lr, warmup, constant, last) for s in steps]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-9)


def test_corner_values():
    """Spelled out, so that a mistake shared by code and oracle shows."""
    plain = rate_of(12, warmup_steps=4, min_lr=0.1)
    assert [float(plain(s)) for s in (0, 3, 4)] == pytest.approx([0.2, 0.8, 1.0])
    assert [float(plain(s)) for s in (8, 12, 13, 10**6)] == pytest.approx([0.55, 0.1, 0.1, 0.1])
    held = rate_of(12, warmup_steps=4, constant_steps=4, min_lr=0.1)
    assert [float(held(s)) for s in (0, 1, 4, 6, 8, 9)] == pytest.approx([0.0, 0.25, 1.0, 0.55, 0.1, 0.1])


def test_sched_max_steps_wins_over_the_trainer_s():
    rate = rate_of(1000, warmup_steps=0, min_lr=0.0, max_steps=10)
    assert float(rate(10)) == pytest.approx(0.0, abs=1e-7)


def test_drives_an_optax_optimizer_without_recompiling():
    tx = optax.sgd(rate_of(10, warmup_steps=3, min_lr=0.0))
    traces = []

    @jax.jit
    def update(state):
        traces.append(state)
        return tx.update(jnp.float32(1), state)

    state, seen = tx.init(jnp.float32(0)), []
    for _ in range(4):
        delta, state = update(state)
        seen.append(-float(delta))
    assert seen == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("lr", "sched", "message"),
    [
        (1.0, {"name": "Cos"}, r"model\.optim\.sched\.name: expected one of CosineAnnealing, WarmupPolicy, found Cos"),
        (1e-5, {}, r"model\.optim\.lr: 1e-05 is below model\.optim\.sched\.min_lr 2e-05; lower min_lr or raise lr"),
        (
            1.0,
            {"name": "WarmupPolicy", "constant_steps": 3},
            r"model\.optim\.sched\.constant_steps: WarmupPolicy has no last steps at min_lr, found 3; set 0",
        ),
    ],
)
def test_mistakes(lr, sched, message):
    with pytest.raises(JzeroError, match=message):
        rate_of(9, lr, **sched)


def test_the_config_offers_the_same_shapes():
    [name] = [f for f in dataclasses.fields(Sched) if f.name == "name"]
    assert name.metadata["option"].choices == tuple(SHAPES)
