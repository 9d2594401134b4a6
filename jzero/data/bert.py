"""Samples for a BERT: pairs of sentences from a file whose documents are made of sentences, with some tokens masked.

    [CLS] A … A [SEP] B … B [SEP] padding        without pairs: [CLS] A … A [SEP] padding

Each document is cut into runs of sentences of about T tokens, some of them shorter (`short_seq_prob`). A sample is one
run: A its first sentences, B the others, or in half of the samples (and where the run is one sentence) sentences of
another document (Devlin et al., https://arxiv.org/abs/1810.04805). Then 15% of the tokens are to be predicted: 80% of
these are replaced by [MASK], 10% by a random token, 10% stay.

The runs are a function of the seed; they are shuffled anew each epoch, and all else of sample k is drawn from a stream
of its own. So sample k is a function of the seed and k alone.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from grain.experimental import index_shuffle

from jzero.data.checks import check_source, first_foreign, foreign_token, sample_number
from jzero.data.indexed import IndexedDataset
from jzero.errors import JzeroError

_LENGTHS, _ORDER, _SAMPLE = 2, 3, 4  # keep the uses of a seed apart; 0 and 1 are those of `stream`
_NAMES = {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>"), "mask": ("[MASK]", "<mask>"), "pad": ("[PAD]", "<pad>")}


@dataclass(frozen=True, eq=False)
class BertTokens:
    """What a BERT's samples need to know of a vocabulary.

    Attributes:
        cls, sep, mask, pad: ids of the special tokens.
        ordinary: int32 [n], the ids of all tokens that are not special: those that replace others at random.
        continues: bool [vocabulary], tokens that continue a word; None where the vocabulary does not tell.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    ordinary: np.ndarray
    continues: np.ndarray | None = None


def bert_tokens(tokenizer: Any) -> BertTokens:
    """The special tokens of a tokenizer, and which of its tokens continue a word.

    Args:
        tokenizer: a `FileTokenizer`.

    Raises:
        JzeroError: it has no such tokens.

    Example:
        >>> import tempfile, pathlib
        >>> from jzero.data import train_tokenizer
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("the cat and the hat and the mat " * 20)
        >>> tokens = bert_tokens(train_tokenizer([folder / "a.txt"], folder / "tokenizer.json", vocab_size=60))
        >>> tokens.pad, tokens.cls, tokens.sep, tokens.mask
        (0, 2, 3, 4)
    """
    pieces: dict[str, int] = getattr(tokenizer, "pieces", {})
    found = {role: next((pieces[n] for n in names if n in pieces), None) for role, names in _NAMES.items()}
    missing = [_NAMES[role][0] for role, token in found.items() if token is None]
    if missing:
        raise JzeroError(
            f"model.tokenizer: expected a tokenizer with {', '.join(missing)} for model.type bert, found none; make "
            "one with `jzero data tokenizer`"
        )
    special = {*found.values(), *tokenizer.special_ids}
    ordinary = np.array(sorted(set(pieces.values()) - special), np.int32)
    continues = _continues(pieces, tokenizer.vocab_size)
    present = {role: token for role, token in found.items() if token is not None}
    return BertTokens(**present, ordinary=ordinary, continues=continues)


def _continues(pieces: dict[str, int], vocab_size: int) -> np.ndarray | None:
    """WordPiece marks what continues a word (##), byte-level BPE what begins one (Ġ)."""
    for mark, begins in (("##", False), ("Ġ", True)):
        marked = [token for piece, token in pieces.items() if piece.startswith(mark)]
        if marked:
            out = np.full(vocab_size, begins)
            out[marked] = not begins
            return out
    return None


