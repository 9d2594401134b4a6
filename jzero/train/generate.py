"""Text from a trained model: the next token is drawn, appended, and the model is asked again.

The model sees a window of fixed size, so one compiled function serves every token: positions after the text are
padding, which a causal model does not look at, and a full window drops its first token. (W window, V vocabulary)
"""

from __future__ import annotations

import functools
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
        params: its parameters, as the program stores them.
        tokenizer: that of the training data.
        prompt: text to continue; the end-of-document token stands in for an empty one.
        tokens: how many tokens to add at most; the end of a document ends the text earlier.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draw from this many likeliest tokens; 0: from all.
        seed: of the draws. The same seed and parameters give the same text.
        fp8: `TrainState.fp8`, where scales are delayed.

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
    """The tokens of `generate` without the prompt, int32 [n] a few at a time, as they are drawn.

    Arguments and errors as for `generate`.
    """
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
    """Refuses options of `generate` that are out of range.

    Args:
        **options: by name; all from 0 to 2³¹ - 1.

    Raises:
        JzeroError: names the option.
    """
    for name, value in options.items():
        if not 0 <= value <= _LARGEST:  # false for nan
            limit = "at least 0" if value < 0 else f"a number in 0..{_LARGEST}"
            raise JzeroError(f"{name}: expected {limit}, found {value}")


def generate_from_run(
    run: Path, prompt: str, *, checkpoint: str = "best", note: Any = print, **options: Any
) -> Iterator[str]:
    """Text from a model that is there already, on one device of this machine, in pieces as it is made.

    Args:
        run: the run folder, or whatever else `open_model` takes.
        prompt: text to continue; for a BERT, to be filled in where it says [MASK].
        checkpoint: "best" (lowest validation loss; the last if none has one), "last", or a step.
        note: called with one line for each checkpoint that cannot be read.
        **options: tokens, temperature, top_k, seed of `generate`.

    Raises:
        JzeroError: there is no such run, or no such checkpoint that can be read.
    """
    from jzero.train.fill import fill
    from jzero.train.memory import memory_errors
    from jzero.train.weights import open_model

    check_options(**options)
    model = open_model(run, checkpoint=checkpoint, note=note)
    with memory_errors(model.config):
        if model.config.model.type == "bert":
            yield fill(model.program, model.params, model.tokenizer, prompt, model.fp8)
            return
        yield prompt
        drawn = stream(model.program, model.params, model.tokenizer, prompt, **options, fp8=model.fp8)
        yield from text_of(drawn, model.tokenizer)


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
