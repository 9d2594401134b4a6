"""The endless token stream of a range of documents, and the order in which samples are cut from it. Pure arithmetic.

N is the number of tokens in the documents, T the tokens by which one sample advances. Epoch e of the stream is a
permutation of the documents, tokens [e·N, (e+1)·N). Sample j starts at token j·T. Nothing is lost at the end of an
epoch, whatever N and T
are: a sample that begins in one epoch may end in the next.

Each epoch *owns* the samples that begin in it, and they are shuffled among themselves. So sample k is a function of the
seed and k alone: whoever reads it, wherever a run was resumed, however many samples are wanted in the end.

Random numbers come from NumPy's `SeedSequence` and `RandomState`, whose streams NumPy guarantees not to change, and
from Grain's `index_shuffle`, a permutation that needs no memory."""

import threading

import numpy as np
from grain.experimental import index_shuffle

from jzero.data.indexed import IndexedDataset

_DOCUMENTS, _SAMPLES = 0, 1  # keep the two uses of a seed apart
_BLOCK = 1 << 32  # index_shuffle works on 32-bit numbers
_EPOCHS_KEPT = 2  # the current one, and the next where a sample crosses its end


class TokenStream:
    """The documents [first, last) of an indexed file, again and again, each time in a new order.

    An epoch is indexed with a few NumPy operations when it is first read (10 million documents: about a second, 160
    MB).

    Args:
        indexed: the file.
        first: first document.
        last: one past the last document; there must be at least one token in the range.
        seed: non-negative; orders of different seeds have nothing in common.
        shuffle: whether documents are permuted.
    """

    def __init__(self, indexed: IndexedDataset, first: int, last: int, *, seed: int, shuffle: bool = True):
        self.indexed = indexed
        self.first = first
        self.last = last
        self.seed = seed
        self.shuffle = shuffle
        self.starts = indexed.document_starts[first : last + 1]  # int64 [documents + 1]
        self.size = int(self.starts[-1] - self.starts[0])
        if self.size == 0:
            raise ValueError(f"{indexed.prefix}: expected tokens in documents [{first}, {last}), found none")
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def read(self, begin: int, length: int) -> np.ndarray:
        """Tokens [begin, begin + length) of the stream, in the dtype of the file."""
        out = np.empty(length, self.indexed.dtype)
        filled = 0
        while filled < length:
            epoch, at = divmod(begin + filled, self.size)
            filled += self._read_epoch(epoch, at, out[filled:])
        return out

    def locate(self, at: int) -> int:
        """Which token of the file token `at` of the stream is."""
        order, ends = self._epoch(at // self.size)
        i = int(np.searchsorted(ends, at % self.size, side="right"))
        return int(self.starts[order[i] + 1] - (ends[i] - at % self.size))

    def _read_epoch(self, epoch: int, at: int, out: np.ndarray) -> int:
        """Fill `out` from token `at` of an epoch until either ends; returns the tokens read."""
        order, ends = self._epoch(epoch)
        i = int(np.searchsorted(ends, at, side="right"))
        stop = int(np.searchsorted(ends, at + len(out), side="left")) + 1
        # Begin and end in the file of each document that the range touches; the first may begin inside.
        documents = order[i:stop]
        begins, finishes = self.starts[documents], self.starts[documents + 1]
        begins[0] = finishes[0] - (ends[i] - at)
        filled = 0
        for begin, finish in zip(begins.tolist(), finishes.tolist(), strict=True):
            count = min(finish - begin, len(out) - filled)
            out[filled : filled + count] = self.indexed.tokens[begin : begin + count]
            filled += count
        return filled

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the documents int64 [n] (from 0 at `first`) and where each ends in the epoch, int64 [n]."""
        epoch = epoch if self.shuffle else 0
        with self._lock:
            if epoch not in self._epochs:
                count = self.last - self.first
                order = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
                while len(self._epochs) >= _EPOCHS_KEPT:
                    self._epochs.pop(next(iter(self._epochs)))
                self._epochs[epoch] = order, np.cumsum(np.diff(self.starts)[order])
            return self._epochs[epoch]

    def __reduce__(self):
        """Pickled without the epochs: a worker process makes its own."""
        return _rebuild, (self.indexed, self.first, self.last, self.seed, self.shuffle)


def _rebuild(indexed: IndexedDataset, first: int, last: int, seed: int, shuffle: bool) -> TokenStream:
    return TokenStream(indexed, first, last, seed=seed, shuffle=shuffle)


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [n]: the order of `n` documents in an epoch."""
    state = np.random.MT19937(np.random.SeedSequence((seed, epoch, _DOCUMENTS)))
    return np.random.RandomState(state).permutation(n)


def sample_order(k: int, N: int, T: int, seed: int) -> int:
    """Which sample of the stream comes k-th: a permutation of the samples that begin in the same epoch.

    Sample j begins in epoch ⌊jT/N⌋, so epoch e owns ⌈eN/T⌉ ≤ j < ⌈(e+1)N/T⌉. (Epochs of more than 2³² samples are
    shuffled in blocks of that many.)

    Args:
        k: position, at least 0.
        N: tokens of an epoch.
        T: tokens from one sample to the next.
        seed: non-negative.

    Example:
        >>> sorted(sample_order(k, N=100, T=10, seed=1) for k in range(10, 20)) == list(range(10, 20))
        True
    """
    epoch = k * T // N
    first, last = -(-epoch * N // T), -(-(epoch + 1) * N // T)
    block = (k - first) // _BLOCK
    first += block * _BLOCK
    size = min(last - first, _BLOCK)
    key = int(np.random.SeedSequence((seed, epoch, _SAMPLES, block)).generate_state(1)[0])
    return first + index_shuffle(k - first, max_index=size - 1, seed=key, rounds=4)
