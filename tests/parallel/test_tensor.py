"""The tensor-axis collectives against the same computation on one rank: values, gradients, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jzero import JzeroError, make_mesh
from jzero.models import GPTConfig, functions
from jzero.parallel.tensor import TensorParallel, tensor_parallel

B, T, D, F, V = 2, 8, 6, 12, 16
KINDS = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "split"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def spread(f, size, in_specs, out_specs, check_vma=True):
    if size == 1:  # nothing is split then
        in_specs, out_specs = jax.tree.map(lambda _: P(), (in_specs, out_specs), is_leaf=lambda s: isinstance(s, P))
    mesh = make_mesh(tensor=size, devices=jax.devices()[:size])
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return lambda *arguments: jax.block_until_ready(jax.jit(mapped)(*arguments))


def close(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@KINDS
@SIZES
def test_a_product_split_by_columns_then_rows(size, sequence):
    tensor = TensorParallel(size, sequence)
    x, up, down, dy = normal(B, T, D), normal(D, F), normal(F, D), normal(B, T, D, seed=1)

    def layer(x, up, down):
        return tensor.leave(jnp.tanh(tensor.enter(x) @ up) @ down)

    def both(x, up, down, dy):
        y, vjp = jax.vjp(layer, x, up, down)
        return y, vjp(dy)

    positions = P(None, "tensor") if sequence else P()
    weights = (P(None, "tensor"), P("tensor"))
    found = spread(both, size, (positions, *weights, positions), (positions, (positions, *weights)))(x, up, down, dy)
    y, vjp = jax.vjp(lambda x, up, down: jnp.tanh(x @ up) @ down, x, up, down)
    close(found, (y, vjp(dy)))


@KINDS
@SIZES
def test_lookup_in_a_table_split_by_rows(size, sequence):
    tensor = TensorParallel(size, sequence)
    table, ids = normal(V, D), np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    ids[0, :2] = 0, V - 1
    dy = normal(B, T, D, seed=1)
    positions = P(None, "tensor") if sequence else P()

    def both(table, ids, dy):
        x, vjp = jax.vjp(lambda table: tensor.lookup(table, ids, jnp.float32), table)
        return x, vjp(dy)[0]

    rows = P("tensor")
    found = spread(both, size, (rows, P(), positions), (positions, rows))(table, ids, dy)
    x, vjp = jax.vjp(lambda table: table[ids], table)
    close(found, (x, vjp(dy)[0]))


def test_rows_cross_the_axis_in_the_type_that_is_asked_for():
    table = jnp.full((V, D), 1 + 2.0**-12)
    look = spread(lambda t, i: TensorParallel(2).lookup(t, i, jnp.bfloat16), 2, (P("tensor"), P()), P())
    found = look(table, np.zeros((B, T), np.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, 1.0)


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["ordinary", "large"])
@SIZES
def test_cross_entropy_with_the_vocabulary_split(size, scale):
    tensor = TensorParallel(size)
    logits, weight = scale * normal(B, T, V), normal(B, T, seed=1)
    labels = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    labels[0, :3] = 0, V - 1, V // 2  # the ends of parts

    def both(logits, labels, weight):
        losses, vjp = jax.vjp(lambda logits: tensor.cross_entropy(logits, labels), logits)
        return losses, vjp(weight)[0]

    parts = P(None, None, "tensor")
    found = spread(both, size, (parts, P(), P()), (P(), parts))(logits, labels, weight)
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    softmax = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    own = labels[..., None] == np.arange(V)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[own].reshape(B, T)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], (softmax - own) * weight[..., None], rtol=1e-5, atol=1e-6)


@SIZES
def test_padding_of_the_vocabulary_has_no_part_in_a_loss(size):
    """As if the last entries were not there, even where they are all that a rank has: losses, gradient, likeliest."""
    tensor, padding = TensorParallel(size), V // 2 + 1
    logits, labels = normal(B, T, V), np.random.default_rng(0).integers(0, V - padding, (B, T), dtype=np.int32)
    logits[..., V - padding :] += 50.0

    def all_three(logits, labels):
        losses, vjp = jax.vjp(lambda logits: tensor.cross_entropy(logits, labels, padding), logits)
        return losses, vjp(jnp.ones_like(losses))[0], tensor.likeliest(logits, padding)

    parts = P(None, None, "tensor")
    losses, gradient, likeliest = spread(all_three, size, (parts, P()), (P(), parts, P()))(logits, labels)
    real = logits[..., : V - padding].astype(np.float64)
    softmax = np.exp(real) / np.exp(real).sum(-1, keepdims=True)
    own = labels[..., None] == np.arange(V - padding)
    np.testing.assert_allclose(losses, -np.log(softmax[own].reshape(B, T)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient[..., : V - padding], softmax - own, rtol=1e-5, atol=1e-6)
    assert not np.asarray(gradient[..., V - padding :]).any()
    np.testing.assert_array_equal(likeliest, real.argmax(-1))


def test_logits_are_put_together_where_tokens_are_drawn():
    logits = normal(B, T, V)
    whole = spread(TensorParallel(4).whole_vocabulary, 4, (P(None, None, "tensor"),), P())
    np.testing.assert_array_equal(whole(logits), logits)


def test_without_tensor_ranks_nothing_happens():
    alone, x = TensorParallel(1, sequence=True), jnp.ones((B, T, D))
    assert alone.enter(x) is x
    assert alone.leave(x) is x
    assert alone.own_positions(x, 1) is x
    assert alone.whole_vocabulary(x) is x
    assert alone.first(4) == alone.first_position(4) == 0
    assert alone.spec(("vocab", "embed")) == P()
    assert not alone.partial(())


def test_what_the_axis_splits():
    config = GPTConfig(vocab_size=64, num_layers=2, hidden_size=16, num_attention_heads=4,
                       share_embeddings_and_output_weights=False, activation="swiglu")  # fmt: skip
    axes = functions(config).axes
    specs = jax.tree.map(TensorParallel(2).spec, axes, is_leaf=lambda x: isinstance(x, tuple))
    block = specs["blocks"]
    assert specs["embedding"] == {"token": P("tensor", None), "position": P()}
    assert specs["head"] == {"weight": P("tensor", None)}
    assert block["attention"]["qkv"] == {
        "weight": P(None, None, "tensor", None, None), "bias": P(None, "tensor", None, None)
    }  # fmt: skip
    assert block["attention"]["out"] == {"weight": P(None, "tensor", None, None), "bias": P()}
    assert block["mlp"]["up"] == {"weight": P(None, None, None, "tensor"), "bias": P(None, None, "tensor")}
    assert block["mlp"]["down"] == {"weight": P(None, "tensor", None), "bias": P()}
    assert set(jax.tree.leaves(block["mlp_norm"])) == {P()}


def test_parts_of_gradients_are_completed_only_where_positions_are_split():
    assert TensorParallel(2, sequence=True).partial(("data",))
    assert not TensorParallel(2, sequence=True).partial(("tensor", "data"))
    assert not TensorParallel(2).partial(("data",))
    sums = spread(lambda x: TensorParallel(2, True).complete([x])[0], 2, (P("tensor"),), P())
    np.testing.assert_array_equal(sums(np.array([1.0, 2.0])), [3.0])


def test_a_sequence_that_does_not_divide_is_refused():
    tensor = TensorParallel(2, sequence=True)
    match = "sequence of 7 tokens: expected a multiple of model.tensor_model_parallel_size 2 with model.sequence_para"
    for f in (tensor.leave, lambda x: tensor.own_positions(x, 1)):
        with pytest.raises(JzeroError, match=match):
            spread(f, 2, (P(),), P(None, "tensor"))(jnp.ones((B, 7, D)))


def test_regions_that_do_not_track_what_varies_are_refused():
    with pytest.raises(ValueError, match=r"expected jax\.shard_map with check_vma=True, found False"):
        spread(TensorParallel(2).enter, 2, (P(),), P(), check_vma=False)(jnp.ones((B, T, D)))


def test_a_model_that_does_not_divide_is_refused():
    config = GPTConfig(vocab_size=64, num_layers=1, hidden_size=24, num_attention_heads=6)
    mesh = make_mesh(data=2, tensor=4)
    with pytest.raises(JzeroError, match=r"model\.num_attention_heads: expected a multiple of .* 4, found 6"):
        functions(config, tensor_parallel(mesh))
    assert functions(config, tensor_parallel(make_mesh(data=4, tensor=2))).tensor == TensorParallel(2)
