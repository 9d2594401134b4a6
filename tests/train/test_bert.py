"""A BERT trains as its formulas say, and on every layout as on one device."""

import functools

import jax
import numpy as np
import pytest
from oracles import bert as oracle
from programs import VOCABULARY, assert_same_training, bert_batch, config, program, ten_steps, whole

from jzero.errors import JzeroError
from jzero.train.config import model_config

POST = {"type": "bert", "num_query_groups": None, "transformer_block_type": "post_ln", "activation": "gelu_exact"}
PRE = {"type": "bert"}
DROP = {**PRE, "hidden_dropout": 0.2, "attention_dropout": 0.2}
DEEP = {"num_layers": 4, "make_vocab_size_divisible_by": 2}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {**DEEP, "pipeline_model_parallel_size": 2}
slow = pytest.mark.slow


@functools.cache
def one_device(**model):
    return ten_steps(config(1, **model))


@pytest.mark.parametrize(
    ("devices", "policy", "micro_batches", "model", "layout"),
    [
        (8, "gather_on_forward", 2, POST, {}),
        (8, "gather_twice", 2, POST, SPLIT | STAGES),
        pytest.param(8, "replicated", 1, DROP, {}, marks=slow),
        pytest.param(4, "replicated", 1, PRE, SPLIT, marks=slow),
        pytest.param(4, "gather_twice", 2, DROP, {"tensor_model_parallel_size": 2}, marks=slow),
        pytest.param(8, "replicated", 4, DROP, SPLIT | STAGES, marks=slow),
        pytest.param(4, "gather_on_forward", 4, POST, STAGES | {"grad_accumulation": "sharded"}, marks=slow),
        pytest.param(4, "replicated", 2, POST | {"bert_binary_head": False}, {}, marks=slow),
    ],
)
def test_a_layout_trains_the_model_of_one_device(devices, policy, micro_batches, model, layout):
    own = {**model, "make_vocab_size_divisible_by": 2} | {k: v for k, v in layout.items() if k in DEEP}
    assert_same_training(ten_steps(config(devices, policy, micro_batches, **own, **_rest(layout))), one_device(**own))


def _rest(layout):
    return {key: value for key, value in layout.items() if key not in DEEP}


@pytest.mark.parametrize("layout", [{}, pytest.param(SPLIT | _rest(STAGES), marks=slow)], ids=["data", "all"])
def test_the_first_loss_and_the_measures_are_those_of_numpy(layout):
    """The loss is the mean over the masked tokens of the global batch plus the mean over its samples."""
    conf = config(8, "replicated", 2, **POST, **DEEP, **layout)
    prog = program(conf)
    state, data = prog.init(), bert_batch(0)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), whole(prog, state.params))
    expected = oracle.means(params, model_config(conf, VOCABULARY), data)
    sums = jax.block_until_ready(prog.measure(state.params, prog.place(data)))
    assert {k: float(a / b) for k, (a, b) in sums.items()} == pytest.approx(expected, rel=1e-5)
    total, count = prog.evaluate(state.params, prog.place(data))
    assert (float(total), float(count)) == (float(sums["lm_loss"][0]), data["loss_mask"].sum())
    _, metrics = jax.block_until_ready(prog.step(state, prog.place(data)))
    assert float(metrics["loss"]) == pytest.approx(expected["lm_loss"] + expected["nsp_loss"], rel=1e-6)


def test_logits_take_a_batch_and_padding_does_not_matter():
    prog, data = program(config(2, **POST)), bert_batch(0)
    params = prog.init().params
    inputs = {name: data[name] for name in ("tokens", "token_types", "segments")}
    found = np.asarray(prog.logits(params, inputs))
    assert found.shape == (16, 16, VOCABULARY)
    other = inputs | {"tokens": np.where(data["segments"] == 1, data["tokens"], 0)}
    text = data["segments"] == 1
    np.testing.assert_array_equal(np.asarray(prog.logits(params, other))[text], found[text])


def test_a_batch_without_masked_tokens_trains_on_its_pairs():
    prog, data = program(config(2, **POST)), dict(bert_batch(0))
    data["loss_mask"] = np.zeros_like(data["loss_mask"])
    _, metrics = jax.block_until_ready(prog.step(prog.init(), prog.place(data)))
    assert float(metrics["loss"]) == pytest.approx(np.log(2), rel=0.1)
    assert float(metrics["grad_norm"]) > 0


def test_the_batch_that_is_planned_is_the_one_that_is_read():
    for binary in (True, False):
        prog = program(config(2, **POST, bert_binary_head=binary))
        expected = {k: (v.shape, v.dtype) for k, v in bert_batch(0).items() if binary or k != "is_random"}
        assert {k: (v.shape, v.dtype) for k, v in prog.abstract_batch().items()} == expected


def test_a_tensor_axis_that_does_not_divide_is_refused():
    with pytest.raises(JzeroError, match=r"model\.vocab_size|num_attention_heads"):
        program(config(3, **POST, tensor_model_parallel_size=3))
