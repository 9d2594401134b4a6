"""Several datasets as one, in given proportions, and the division of documents into training, validation and test."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import SupportsIndex

import numpy as np

from jzero.data.bert import BertDataset
from jzero.data.checks import sample_number
from jzero.data.gpt import GPTDataset
from jzero.errors import JzeroError

# Longest period of the interleaving; proportions are rounded to 1 / 2²⁰ where they need a longer one.
_RESOLUTION = 1 << 20


def proportions(weights: Sequence[float]) -> list[int]:
    """Positive integers in the proportion of the weights, with no common divisor and a sum of at most 2²⁰.

    Weights mean the decimal number that they print as, so 0.7 and 0.3 are 7 and 3.

    Raises:
        JzeroError: a weight is not a positive, finite number.

    Example:
        >>> proportions([0.7, 0.3]), proportions([2, 4, 2])
        ([7, 3], [1, 2, 1])
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise JzeroError(
                f"data_prefix: expected positive weights, found {weight}; leave out what should not be used"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * math.lcm(*(f.denominator for f in exact))) for weight in exact]
    if sum(whole) // math.gcd(*whole) > _RESOLUTION:
        room = _RESOLUTION - len(whole)  # each is at least 1
        whole = [1 + int(weight * room / sum(exact)) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


def interleaving(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """One period of the interleaving: which dataset comes at each of its places, and the number of its sample.

    Dataset i is due at the times (2j + 1) / (2·counts[i]), j = 0, 1, …: the method of Sainte-Laguë. After k samples
    dataset i has given k·w within 1/2 + w·n/2, where w is its share and n the number of datasets.

    Args:
        counts: samples of each dataset in one period.

    Returns:
        int32 [sum of counts] twice.

    Example:
        >>> [x.tolist() for x in interleaving([2, 1])]
        [[0, 1, 0], [0, 0, 1]]
    """
    source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    # Correctly rounded quotients of integers below 2²² are equal only if the fractions are, so the order is exact.
    order = np.argsort((2 * number + 1) / np.asarray(counts)[source], kind="stable")
    return source[order], number[order]


class Blend:
    """Datasets interleaved by weight: `blend[k]` exists for every k ≥ 0 and depends on the arguments and k only.

    Args:
        datasets: at least one.
        weights: one positive number for each, any sum.

    Raises:
        JzeroError: a weight is not positive.

    Example:
        >>> blend = Blend(["aa", "b"], [2, 1])
        >>> blend.place(5), blend.distinct
        ((0, 3), 3)
    """

    def __init__(self, datasets: Sequence[GPTDataset | BertDataset], weights: Sequence[float]):
        self.datasets = list(datasets)
        self.counts = proportions(weights)
        if len(self.counts) != len(self.datasets):
            raise ValueError(f"weights: expected {len(self.datasets)}, one per dataset, found {len(self.counts)}")
        self._source, self._number = interleaving(self.counts)

    def __len__(self) -> int:
        """Samples in the first epochs of all datasets together; the samples after them are as valid."""
        return sum(len(dataset) for dataset in self.datasets)

    @property
    def distinct(self) -> int:
        """How many samples from the first on are all different: until one of the datasets begins its second epoch."""

        def first_again(source: int) -> int:
            period, number = divmod(len(self.datasets[source]), self.counts[source])
            at = np.flatnonzero((self._source == source) & (self._number == number))[0]
            return period * len(self._source) + int(at)

        return min(map(first_again, range(len(self.datasets))))

    def __getitem__(self, k: SupportsIndex) -> dict[str, np.ndarray]:
        """Sample k ≥ 0, as the dataset that it comes from gives it."""
        source, number = self.place(k)
        return self.datasets[source][number]

    def place(self, k: SupportsIndex) -> tuple[int, int]:
        """Which dataset sample k ≥ 0 comes from, and which of its samples it is."""
        period, at = divmod(sample_number(k), len(self._source))
        source = int(self._source[at])
        return source, period * self.counts[source] + int(self._number[at])


def split_documents(splits_string: str, documents: int) -> list[tuple[int, int]]:
    """Ranges of documents for training, validation and test, as Megatron divides them: contiguous, in this order.

    Args:
        splits_string: up to three numbers of any sum, such as "900,50,50"; those left out are 0.
        documents: how many there are.

    Returns:
        Three ranges (first, one past the last) that do not overlap; a range may be empty.

    Raises:
        JzeroError: the string is anything else.

    Example:
        >>> split_documents("900,50,50", 40)
        [(0, 36), (36, 38), (38, 40)]
    """
    try:
        parts = [Fraction(part.strip()) for part in splits_string.split(",")]
    except (ValueError, ZeroDivisionError, AttributeError):
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or sum(parts) == 0:
        raise JzeroError(
            "model.data.splits_string: expected one to three non-negative numbers with commas between, found "
            f'"{splits_string}"; write for example "900,50,50"'
        )
    parts += [Fraction(0)] * (3 - len(parts))
    ends = [round(sum(parts[: i + 1]) / sum(parts) * documents) for i in range(3)]
    return list(zip([0, *ends[:2]], ends, strict=True))
