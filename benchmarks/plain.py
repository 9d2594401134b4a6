"""The GPT of `configs/gpt_tiny.yaml` as one would write it in plain JAX: no sharded state, optax.adamw under `jit`.

Nothing of jzero is used, but the parameters have the same tree, so that both sides start from the same numbers.
Letters: B batch, T sequence, D model, H heads, K head width, L layers, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax


def layer_norm(x, w):
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * w["gain"] + w["bias"]


def block(x, w):
    h = layer_norm(x, w["attention_norm"])
    qkv = jnp.einsum("btd,dhck->btchk", h, w["attention"]["qkv"]["weight"])
    q, k, v = jnp.moveaxis(qkv + w["attention"]["qkv"]["bias"].swapaxes(0, 1), 2, 0)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", a, w["attention"]["out"]["weight"]) + w["attention"]["out"]["bias"]
    h = layer_norm(x, w["mlp_norm"])
    h = jax.nn.gelu(h @ w["mlp"]["up"]["weight"] + w["mlp"]["up"]["bias"])
    return x + h @ w["mlp"]["down"]["weight"] + w["mlp"]["down"]["bias"]


def loss_fn(params, batch, body, vocabulary):
    x = params["embedding"]["token"][batch["tokens"]] + params["embedding"]["position"][: batch["tokens"].shape[1]]
    x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, params["blocks"])
    logits = layer_norm(x, params["final_norm"]) @ params["embedding"]["token"].T
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocabulary, logits, -1e30)  # the table's last rows are padding
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def make_step(tx, remat: bool, vocabulary: int):
    """`(params, state, batch) -> (params, state, loss, norm)`, jitted and donated; the compiler places everything."""
    body = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable) if remat else block

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, body, vocabulary)
        norm = optax.tree.norm(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, norm

    return step
