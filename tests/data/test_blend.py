"""Blends keep their proportions at every step; splits divide the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.data import Blend, split_documents
from jzero.data.blend import interleaving, proportions
from jzero.errors import JzeroError

WEIGHTS = st.lists(st.floats(1e-3, 1e3) | st.integers(1, 100), min_size=1, max_size=6)


class Names:
    """A dataset whose samples are their own names."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, k):
        return self.name, k

    def __len__(self):
        return 10


@settings(deadline=None)
@given(WEIGHTS)
def test_counts_follow_the_weights(weights):
    counts = proportions(weights)
    assert sum(counts) <= 2**20
    assert min(counts) >= 1
    share = np.array(weights, float) / sum(weights)
    assert np.abs(np.array(counts) / sum(counts) - share).max() < 1e-5


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_proportions_hold_at_every_step(counts):
    source, number = interleaving(counts)
    n, total = len(counts), sum(counts)
    share = np.array(counts) / total
    given_so_far = np.cumsum(source[:, None] == np.arange(n), axis=0)
    assert given_so_far[-1].tolist() == counts
    error = np.abs(given_so_far - np.arange(1, total + 1)[:, None] * share)
    assert (error <= 0.5 + share * n / 2 + 1e-9).all()
    for i in range(n):
        assert number[source == i].tolist() == list(range(counts[i]))


def test_a_blend_reads_each_dataset_in_order():
    blend = Blend([Names("a"), Names("b"), Names("c")], [0.5, 0.3, 0.2])
    taken = [blend[k] for k in range(1000)]
    for name, count in zip("abc", (500, 300, 200), strict=True):
        assert [number for source, number in taken if source == name] == list(range(count))
    assert [blend[k] for k in (999, 3, 500)] == [taken[k] for k in (999, 3, 500)]
    assert blend[np.int64(7)] == taken[7]
    assert blend[10**12] == ("a", 5 * 10**11)
    assert len(blend) == 30
    with pytest.raises(IndexError, match="sample -1"):
        blend[-1]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_are_positive(weight):
    with pytest.raises(JzeroError, match=f"data_prefix: expected positive weights, found {weight}; leave out"):
        Blend([Names("a"), Names("b")], [1, weight])


def test_one_weight_each():
    with pytest.raises(ValueError, match="weights: expected 2, one per dataset, found 1"):
        Blend([Names("a"), Names("b")], [1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 10_000))
def test_splits_cover_all_documents_once(parts, documents):
    ranges = split_documents(",".join(map(str, parts)), documents)
    assert [a for a, _ in ranges] + [documents] == [0] + [b for _, b in ranges]
    for (a, b), part in zip(ranges, parts + [0] * (3 - len(parts)), strict=True):
        assert abs((b - a) - documents * part / sum(parts)) <= 1


@pytest.mark.parametrize("text", ["", "a,b", "1,-1", "0,0", "1,1,1,1", "1,,1", "nan", "1/0", None])
def test_splits_string_is_checked(text):
    with pytest.raises(
        JzeroError, match=r"model\.data\.splits_string: expected one to three .*, found .*; write for example"
    ):
        split_documents(text, 10)


def test_splits_string_may_have_fractions():
    assert split_documents("0.9, 0.1", 20) == [(0, 18), (18, 20), (20, 20)]
