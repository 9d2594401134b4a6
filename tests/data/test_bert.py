"""BERT's samples: how documents are cut, what is masked, and that sample k is a function of seed and k alone."""

import itertools
import pickle

import numpy as np
import pytest

from jzero.data import BertDataset, BertTokens, Blend, IndexedDataset, IndexedWriter, batches
from jzero.data.bert import mask, runs, shared
from jzero.errors import JzeroError

CLS, SEP, MASK, PAD, FIRST, VOCAB, T = 0, 1, 2, 3, 5, 2000, 32
SPECIAL = BertTokens(CLS, SEP, MASK, PAD, np.arange(FIRST, VOCAB, dtype=np.int32))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """60 documents of 2 to 11 sentences of 1 to 14 tokens. All tokens differ, so a token says where it stands."""
    prefix, rng, number = tmp_path_factory.mktemp("bert") / "text", np.random.default_rng(0), FIRST
    with IndexedWriter(prefix, np.int32) as writer:
        for _ in range(60):
            lengths = rng.integers(1, 15, rng.integers(2, 12)).tolist()
            writer.add(np.arange(number, number + sum(lengths)), lengths)
            number += sum(lengths)
    assert number > VOCAB
    return IndexedDataset(prefix)


def make(indexed, **options):
    count = len(indexed.tokens) + FIRST
    special = BertTokens(CLS, SEP, MASK, PAD, np.arange(FIRST, count, dtype=np.int32))
    return BertDataset(indexed, **{"seq_length": T, "seed": 7, "vocab_size": count, "tokens": special, **options})


def unmasked(sample):
    return np.where(sample["loss_mask"] == 1, sample["labels"], sample["tokens"])


def parts(sample):
    """A and B as they were before masking, and that everything around them is where it should be."""
    tokens, size = unmasked(sample), int(sample["segments"].sum())
    ends = np.flatnonzero(tokens[:size] == SEP)
    assert tokens[0] == CLS
    assert ends[-1] == size - 1
    assert (sample["segments"] == (np.arange(T) < size)).all()
    assert (tokens[size:] == PAD).all()
    assert not sample["loss_mask"][np.append(0, ends)].any()
    assert not sample["loss_mask"][size:].any()
    assert (sample["token_types"][: ends[0] + 1] == 0).all()
    assert (sample["token_types"][size:] == 0).all()
    assert (sample["token_types"][ends[0] + 1 : size] == 1).all()
    return tokens[1 : ends[0]], tokens[ends[0] + 1 : size - 1]


def document_of(indexed, token):
    return int(np.searchsorted(indexed.document_starts, token - FIRST, side="right"))


def test_pairs_follow_one_another_or_are_random_half_the_time(indexed):
    dataset, random = make(indexed, short_seq_prob=0.0), []
    for k in range(3 * len(dataset)):
        sample = dataset[k]
        a, b = parts(sample)
        assert len(a) >= 1
        assert len(b) >= 1
        assert len(a) + len(b) <= T - 3
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        same = document_of(indexed, a[0]) == document_of(indexed, b[0])
        assert same == (sample["is_random"] == 0)
        assert not same or b[0] > a[-1]
        random.append(int(sample["is_random"]))
    assert abs(np.mean(random) - 0.5) < 0.05


