"""A BERT in NumPy and float64, one sample, one head and one layer at a time, written from the formulas.

It shares nothing with the package but the layout of the parameters.
"""

import math

import numpy as np
from oracles.gpt import layer, mlp, norm, softmax

_erf = np.vectorize(math.erf)


def gelu(x, config):
    if config.activation == "gelu_exact":
        return x * (1 + _erf(x / math.sqrt(2))) / 2
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, p, config, text):
    """x [T, D]; text: bool [T], False for padding, which nobody sees."""
    out = np.zeros_like(x)
    for h in range(config.num_attention_heads):
        query, key, value = (x @ p["qkv"]["weight"][:, h, role] + p["qkv"]["bias"][h, role] for role in range(3))
        for t in range(len(x)):
            weights = softmax(key[text] @ query[t] / math.sqrt(query.shape[-1]))
            out[t] += weights @ value[text] @ p["out"]["weight"][h]
    return out + p["out"]["bias"]


def feed_forward(x, p, config):
    if config.activation == "gelu":
        return mlp(x, p, config)
    return gelu(x @ p["up"]["weight"] + p["up"]["bias"], config) @ p["down"]["weight"] + p["down"]["bias"]


def sample(params, config, tokens, types, text):
    """Logits of one sample's tokens [T, V], and of its pair [2]."""
    table = params["embedding"]
    x = table["token"][tokens] + table["position"][: len(tokens)] + table["token_type"][types]
    post = config.transformer_block_type == "post_ln"
    x = norm(x, table["norm"], config) if post else x
    for i in range(config.num_layers):
        p = layer(params["blocks"], i)
        if post:
            x = norm(x + attention(x, p["attention"], config, text), p["attention_norm"], config)
            x = norm(x + feed_forward(x, p["mlp"], config), p["mlp_norm"], config)
        else:
            x = x + attention(norm(x, p["attention_norm"], config), p["attention"], config, text)
            x = x + feed_forward(norm(x, p["mlp_norm"], config), p["mlp"], config)
    x = x if post else norm(x, params["final_norm"], config)
    transform = params["head"]["transform"]
    hidden = norm(gelu(x @ transform["weight"] + transform["bias"], config), params["head"]["norm"], config)
    pooled = np.tanh(x[0] @ params["pooler"]["weight"] + params["pooler"]["bias"])
    pair = pooled @ params["binary_head"]["weight"] + params["binary_head"]["bias"]
    return hidden @ table["token"].T + params["head"]["bias"], pair


def logits(params, config, batch):
    """[B, T, V] and [B, 2]."""
    rows = [
        sample(params, config, tokens, types, text == 1)
        for tokens, types, text in zip(batch["tokens"], batch["token_types"], batch["segments"], strict=True)
    ]
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def means(params, config, batch):
    """Loss of masked tokens and of pairs, and the share of each that is right: of the whole batch."""
    scores, pairs = logits(params, config, batch)
    scores = scores[..., : config.vocab_size - config.vocab_padding]  # padding is no token
    found = {"lm_loss": [], "lm_accuracy": [], "nsp_loss": [], "nsp_accuracy": []}
    for b, t in np.argwhere(batch["loss_mask"] == 1):
        found["lm_loss"].append(-np.log(softmax(scores[b, t])[batch["labels"][b, t]]))
        found["lm_accuracy"].append(scores[b, t].argmax() == batch["labels"][b, t])
    for row, label in zip(pairs, batch["is_random"], strict=True):
        found["nsp_loss"].append(-np.log(softmax(row)[label]))
        found["nsp_accuracy"].append(row.argmax() == label)
    return {name: float(np.mean(values)) for name, values in found.items()}


def loss(params, config, batch):
    found = means(params, config, batch)
    return found["lm_loss"] + found["nsp_loss"]
