"""Adam, AdamW, momentum and Lion in NumPy and float64, one array at a time, written from their formulas alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, dict, int, str], np.ndarray]
"""(gradient, parameter, this leaf's state, step count from 1, name) -> new parameter."""


def adam(lr, *, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, l2=False, bias_correction=True, decay=None) -> Rule:
    """Kingma & Ba; decay as Loshchilov & Hutter, or added to the gradient (`l2`). `decay(name, shape)`: who decays."""

    def step(g, p, state, t, name):
        wd = weight_decay if decay is None or decay(name, p.shape) else 0.0
        if l2:
            g = g + wd * p
        m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
        if bias_correction:
            m, v = m / (1 - b1**t), v / (1 - b2**t)
        u = m / (np.sqrt(v) + eps)
        if not l2:
            u = u + wd * p
        return p - (lr(t - 1) if callable(lr) else lr) * u

    return step


def sgd(lr, *, momentum=0.0) -> Rule:
    def step(g, p, state, t, name):
        del t, name
        m = state["m"] = momentum * state.get("m", 0.0) + g
        return p - lr * m

    return step


def lion(lr, *, b1=0.9, b2=0.99, weight_decay=1e-3) -> Rule:
    """Chen et al., arXiv 2302.06675, algorithm 2."""

    def step(g, p, state, t, name):
        del t, name
        m = state.get("m", 0.0)
        u = np.sign(b1 * m + (1 - b1) * g) + weight_decay * p
        state["m"] = b2 * m + (1 - b2) * g
        return p - lr * u

    return step


def clip(grads: Mapping[str, np.ndarray], max_norm: float) -> Arrays:
    """Apex's clip_grad_norm: g * min(1, max_norm / (|g| + 1e-6)), over all arrays."""
    factor = min(1.0, max_norm / (norm(grads) + 1e-6))
    return {name: g * factor for name, g in grads.items()}


def norm(grads: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads.values())))


def train(rule: Rule, params: Mapping[str, np.ndarray], gradients: Callable[[Arrays], Arrays], steps: int) -> Arrays:
    """`steps` steps from `params` with the gradients that `gradients(params)` gives."""
    values = {name: np.asarray(p, np.float64) for name, p in params.items()}
    state: dict[str, dict] = {name: {} for name in values}
    for t in range(1, steps + 1):
        grads = gradients(values)
        values = {
            name: rule(np.asarray(grads[name], np.float64), p, state[name], t, name) for name, p in values.items()
        }
    return values
