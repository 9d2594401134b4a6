"""Delayed scaling against sequences computed by hand, and against a plain NumPy account of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import fp8 as oracle

from jzero.errors import JzeroError
from jzero.fp8 import recipes
from jzero.fp8.numerics import E4M3, E5M2
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling

INF, NAN = float("inf"), float("nan")


def run(recipe, amaxes, limits=448.0):
    """The scale after each of a sequence of amaxes of one tensor."""
    state = recipes.init(recipe, (), limits=limits)
    step = jax.jit(functools.partial(recipes.update, recipe, limits=limits))
    scales = []
    for amax in amaxes:
        state = step(state, jnp.float32(amax))
        scales.append(float(state.scale))
    return scales


BY_HAND = {  # 448 / amax / 2^margin
    "history as long": ({"amax_history_len": 4}, [7, 3.5, 14, 7], [64, 64, 32, 32]),
    "history longer": ({"amax_history_len": 1024}, [7, 3.5, 14, 7], [64, 64, 32, 32]),
    "history shorter": ({"amax_history_len": 2}, [14, 7, 3.5, 3.5, 28, 7, 7], [32, 32, 64, 128, 16, 16, 64]),
    "history of one step": ({"amax_history_len": 1}, [14, 7, 3.5], [32, 64, 128]),
    "most recent": ({"amax_compute_algo": "most_recent"}, [14, 7, 28, 3.5], [32, 64, 16, 128]),
    "margin": ({"amax_history_len": 2, "margin": 3}, [7, 3.5, 3.5], [8, 8, 16]),
    "interval": ({"amax_history_len": 8, "interval": 3}, [3.5, 7, 14, 7, 28, 3.5, 1], [128, 128, 128, 32, 32, 32, 16]),
    "interval and history": ({"amax_history_len": 2, "interval": 3}, [7, 56, 1.75, 3.5, 1], [64, 64, 64, 128, 128]),
    "newest, interval": ({"amax_compute_algo": "most_recent", "interval": 2}, [7, 14, 28, 7, 1], [64, 64, 16, 16, 448]),
    "zero at first": ({"amax_history_len": 4}, [0, 0, 7], [1, 1, 64]),
    "zero later": ({"amax_history_len": 2}, [7, 0, 0, 3.5], [64, 64, 64, 128]),
    "zero, most recent": ({"amax_compute_algo": "most_recent"}, [7, 0, 14], [64, 64, 32]),
    "infinite": ({"amax_history_len": 2}, [7, INF, 3.5, 3.5], [64, 64, 128, 128]),
    "not a number": ({"amax_history_len": 3}, [7, NAN, 3.5, NAN, 1.75], [64, 64, 64, 64, 128]),
    "not a number, most recent": ({"amax_compute_algo": "most_recent"}, [7, NAN, 14], [64, 64, 32]),
    "power of two": ({"power_of_two": True, "amax_history_len": 1}, [7, 5, 6.9, 7.1], [64, 64, 64, 32]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_sequences_by_hand(case):
    options, amaxes, scales = BY_HAND[case]
    assert run(DelayedScaling(**options), amaxes) == scales


@pytest.mark.parametrize("length", [3, 12, 50])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_many_tensors_at_once_against_a_plain_account(length, algorithm):
    recipe = DelayedScaling(margin=1, interval=2, amax_history_len=length, amax_compute_algo=algorithm)
    rng = np.random.default_rng(0)
    steps = np.exp(rng.normal(size=(12, 4, 3)) * 3).astype(np.float32)
    steps[rng.random(steps.shape) < 0.1] = 0
    steps[rng.random(steps.shape) < 0.1] = np.inf
    state = recipes.init(recipe, (4, 3))
    step = jax.jit(functools.partial(recipes.update, recipe))
    expected = np.ones((4, 3), np.float32)
    for n, amax in enumerate(steps):
        state = step(state, amax)
        seen = steps[max(0, n + 1 - length) : n + 1]
        seen = np.where(np.isfinite(seen), seen, 0)
        used = seen.max(0) if algorithm == "max" else seen[-1]
        for at in np.ndindex(4, 3):
            if n % 2 == 0 and np.isfinite(amax[at]):
                expected[at] = oracle.scale(used[at], expected[at], [448, 448, 57344][at[1]], margin=1)
        np.testing.assert_array_equal(np.asarray(state.scale).view(np.uint32), expected.view(np.uint32))
    assert state.count == 12


def test_an_input_a_million_times_larger_recovers_within_the_history():
    recipe = DelayedScaling(amax_history_len=5)
    scales = run(recipe, [7, 7, 7e6, *[7] * 6])
    assert scales[2] == pytest.approx(448 / 7e6)
    assert scales[2:7] == [scales[2]] * 5
    assert scales[7] == 64


def test_the_state_keeps_its_types_and_does_not_compile_again():
    recipe = DelayedScaling(amax_history_len=4)
    step = jax.jit(functools.partial(recipes.update, recipe))
    first = recipes.init(recipe, (2, 3), amax=jnp.float32([0, 7, 0]))
    state = step(step(first, jnp.ones((2, 3))), jnp.ones((2, 3)))
    kinds = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)
    assert kinds(first) == kinds(state)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(first.scale, [[1, 64, 1]] * 2)


def test_formats():
    assert DelayedScaling().dtypes == (E4M3, E4M3, E5M2)
    assert CurrentScaling().limits.tolist() == [448, 448, 57344]
    assert BlockScaling().dtypes == (E4M3,) * 3


WRONG = [
    (lambda: CurrentScaling(fp8_format="e5m2"), "fp8_format: expected one of hybrid, e4m3, found 'e5m2'; change it"),
    (lambda: DelayedScaling(margin=-1), "margin: expected a whole number from 0, found -1"),
    (lambda: DelayedScaling(interval=0), "interval: expected a whole number from 1, found 0"),
    (lambda: DelayedScaling(amax_history_len=1.5), "amax_history_len: expected a whole number from 1, found 1.5"),
    (
        lambda: DelayedScaling(amax_compute_algo="min"),
        "amax_compute_algo: expected one of max, most_recent, found 'min'",
    ),
]


@pytest.mark.parametrize(("make", "text"), WRONG)
def test_mistakes_are_named(make, text):
    with pytest.raises(JzeroError, match=text):
        make()