class BertDataset:
    """An endless sequence of samples: `dataset[k]` exists for every k ≥ 0 and depends on the arguments and k only.

    Args:
        indexed: the file; a document's sequences are its sentences (`jzero data build --split-sentences`).
        seq_length: T, tokens of a sample.
        seed: non-negative integer.
        vocab_size: every token must be below it.
        tokens: the special tokens.
        documents: range (first, one past the last) of the documents used; None is all.
        masked_lm_prob: share of the tokens that are to be predicted.
        short_seq_prob: share of the runs that are cut to a random length.
        whole_word_masking: mask words, not tokens.
        binary_head: samples are pairs; False: all of a run is A.

    Attributes:
        indexed, documents: the arguments.

    Raises:
        JzeroError: an argument is out of range, the range holds too few sentences, or the vocabulary does not say where
            words begin. On reading: a token outside of the vocabulary.

    Example:
        >>> import tempfile, os
        >>> from jzero.data import IndexedDataset, IndexedWriter
        >>> prefix = os.path.join(tempfile.mkdtemp(), "text")
        >>> with IndexedWriter(prefix, "uint16") as writer:
        ...     writer.add([5, 6, 7, 8, 9], lengths=[3, 2])
        >>> tokens = BertTokens(cls=0, sep=1, mask=2, pad=3, ordinary=np.arange(5, 10, dtype=np.int32))
        >>> sample = BertDataset(IndexedDataset(prefix), seq_length=10, seed=1, vocab_size=10, tokens=tokens)[0]
        >>> sample["segments"].tolist(), sample["token_types"].tolist()
        ([1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 0, 0])
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        seed: int,
        vocab_size: int,
        tokens: BertTokens,
        documents: tuple[int, int] | None = None,
        masked_lm_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        whole_word_masking: bool = False,
        binary_head: bool = True,
    ):
        first, last = documents or (0, len(indexed.documents) - 1)
        self.indexed, self.documents = indexed, (first, last)
        self.seq_length, self.seed, self.vocab_size, self.tokens = seq_length, seed, vocab_size, tokens
        self.masked_lm_prob, self.short_seq_prob = masked_lm_prob, short_seq_prob
        self.whole_word_masking, self.binary_head = whole_word_masking, binary_head
        special = 3 if binary_head else 2  # [CLS], and a [SEP] behind each part
        check_source(indexed, seq_length, seed, least=special + 2)
        if whole_word_masking and tokens.continues is None:
            raise JzeroError(
                "model.data.whole_word_masking: expected a WordPiece or byte-level BPE vocabulary, which says where "
                "words begin, found another; set it to false"
            )
        self._room = seq_length - special  # tokens of text in a sample
        at = indexed.documents[first : last + 1]
        size = indexed.sizes[at[0] : at[-1]]
        full = size > 0  # what an empty sequence is for, only its writer knows
        starts = np.concatenate([[0], np.cumsum(size, dtype=np.int64)]) + indexed.document_starts[first]
        self._starts = np.append(starts[:-1][full], starts[-1])  # int64 [sentences + 1]: where each begins in the file
        self._document = np.concatenate([[0], np.cumsum(full)])[at - at[0]]  # int64 [documents + 1]: first sentences
        self._check_sentences()
        lengths = self._lengths(len(self._starts) - 1)
        self._first, self._last = runs(self._starts, self._document, lengths, 2 if binary_head else 1)
        self._length = lengths[self._first]

    def __len__(self) -> int:
        """Samples of an epoch; the samples after them are as valid."""
        return len(self._first)

    @property
    def distinct(self) -> int:
        """How many samples from the first on are all of different runs: those of the first epoch."""
        return len(self)

    def __getitem__(self, k: SupportsIndex) -> dict[str, np.ndarray]:
        """Sample k ≥ 0.

        Returns:
            int32 [T]: "tokens"; "labels", the tokens before they were masked (0 where nothing is to be predicted);
            "token_types", 0 for A and 1 for B; "segments", 1 for text and 0 for padding. float32 [T]: "loss_mask", 1
            where a token is to be predicted. With `binary_head`, int32 []: "is_random", 1 where B is not what follows.

        Raises:
            JzeroError: a token is outside of the vocabulary.
            IndexError: k is negative.
        """
        k = sample_number(k)
        epoch, at = divmod(k, len(self))
        run = index_shuffle(at, max_index=len(self) - 1, seed=_order(self.seed, epoch), rounds=4)
        random = _stream(self.seed, k, _SAMPLE)
        first, last, room = int(self._first[run]), int(self._last[run]), int(self._length[run])
        if not self.binary_head:
            whole = _shorten(self._read(first, last), room, random)
            return self._sample([whole], random)
        a, b, is_random = self._pair(first, last, room, random)
        return {**self._sample([a, b], random), "is_random": np.array(is_random, np.int32)}

    # --- sentences ---------------------------------------------------------------------------------------------------

    def _pair(
        self, first: int, last: int, room: int, random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """A and B, together at most `room` tokens, and whether B is random."""
        end_of_a = first + 1 if last - first == 1 else first + random.randint(1, last - first)
        a = self._read(first, end_of_a)
        is_random = last - first == 1 or random.random_sample() < 0.5
        if is_random:
            begin = self._elsewhere(first, last, random)
            document_end = self._document[np.searchsorted(self._document, begin, side="right")]
            wanted = self._starts[begin] + max(room - len(a), 1)
            b = self._read(begin, int(np.clip(np.searchsorted(self._starts, wanted), begin + 1, document_end)))
        else:
            b = self._read(end_of_a, last)
        size_a, size_b = shared(len(a), len(b), room)
        return _shorten(a, size_a, random), _shorten(b, size_b, random), is_random

    def _elsewhere(self, first: int, last: int, random: np.random.RandomState) -> int:
        """A sentence of another document; where there is none, one outside of the run."""
        document = int(np.searchsorted(self._document, first, side="right"))
        begin, end, count = self._document[document - 1], self._document[document], len(self._starts) - 1
        if end - begin == count:
            begin, end = first, last
        if end - begin == count:  # the run is all there is
            return first + random.randint(0, last - first)
        chosen = random.randint(0, count - (end - begin))
        return int(chosen + (end - begin) * (chosen >= begin))

    def _read(self, first: int, last: int) -> np.ndarray:
        """The tokens of sentences [first, last), int32."""
        begin, end = int(self._starts[first]), int(self._starts[last])
        tokens = self.indexed.tokens[begin:end]
        if (at := first_foreign(tokens, self.vocab_size)) is not None:
            raise foreign_token(self.indexed, begin + at, self.vocab_size)
        return tokens.astype(np.int32)

    def _lengths(self, count: int) -> np.ndarray:
        """int64 [count]: how many tokens a run that begins with this sentence is to have."""
        random = _stream(self.seed, 0, _LENGTHS)
        short = random.random_sample(count) < self.short_seq_prob
        return np.where(short, random.randint(2, self._room + 1, count), self._room)

    # --- a sample ----------------------------------------------------------------------------------------------------

    def _sample(self, parts: Sequence[np.ndarray], random: np.random.RandomState) -> dict[str, np.ndarray]:
        special, T = self.tokens, self.seq_length
        pieces = [np.array([special.cls], np.int32)]
        for part in parts:
            pieces += [part, np.array([special.sep], np.int32)]
        size = sum(map(len, pieces))
        labels = np.full(T, special.pad, np.int32)
        labels[:size] = np.concatenate(pieces)
        text = np.arange(T) < size
        begin_of_b = len(parts[0]) + 2
        is_word = text & (labels != special.cls) & (labels != special.sep)
        continues = self.tokens.continues if self.whole_word_masking else None
        tokens, chosen = mask(labels, is_word, self.masked_lm_prob, special, random, continues)
        return {
            "tokens": tokens,
            "labels": np.where(chosen, labels, np.int32(0)),
            "loss_mask": chosen.astype(np.float32),
            "token_types": (text & (np.arange(T) >= begin_of_b)).astype(np.int32),
            "segments": text.astype(np.int32),
        }

    def _check_sentences(self) -> None:
        first, last = self.documents
        per_document = np.diff(self._document)
        if not per_document.any() or (self.binary_head and per_document.max() < 2):
            found = "one sentence in each" if per_document.any() else "no sentences"
            raise JzeroError(
                f"{self.indexed.prefix}: expected documents of several sentences in [{first}, {last}), found {found}; "
                "build the file with `jzero data build --split-sentences`, or change splits_string"
            )


def runs(starts: np.ndarray, documents: np.ndarray, lengths: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into runs of sentences, from the first on: each ends when it has as many tokens as it should.

    A run has `least` sentences where the document has them left; what is left may be too short. A single sentence that
    would be left joins the run before it.

    Args:
        starts: int64 [S + 1], where each sentence begins, and where the last one ends.
        documents: int64 [D + 1], the first sentence of each document, and S.
        lengths: int64 [S], tokens of a run that begins with this sentence.
        least: sentences of a run.

    Returns:
        First sentence of each run, and one past its last, int64 [N] each.

    Example:
        >>> [x.tolist() for x in runs(np.arange(0, 60, 10), np.array([0, 5]), np.full(5, 20), 2)]
        [[0, 2], [2, 5]]
    """
    count = len(starts) - 1
    here = np.arange(count)
    end = np.repeat(documents[1:], np.diff(documents))  # of each sentence's document
    after = np.searchsorted(starts, starts[:-1] + lengths)
    after = np.minimum(np.maximum(after, here + least), end)
    after = np.where(end - after == 1, end, after) if least > 1 else after
    current = documents[:-1][np.diff(documents) > 0]
    firsts = []
    while len(current):
        firsts.append(current)
        following = after[current]
        current = following[following < end[current]]
    first = np.sort(np.concatenate(firsts)) if firsts else np.zeros(0, np.int64)
    return first, after[first]


