"""A GPT in NumPy and float64, one sample, one head and one layer at a time, written from the formulas.

It shares nothing with the package but the layout of the parameters.
"""

import math

import numpy as np


def norm(x, p, config):
    if config.normalization == "rmsnorm":
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.layernorm_epsilon) * p["gain"]
    centred = x - np.mean(x, -1, keepdims=True)
    variance = np.mean(centred**2, -1, keepdims=True)
    return centred / np.sqrt(variance + config.layernorm_epsilon) * p["gain"] + p["bias"]


def rotary(x, positions, config):
    """x [T, K]: channels i and i + width/2 are one complex number, turned by position · base^(-2i/width)."""
    width = int(x.shape[-1] * config.rotary_percentage)
    half = width // 2
    speed = np.array([config.rotary_base ** (-2 * i / width) for i in range(half)])
    turned = (x[:, :half] + 1j * x[:, half:width]) * np.exp(1j * positions[:, None] * speed)
    return np.concatenate([turned.real, turned.imag, x[:, width:]], -1)


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def head(query, key, value, segments):
    """One head: [T, K] each -> [T, K]."""
    out = np.zeros_like(value)
    for t in range(len(query)):
        seen = [s for s in range(t + 1) if segments[s] == segments[t]]
        out[t] = softmax(key[seen] @ query[t] / math.sqrt(query.shape[-1])) @ value[seen]
    return out


def attention(x, p, config, positions, segments):
    per_group = config.num_attention_heads // config.query_groups
    weight = p["qkv"]["weight"]
    bias = p["qkv"].get("bias", np.zeros(weight.shape[1:]))

    def project(g, role):
        y = x @ weight[:, g, role] + bias[g, role]
        turns = config.position_embedding_type == "rope" and role <= per_group
        return rotary(y, positions, config) if turns else y

    out = np.zeros_like(x)
    for h in range(config.num_attention_heads):
        g, r = divmod(h, per_group)
        context = head(project(g, r), project(g, per_group), project(g, per_group + 1), segments)
        out += context @ p["out"]["weight"][h]
    return out + p["out"].get("bias", 0)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, p, config):
    weight, bias = p["up"]["weight"], p["up"].get("bias")
    if config.activation == "swiglu":
        gate, up = (x @ weight[:, i] + (0 if bias is None else bias[i]) for i in range(2))
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = gelu(x @ weight + (0 if bias is None else bias))
    return hidden @ p["down"]["weight"] + p["down"].get("bias", 0)


def layer(tree, i):
    return {k: layer(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}


def sample_logits(params, config, tokens, positions, segments):
    x = params["embedding"]["token"][tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + params["embedding"]["position"][positions]
    for i in range(config.num_layers):
        p = layer(params["blocks"], i)
        x = x + attention(norm(x, p["attention_norm"], config), p["attention"], config, positions, segments)
        x = x + mlp(norm(x, p["mlp_norm"], config), p["mlp"], config)
    table = params["head"]["weight"] if "head" in params else params["embedding"]["token"]
    return norm(x, params["final_norm"], config) @ table.T


def logits(params, config, tokens, positions=None, segments=None):
    """tokens [B, T] -> [B, T, V]."""
    rows = []
    for b, row in enumerate(tokens):
        at = np.arange(len(row)) if positions is None else positions[b]
        part = np.zeros(len(row)) if segments is None else segments[b]
        rows.append(sample_logits(params, config, row, at, part))
    return np.stack(rows)


def losses(params, config, tokens, labels, positions=None, segments=None):
    """-log softmax(logits)[label] of each token, [B, T]."""
    scores = logits(params, config, tokens, positions, segments)
    out = np.zeros(labels.shape)
    for b, t in np.ndindex(*labels.shape):
        out[b, t] = -np.log(softmax(scores[b, t])[labels[b, t]])
    return out


def perturbed(tree, path, direction):
    """The tree with `direction` added to the leaf at `path`, a tuple of keys."""
    if not path:
        return tree + direction
    return {**tree, path[0]: perturbed(tree[path[0]], path[1:], direction)}


def directional_derivative(f, tree, path, direction, step=1e-5):
    """Central difference of f(tree) along `direction` of one leaf."""
    up, down = (f(perturbed(tree, path, sign * step * direction)) for sign in (1, -1))
    return (up - down) / (2 * step)
