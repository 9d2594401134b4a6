"""What a trained BERT puts in the place of [MASK]. (T positions, V vocabulary)"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.data.bert import bert_tokens
from jzero.data.text import Tokenizer
from jzero.errors import JzeroError

MASK = "[MASK]"


class Guess(NamedTuple):
    """A token for a gap."""

    token: str  # its text, or nothing for a token that has none
    probability: float  # 0 to 1, among all tokens of the vocabulary


def guesses(
    program: Any, params: Any, tokenizer: Tokenizer, text: str, top: int = 5, fp8: Any = ()
) -> list[list[Guess]]:
    """The likeliest tokens of every gap in a text.

    Args:
        program: what the BERT was built by (`jzero.train.step.build_program`).
        params: its parameters, as the program stores them.
        tokenizer: that of the training data.
        text: with "[MASK]" for every gap, each of one token.
        top: how many tokens for each.
        fp8: `TrainState.fp8`, where scales are delayed.

    Returns:
        Per gap, in the order of the text, the `top` likeliest tokens, likeliest first.

    Raises:
        JzeroError: the text has no gap, or is longer than the model's sequences; the tokenizer is of no BERT.
    """
    special = bert_tokens(tokenizer)
    pieces = tokenizer.encode_batch(text.split(MASK))
    gap = np.array([special.mask], np.int32)
    inside = np.concatenate([x for piece in pieces for x in (gap, piece)][1:])
    ids = np.concatenate([[special.cls], inside, [special.sep]]).astype(np.int32)
    size = program.config.model.encoder_seq_length
    if len(pieces) == 1:
        raise JzeroError(f"prompt: expected a text with {MASK} where a token is missing, found none in: {text}")
    if len(ids) > size:
        raise JzeroError(
            f"prompt: expected at most {size - 2} tokens (model.encoder_seq_length without [CLS] and [SEP]), found "
            f"{len(ids) - 2}; shorten it"
        )
    whole = np.full(size, special.pad, np.int32)
    whole[: len(ids)] = ids
    segments = (np.arange(size) < len(ids)).astype(np.int32)
    batch = {"tokens": whole, "segments": segments, "token_types": np.zeros_like(whole)}
    logits = program.logits(params, {name: jnp.asarray(x)[None] for name, x in batch.items()}, fp8)
    places = np.flatnonzero(ids == special.mask)
    chances = np.asarray(jax.block_until_ready(jax.nn.softmax(logits[0, places, : tokenizer.vocab_size])))
    best = np.argsort(-chances, axis=-1, kind="stable")[:, :top]
    return [
        [Guess(tokenizer.decode([i]), float(row[i])) for i in order] for row, order in zip(chances, best, strict=True)
    ]


def fill(program: Any, params: Any, tokenizer: Tokenizer, text: str, fp8: Any = ()) -> str:
    """The text with the likeliest token in every gap; arguments and errors as for `guesses`.

    notebooks/05_bert.ipynb does so with a model before and after its training.
    """
    first, *rest = text.split(MASK)
    found = guesses(program, params, tokenizer, text, 1, fp8)
    return first + "".join(guess[0].token.removeprefix("##") + part for guess, part in zip(found, rest, strict=True))
