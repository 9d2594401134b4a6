"""Every layout of data, replica and tensor ranks trains the model of one device: same loss, gradients, parameters."""

import jax
import numpy as np
import pytest
from programs import (
    EVEN_VOCABULARY,
    LOW,
    Row,
    assert_low_precision_follows_fp32,
    assert_trains_as_one_device,
    batch,
    program,
    train,
)

FORWARD, TWICE = "gather_on_forward", "gather_twice"
LAYOUTS = [
    Row(data=4, tensor=2, sequence=True),
    Row(TWICE, "selective", "gpt2, dropout", data=4, tensor=2, sequence=True, micro_batches=2),
    Row(FORWARD, "selective", "llama", data=4, tensor=2, micro_batches=2, accumulation="sharded"),
    Row(FORWARD, "full", "llama", data=2, tensor=4, sequence=True, micro_batches=2, accumulation="sharded"),
    Row(model="gpt2, dropout", data=2, tensor=4, micro_batches=4),
    Row(FORWARD, model="llama", data=2, replica=2, tensor=2, sequence=True),
    Row(model="llama", data=2, tensor=2, sequence=True, micro_batches=2, optimizer="fused_adam"),
]
MORE_LAYOUTS = [
    Row(TWICE, "full", "gpt2, dropout", tensor=4, sequence=True, micro_batches=4),
    Row(data=4, tensor=2),
    Row(FORWARD, model="gpt2, dropout", data=4, tensor=2, sequence=True),
    Row(TWICE, model="llama", data=2, tensor=4),
    Row(TWICE, "full", "gpt2, dropout", data=2, replica=2, tensor=2, micro_batches=2),
    Row(replica=4, tensor=2, sequence=True, micro_batches=2, accumulation="sharded"),
    Row(FORWARD, tensor=2, sequence=True, micro_batches=2),
    Row(model="llama", replica=2, tensor=4),
    Row(data=2, tensor=2, micro_batches=4, optimizer="fused_adam"),
]


@pytest.mark.parametrize(
    "row", [*LAYOUTS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_LAYOUTS)], ids=str
)
def test_a_layout_trains_the_model_of_one_device(row):
    assert_trains_as_one_device(row)


def test_evaluation_and_logits_do_not_depend_on_the_layout():
    results = []
    for row in (Row(model="llama"), Row(TWICE, model="llama", data=2, tensor=2, sequence=True)):
        prog = program(row.config(), EVEN_VOCABULARY)
        params, data = prog.init().params, batch(0)
        total, count = jax.block_until_ready(prog.evaluate(params, prog.place(data)))
        results.append((float(total), float(count), np.asarray(prog.logits(params, data["tokens"][:3]))))
    (total, count, logits), (found, found_count, found_logits) = results
    assert found == pytest.approx(total, rel=1e-6)
    assert found_count == count
    assert found_logits.shape == (3, 16, EVEN_VOCABULARY)
    np.testing.assert_allclose(found_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", LOW)
def test_low_precision_follows_fp32_and_tensor_ranks_keep_alike_what_they_share(mode):
    assert_low_precision_follows_fp32(Row(FORWARD, data=2, tensor=2, sequence=True), mode)


@pytest.mark.parametrize("ranks", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_in_bf16_zero_on_and_off_are_equal_bit_for_bit(ranks):
    """Without clipping: the norm adds up shards or whole leaves, so the last bit of its factor may differ."""
    rows, states = [], []
    for optimizer in ("fused_adam", "distributed_fused_adam"):
        prog = program(Row(**ranks, optimizer=optimizer).config(precision="bf16", clip=0.0), EVEN_VOCABULARY)
        state, found = train(prog, 10)
        rows.append(found[:, 0])
        states.append(jax.tree.map(np.asarray, state.params))
    np.testing.assert_array_equal(*rows)
    jax.tree.map(np.testing.assert_array_equal, *states)
