"""Sampling: the right tokens with the right probabilities, the same for the same seed, compiled once."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero import JzeroError
from jzero.data.text import ByteTokenizer
from jzero.train.generate import generate, text_of

WINDOW = 12


class Scripted:
    """A model whose logits at a position depend on the token there alone: `table[token]`."""

    def __init__(self, table, window=WINDOW):
        self.config = SimpleNamespace(model=SimpleNamespace(encoder_seq_length=window))
        self.table = jnp.asarray(table, jnp.float32)
        self.traced = 0

    def logits(self, params, tokens, fp8):
        self.traced += 1
        assert tokens.shape == (1, self.config.model.encoder_seq_length)
        return self.table[tokens] * params


def successor(token: int) -> np.ndarray:
    """Logits that prefer the next letter of the alphabet, then the one after it; "z" is followed by the end."""
    logits = np.full(384, 0.0)
    logits[300:] = 99.0  # padding of the vocabulary, never to be drawn
    logits[256 if token == ord("z") else (token + 1) % 256] = 9.0
    logits[(token + 2) % 256] += 8.0
    return logits


ALPHABET = Scripted([successor(t) for t in range(384)])


def sample(program=ALPHABET, prompt="a", **options):
    return generate(program, jnp.float32(1), ByteTokenizer(), prompt, **options)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-3, "top_k": 0}])
def test_the_likeliest_token_always(options):
    assert sample(tokens=5, **options) == "abcdef"


def test_the_text_may_be_longer_than_the_window():
    assert sample(prompt="a", tokens=20, temperature=0.0) == "abcdefghijklmnopqrstu"
    assert sample(prompt="abcdefghijklmnopqrs", tokens=2, temperature=0.0) == "abcdefghijklmnopqrstu"


def test_the_window_keeps_the_newest_text():
    """A model that repeats the token three places back, so that a shifted window shows."""

    class ThreeBack(Scripted):
        def logits(self, params, tokens, fp8):
            return jax.nn.one_hot(jnp.roll(tokens, 3, axis=1), 384) * params

    assert sample(ThreeBack(np.zeros((1, 1))), "abcd", tokens=30, temperature=0.0) == ("abcd" * 9)[:34]


@pytest.mark.parametrize("tokens", [0, 3, 25, 200])
def test_the_end_of_a_document_ends_the_text(tokens):
    assert sample(tokens=tokens, temperature=0.0) == "abcdefghijklmnopqrstuvwxyz"[: tokens + 1]


def test_an_empty_prompt_begins_a_document():
    assert sample(prompt="", tokens=3, temperature=0.0) == "\x01\x02\x03"  # 256 is followed by (256 + 1) % 256


def test_probabilities_follow_temperature_and_top_k():
    table = np.full((384, 384), -50.0)
    table[:, [65, 66, 67]] = np.log([0.5, 0.3, 0.2])
    program = Scripted(table)
    text = sample(program, tokens=3000, temperature=1.0, top_k=0, seed=3)[1:]
    assert [text.count(c) / 3000 for c in "ABC"] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    text = sample(program, tokens=3000, temperature=0.5, top_k=0, seed=4)[1:]  # squares: 25, 9, 4 of 38
    assert [text.count(c) / 3000 for c in "ABC"] == pytest.approx([25 / 38, 9 / 38, 4 / 38], abs=0.03)
    text = sample(program, tokens=3000, temperature=1.0, top_k=2, seed=5)[1:]
    assert [text.count(c) / 3000 for c in "ABC"] == pytest.approx([5 / 8, 3 / 8, 0], abs=0.03)


def test_the_seed_decides():
    program = Scripted(np.zeros((384, 384)))
    one, same, other = (sample(program, tokens=40, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert sample(program, tokens=20, seed=1) == one[:21]  # fewer tokens are a beginning of more


def test_compiled_once_for_any_number_of_tokens():
    program = Scripted(np.zeros((384, 384)), window=10)
    sample(program, tokens=5)
    traced = program.traced
    sample(program, prompt="another text", tokens=100, seed=7, temperature=0.3)
    assert program.traced == traced
    sample(program, tokens=5, top_k=3)
    assert program.traced > traced


@pytest.mark.parametrize(("name", "value"), [("tokens", -1), ("temperature", -0.1), ("top_k", -5), ("seed", -1)])
def test_numbers_out_of_range(name, value):
    with pytest.raises(JzeroError, match=f"^{name}: expected at least 0, found {value}$"):
        sample(**{"tokens": 1, name: value})


def test_half_a_character_waits_for_its_other_half():
    e = "é".encode()
    pieces = [np.array([65]), np.array([e[0]]), np.array([e[1], 66]), np.array([e[0]])]
    assert list(text_of(pieces, ByteTokenizer())) == ["A", "", "éB", "", "\ufffd"]
