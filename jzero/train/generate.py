"""Text from a trained model: the next token is drawn, appended, and the model is asked again.

The model sees a window of fixed size, so one compiled function serves every token: positions after the text are
padding, which a causal model does not look at, and a full window drops its first token. (W window, V vocabulary)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jzero.data.text import Tokenizer
from jzero.errors import JzeroError
from jzero.train.layout import threefry_key

_LARGEST = 2**31 - 1
_CHUNK = 16  # tokens per call of the compiled function: text appears as it is made, and Ctrl-C works


def generate(
    program: Any,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    fp8: Any = (),
) -> str:
    """The prompt and its continuation.

    Args:
        program: what the model was built by (`jzero.train.step.build_program`).
        params: its parameters.
        tokenizer: that of the training data.
        prompt: text to continue; the end-of-document token stands in for an empty one.
        tokens: how many tokens to add at most; the end of a document ends the text earlier.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draw from this many likeliest tokens; 0: from all.
        seed: of the draws. The same seed and parameters give the same text.
        fp8: the training state's field, for delayed scales.

    Returns:
        Text.

    Raises:
        JzeroError: a number is out of range.
    """
    options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    drawn = stream(program, params, tokenizer, prompt, **options, fp8=fp8)
    return prompt + tokenizer.decode(np.concatenate([np.zeros(0, np.int32), *drawn]))


def stream(
    program: Any,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    fp8: Any = (),
) -> Iterator[np.ndarray]:
    """The tokens of `generate` without the prompt, int32 [n] a few at a time, as they are drawn."""
    check_options(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    window, length = _window(tokenizer, prompt, program.config.model.encoder_seq_length)
    key = threefry_key(seed)
    for first in range(0, tokens, _CHUNK):
        count = min(_CHUNK, tokens - first)
        new, made, window, length = _draw(
            params, fp8, window, length, key, first, count, temperature,
            program=program, top_k=top_k, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, greedy=temperature == 0,
        )  # fmt: skip
        new = np.asarray(jax.block_until_ready(new))[: int(made)]
        yield new[new != tokenizer.eod]
        if made < count or (len(new) and new[-1] == tokenizer.eod):
            return


def check_options(**options: float) -> None:
    """Raises JzeroError where tokens, temperature, top_k or seed is out of range."""
    for name, value in options.items():
        if not 0 <= value <= _LARGEST:  # false for nan
            limit = "at least 0" if value < 0 else f"a number in 0..{_LARGEST}"
            raise JzeroError(f"{name}: expected {limit}, found {value}")


def generate_from_run(
    run: Path, prompt: str, *, checkpoint: str = "best", note: Any = print, **options: Any
) -> Iterator[str]:
    """Text from a checkpoint of a run folder, on one device of this machine, in pieces as it is made.

    Args:
        run: the run folder.
        prompt: text to continue.
        checkpoint: "best" (lowest validation loss; the last if none has one), "last", or a step.
        note: called with one line for each checkpoint that cannot be read.
        **options: tokens, temperature, top_k, seed of `generate`.

    Raises:
        JzeroError: there is no such run, or no such checkpoint that can be read.
    """
    from jzero.data.loader import config_tokenizer
    from jzero.train.checkpoint import load_part
    from jzero.train.config import load_config
    from jzero.train.devices import build_mesh
    from jzero.train.memory import memory_errors
    from jzero.train.step import build_program

    check_options(**options)
    run = Path(os.path.expanduser(run))
    if not (run / "config.yaml").is_file():
        raise JzeroError(f"{run}: expected the folder of a run, found no config.yaml in it; give exp_dir/name of a run")
    config, mesh = build_mesh(load_config(run / "config.yaml", _ONE_DEVICE), lambda line: None)
    tokenizer = config_tokenizer(config)
    program = build_program(config, mesh, config.model.vocab_size or tokenizer.vocab_size)
    with memory_errors(config):
        fields = {"params": program.abstract.params, "fp8": program.abstract.fp8}
        wanted = {name: tree for name, tree in fields.items() if jax.tree.leaves(tree)}
        found = {"fp8": (), **load_part(run, wanted, checkpoint, note, program.layout.plan)}
        yield prompt
        drawn = stream(program, found["params"], tokenizer, prompt, **options, fp8=found["fp8"])
        yield from text_of(drawn, tokenizer)


def text_of(pieces: Iterable[np.ndarray], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens int32 [n] that come a few at a time. Half a character waits for its other half.

    Example:
        >>> from jzero.data.text import ByteTokenizer
        >>> list(text_of([np.array([65, 0xC3]), np.array([0xA9])], ByteTokenizer()))
        ['A', 'é', '']
    """
    drawn, shown = np.zeros(0, np.int32), 0
    for piece in pieces:
        drawn = np.concatenate([drawn, piece])
        ready = tokenizer.decode(drawn).rstrip("\ufffd")
        yield ready[shown:]
        shown = max(shown, len(ready))
    yield tokenizer.decode(drawn)[shown:]


_ONE_DEVICE = (
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "model.tensor_model_parallel_size=1",
    "model.sequence_parallel=false",
    "model.pipeline_model_parallel_size=1",
    "model.virtual_pipeline_model_parallel_size=null",
    "model.replica_parallel_size=1",
    "model.micro_batch_size=1",
    "model.global_batch_size=1",
    "model.attention_implementation=auto",  # cuDNN's, if the run asked for it, may not be here
    "model.optim.policy=replicated",
    "model.optim.overlap_param_sync=false",
)


def _window(tokenizer: Tokenizer, prompt: str, size: int) -> tuple[Array, Array]:
    """The end of the prompt in a window int32 [W], padded with zeros, and its length."""
    ids = tokenizer.encode(prompt)[-size:]
    if not len(ids):
        ids = np.array([tokenizer.eod], np.int32)
    return jnp.asarray(np.pad(ids, (0, size - len(ids)))), jnp.int32(len(ids))


@functools.partial(jax.jit, static_argnames=("program", "top_k", "vocab_size", "eod", "greedy"))
def _draw(
    params: Any,
    fp8: Any,
    window: Array,  # int32 [W]
    length: Array,  # int32 []: how much of the window is text
    key: Array,
    first: int,  # number of the first token drawn, for its key
    count: int,  # at most _CHUNK
    temperature: float,
    *,
    program: Any,
    top_k: int,
    vocab_size: int,
    eod: int,
    greedy: bool,
) -> tuple[Array, Array, Array, Array]:
    """Draws up to `count` tokens: (tokens int32 [_CHUNK], how many, window, length)."""

    def more(carry: tuple) -> Array:
        i, out, *_ = carry
        return (i < count) & ((i == 0) | (out[jnp.maximum(i - 1, 0)] != eod))

    def one(carry: tuple) -> tuple:
        i, out, window, length = carry
        logits = program.logits(params, window[None], fp8)[0, length - 1, :vocab_size]  # the rest of V is padding
        token = _choose(logits, jax.random.fold_in(key, first + i), temperature, top_k, greedy)
        window = jnp.where(length == len(window), jnp.roll(window, -1), window)
        length = jnp.minimum(length + 1, len(window))
        return i + 1, out.at[i].set(token), window.at[length - 1].set(token), length

    made, out, window, length = jax.lax.while_loop(
        more, one, (jnp.int32(0), jnp.zeros(_CHUNK, jnp.int32), window, length)
    )
    return out, made, window, length


def _choose(logits: Array, key: Array, temperature: float | Array, top_k: int, greedy: bool) -> Array:
    """A token from logits fp32 [V]."""
    if greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    if 0 < top_k < len(logits):
        least = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