def shared(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of A and B stay, if they are taken from the longer one until `room` are left.

    Args:
        a, b: tokens of A and B.
        room: tokens of both together.

    Example:
        >>> shared(10, 3, 8), shared(9, 9, 7), shared(2, 3, 8)
        ((5, 3), (4, 3), (2, 3))
    """
    if a + b <= room:
        return a, b
    small = min(a, b, room // 2)
    return (room - small, small) if a >= b else (small, room - small)


def mask(
    labels: np.ndarray,
    is_word: np.ndarray,
    share: float,
    special: BertTokens,
    random: np.random.RandomState,
    continues: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses tokens to be predicted and replaces 80% of them by [MASK], 10% by random tokens.

    Args:
        labels: int32 [T], the tokens.
        is_word: bool [T], those that may be chosen.
        share: of them, at least one.
        special: the special tokens.
        random: the source of randomness.
        continues: bool [vocabulary]: choose whole words; a word that would be more than the share is left out.

    Returns:
        int32 [T] with replacements, bool [T] the chosen ones.

    Example:
        >>> special = BertTokens(cls=0, sep=1, mask=2, pad=3, ordinary=np.arange(5, 9, dtype=np.int32))
        >>> labels = np.arange(5, 9, dtype=np.int32)
        >>> tokens, chosen = mask(labels, np.ones(4, bool), 0.5, special, np.random.RandomState(0))
        >>> int(chosen.sum()), bool((tokens == labels)[~chosen].all())
        (2, True)
    """
    places = np.flatnonzero(is_word)
    count = max(1, round(len(places) * share))
    if continues is None:
        at = places[random.permutation(len(places))[:count]]
    else:
        begins = ~continues[labels[places]] | np.append(True, np.diff(places) > 1)
        words = np.split(places, np.flatnonzero(begins)[1:])
        picked: list[np.ndarray] = []
        for i in random.permutation(len(words)):
            if not picked or sum(map(len, picked)) + len(words[i]) <= count:
                picked.append(words[i])
        at = np.concatenate(picked)
    chosen = np.zeros(len(labels), bool)
    chosen[at] = True
    tokens, draw = labels.copy(), random.random_sample(len(at))
    tokens[at[draw < 0.8]] = special.mask
    changed = at[draw >= 0.9]
    tokens[changed] = special.ordinary[random.randint(0, len(special.ordinary), len(changed))]
    return tokens, chosen


def _shorten(tokens: np.ndarray, size: int, random: np.random.RandomState) -> np.ndarray:
    """`size` of the tokens; each of the others is dropped at either end by chance."""
    extra = len(tokens) - size
    front = random.binomial(extra, 0.5) if extra > 0 else 0
    return tokens[front : front + size]


@functools.lru_cache(4)
def _order(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch, _ORDER)).generate_state(1)[0])


def _stream(seed: int, number: int, use: int) -> np.random.RandomState:
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, number, use))))
