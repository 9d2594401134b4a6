"""Samples for a GPT: windows of T + 1 tokens, cut from a shuffled stream of documents."""

from typing import SupportsIndex

import numpy as np

from jzero.data.checks import check_source, first_foreign, foreign_token, sample_number
from jzero.data.indexed import IndexedDataset
from jzero.data.stream import TokenStream, sample_order
from jzero.errors import JzeroError


class GPTDataset:
    """An endless sequence of samples: `dataset[k]` exists for every k ≥ 0 and depends on the arguments and k only.

    Documents are joined end to end and cut into windows of `seq_length` + 1 tokens that overlap by one, so every token
    is an input exactly once per epoch. Documents and windows are shuffled anew each epoch (see `jzero.data.stream`).

    Args:
        indexed: the file.
        seq_length: T, tokens of a sample.
        seed: non-negative integer.
        vocab_size: every token must be below it.
        documents: range (first, one past the last) of the documents used; None is all.
        eod: the token that ends a document; needed by the last three options.
        shuffle_documents: False keeps the order of documents; windows are shuffled still (as in NeMo).
        reset_position_ids: add "positions", which begin at 0 after each `eod`.
        reset_attention_mask: add "segments", which grow by one after each `eod`; attention stays inside a segment.
        eod_mask_loss: no loss where the *input* is `eod`, that is on the first token of the next document (as in
            Megatron).

    Attributes:
        indexed: the file.
        documents: the range used; its tokens are `indexed.tokens[start of first : start of last]`, see
            `document_starts`.

    Raises:
        JzeroError: the tokens are not integers, or the range holds none. On reading: a token outside of the vocabulary.

    Example:
        >>> import tempfile, os
        >>> from jzero.data import IndexedDataset, IndexedWriter
        >>> prefix = os.path.join(tempfile.mkdtemp(), "text")
        >>> with IndexedWriter(prefix, "uint16") as writer:
        ...     writer.add([5, 6, 7, 8, 9])
        >>> sample = GPTDataset(IndexedDataset(prefix), seq_length=2, seed=1, vocab_size=10, shuffle_documents=False)[1]
        >>> (sample["labels"] - sample["tokens"]).tolist(), sample["loss_mask"].tolist()
        ([1, 1], [1.0, 1.0])
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        seed: int,
        vocab_size: int,
        documents: tuple[int, int] | None = None,
        eod: int | None = None,
        shuffle_documents: bool = True,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
    ):
        first, last = documents or (0, len(indexed.documents) - 1)
        check_source(indexed, seq_length, seed, least=1)
        if indexed.document_starts[first] == indexed.document_starts[last]:
            raise JzeroError(
                f"{indexed.prefix}: expected tokens in documents [{first}, {last}), found none; change splits_string "
                "or add text"
            )
        if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise JzeroError(
                "data: expected a tokenizer with an end-of-document token, found none; set reset_position_ids, "
                "reset_attention_mask and eod_mask_loss to False"
            )
        self.indexed = indexed
        self.documents = (first, last)
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.eod = eod
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        self._stream = TokenStream(indexed, first, last, seed=seed, shuffle=shuffle_documents)

    def __len__(self) -> int:
        """Samples that begin in the first epoch; the samples after them are as valid."""
        return -(-self._stream.size // self.seq_length)

    @property
    def distinct(self) -> int:
        """How many samples from the first on are all different windows of the file: those of the first epoch."""
        return len(self)

    def __getitem__(self, k: SupportsIndex) -> dict[str, np.ndarray]:
        """Sample k ≥ 0.

        Returns:
            "tokens" and "labels" int32 [T], "loss_mask" float32 [T], and where asked for "positions" and "segments"
            (counted from 1) int32 [T].

        Raises:
            JzeroError: a token is outside of the vocabulary.
            IndexError: k is negative.
        """
        k, T = sample_number(k), self.seq_length
        begin = sample_order(k, self._stream.size, T, self.seed) * T
        window = self._stream.read(begin, T + 1)
        if (at := first_foreign(window, self.vocab_size)) is not None:
            raise foreign_token(self.indexed, self._stream.locate(begin + at), self.vocab_size)
        window = window.astype(np.int32)
        return self._sample(window[:-1], window[1:])

    def once(self, k: int) -> dict[str, np.ndarray]:
        """Sample k < len(self), without loss on labels of the second epoch: together every token is a label once.

        (The first token is none's.)
        """
        sample, size = self[k], self._stream.size
        begin = sample_order(k, size, self.seq_length, self.seed) * self.seq_length
        sample["loss_mask"][max(size - 1 - begin, 0) :] = 0
        return sample

    def _sample(self, tokens: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        sample = {"tokens": tokens, "labels": labels, "loss_mask": np.ones(len(tokens), np.float32)}
        if self.eod_mask_loss:
            sample["loss_mask"][tokens == self.eod] = 0
        if self.reset_position_ids or self.reset_attention_mask:
            begins = np.concatenate([[False], tokens[:-1] == self.eod])  # of a document, except the first
            here = np.arange(len(tokens), dtype=np.int32)
            if self.reset_position_ids:
                sample["positions"] = here - np.maximum.accumulate(np.where(begins, here, np.int32(0)))
            if self.reset_attention_mask:
                sample["segments"] = np.cumsum(begins, dtype=np.int32) + np.int32(1)
        return sample