def test_an_epoch_has_every_run_once_and_the_next_shuffles_them_anew(indexed):
    dataset = make(indexed, binary_head=False, short_seq_prob=0.0, seq_length=200)
    count = len(dataset)
    epochs = [[unmasked(dataset[e * count + k])[1] for k in range(count)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == count == dataset.distinct
    assert epochs[0] != epochs[1]
    tokens = np.concatenate([unmasked(dataset[k])[dataset[k]["segments"] == 1] for k in range(count)])
    assert sorted(tokens[tokens >= FIRST]) == list(range(FIRST, FIRST + len(indexed.tokens)))  # no token is lost
    assert "is_random" not in dataset[0]


def test_a_tenth_of_the_runs_is_short(indexed):
    sizes = lambda p: np.array(
        [d[k]["segments"].sum() for d in [make(indexed, short_seq_prob=p)] for k in range(len(d))]
    )
    full, some, all_short = sizes(0.0), sizes(0.3), sizes(1.0)
    assert (full == T).mean() > 0.6
    assert all_short.mean() < some.mean() < full.mean()
    assert len(all_short) > len(full)


def test_sample_k_depends_on_seed_and_k_alone(indexed):
    one, other = make(indexed), pickle.loads(pickle.dumps(make(indexed)))
    same = lambda a, b: all((a[name] == b[name]).all() for name in a)
    for k in (1000, 3, 17):
        assert same(one[k], other[k])
    assert same(one[3], make(indexed)[3])
    assert not same(one[3], make(indexed, seed=8)[3])
    assert not same(one[3], one[3 + len(one)])
    batch = next(batches(one, batch_size=4, start_step=2, rows=[1, 3]))
    assert same({k: v[1] for k, v in batch.items()}, one[11])
    assert batch["is_random"].shape == (2,)
    assert batch["tokens"].shape == (2, T)


def test_blends_and_ranges(indexed):
    first, second = make(indexed, documents=(0, 30)), make(indexed, documents=(30, 60))
    end = indexed.document_starts[30] + FIRST
    for k in range(100):
        for dataset, own in ((first, lambda x: x < end), (second, lambda x: x >= end)):
            assert own(np.concatenate(parts(dataset[k]))).all()
    blend = Blend([first, second], [1, 1])
    assert (blend[3]["tokens"] == second[1]["tokens"]).all()


def test_fifteen_percent_are_masked_eighty_ten_ten():
    rng = np.random.RandomState(0)
    labels = rng.randint(FIRST, VOCAB, 200).astype(np.int32)
    is_word = np.arange(200) % 10 != 0
    kinds = []
    for _ in range(300):
        tokens, chosen = mask(labels, is_word, 0.15, SPECIAL, rng)
        assert chosen.sum() == round(180 * 0.15)
        assert not chosen[~is_word].any()
        assert (tokens[~chosen] == labels[~chosen]).all()
        new, old = tokens[chosen], labels[chosen]
        kinds.append([(new == MASK).sum(), (new == old).sum(), ((new != MASK) & (new != old)).sum()])
        assert ((new == MASK) | (new >= FIRST)).all()
    share = np.sum(kinds, 0) / np.sum(kinds)
    np.testing.assert_allclose(share, [0.8, 0.1, 0.1], atol=0.015)  # 8,100 draws: four standard deviations


def test_every_place_is_masked_alike():
    rng, hits = np.random.RandomState(1), np.zeros(40)
    for _ in range(4000):
        hits += mask(np.full(40, FIRST, np.int32), np.ones(40, bool), 0.15, SPECIAL, rng)[1]
    np.testing.assert_allclose(hits / 4000, 0.15, atol=0.03)


def test_a_short_text_has_at_least_one_masked_token():
    assert mask(np.full(2, FIRST, np.int32), np.ones(2, bool), 0.15, SPECIAL, np.random.RandomState(0))[1].sum() == 1


def test_whole_words_are_masked_together():
    rng = np.random.RandomState(0)
    continues = np.zeros(VOCAB, bool)
    continues[1000:] = True
    labels = np.where(rng.random_sample(120) < 0.5, 700, 1500).astype(np.int32)
    labels[0], is_word = 700, np.arange(120) != 60
    labels[61] = 1500  # begins a word all the same: the special token before it ends one
    begins = ~continues[labels]
    begins[[60, 61]] = True
    word = np.cumsum(begins)
    counts = []
    for _ in range(200):
        _, chosen = mask(labels, is_word, 0.15, SPECIAL, rng, continues)
        for w in set(word[chosen]):
            assert chosen[word == w].all()
        counts.append(chosen.sum())
    assert max(counts) <= round(119 * 0.15)
    assert np.mean(counts) > 0.9 * 119 * 0.15


def test_the_dataset_masks_whole_words_if_asked(indexed):
    count = len(indexed.tokens) + FIRST
    continues = np.arange(count) % 2 == 1  # odd tokens continue the even ones before them
    special = BertTokens(CLS, SEP, MASK, PAD, np.arange(FIRST, count, dtype=np.int32), continues)
    for k in range(50):
        sample = make(indexed, tokens=special, whole_word_masking=True)[k]
        chosen, tokens = sample["loss_mask"] == 1, unmasked(sample)
        second = np.flatnonzero(continues[tokens] & (tokens >= FIRST))
        second = second[tokens[second - 1] >= FIRST]
        assert (chosen[second] == chosen[second - 1]).all()


def test_runs_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    sizes, documents = rng.integers(1, 9, 300), np.unique(np.append(rng.integers(0, 300, 40), [0, 300]))
    starts, lengths = np.append(0, np.cumsum(sizes)), rng.integers(2, 30, 300)
    expected = []
    for first, last in itertools.pairwise(documents):
        while first < last:
            end = first + 1
            while end < last and (starts[end] - starts[first] < lengths[first] or end - first < 2):
                end += 1
            end = last if last - end == 1 else end
            expected.append((first, end))
            first = end
    assert list(zip(*runs(starts, documents, lengths, 2), strict=True)) == expected


@pytest.mark.parametrize(("a", "b", "room"), [(30, 3, 20), (3, 30, 20), (15, 15, 20), (15, 15, 21), (2, 2, 20)])
def test_the_longer_sentence_is_shortened(a, b, room):
    found_a, found_b = a, b
    while found_a + found_b > room:
        found_a, found_b = (found_a - 1, found_b) if found_a > found_b else (found_a, found_b - 1)
    assert shared(a, b, room) == (found_a, found_b)


def test_single_sentences_and_empty_sequences(tmp_path):
    with IndexedWriter(tmp_path / "mixed", np.uint16) as writer:
        writer.add([10, 11, 12], lengths=[3])
        writer.add([20, 21, 22, 23], lengths=[2, 0, 2])
    dataset = BertDataset(IndexedDataset(tmp_path / "mixed"), seq_length=T, seed=1, vocab_size=VOCAB, tokens=SPECIAL)
    for k in range(20):
        a, b = parts(dataset[k])
        assert dataset[k]["is_random"] == (a[0] // 10 != b[0] // 10)
        assert a[0] != 10 or dataset[k]["is_random"] == 1


def test_mistakes_are_named(tmp_path, indexed):
    with IndexedWriter(tmp_path / "plain", np.uint16) as writer:
        for _ in range(3):
            writer.add([10, 11, 12])
    plain = IndexedDataset(tmp_path / "plain")
    options = {"seq_length": T, "seed": 1, "vocab_size": VOCAB, "tokens": SPECIAL}
    with pytest.raises(
        JzeroError, match=r"documents of several sentences in \[0, 3\), found one sentence in each; build"
    ):
        BertDataset(plain, **options)
    assert len(BertDataset(plain, **options, binary_head=False)) == 3
    with pytest.raises(JzeroError, match=r"found no sentences"):
        BertDataset(plain, **options, documents=(1, 1))
    with pytest.raises(JzeroError, match=r"a sequence length of at least 5 .*, found 4 and 1"):
        BertDataset(plain, **{**options, "seq_length": 4})
    with pytest.raises(JzeroError, match=r"a sequence length of at least 4 .*, found 3 and 1"):
        BertDataset(plain, **{**options, "seq_length": 3}, binary_head=False)
    with pytest.raises(JzeroError, match=r"whole_word_masking: expected a WordPiece or byte-level BPE vocabulary"):
        BertDataset(plain, **options, whole_word_masking=True)
    with pytest.raises(JzeroError, match=r"plain\.bin: expected tokens in 0\.\.10 .*, found 11 at position"):
        BertDataset(plain, **{**options, "vocab_size": 11}, binary_head=False)[0]
    with pytest.raises(IndexError, match="counted from 0"):
        make(indexed)[-1]
