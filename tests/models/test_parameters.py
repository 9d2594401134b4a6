"""Initial values: their statistics, and that they depend on nothing but the key, the path and the layer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.errors import JzeroError
from jzero.models import GPTConfig, functions
from jzero.models.parameters import Parameter, abstract, constant, initialize, logical_axes, normal, stack

CONFIG = GPTConfig(
    vocab_size=256,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=32,
    init_method_std=0.05,
    share_embeddings_and_output_weights=False,
)
KEY = jax.random.key(0)


def leaves(tree):
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def records(layers=4, dtype=jnp.float32):
    """Two parameters of one layer, stacked, and one outside of the layers."""
    record = lambda *shape: Parameter(shape, ("embed",) * len(shape), dtype, normal(1.0))
    return {"blocks": stack({"one": record(8, 16), "two": record(8, 16)}, layers), "outer": record(16, 8)}


def init(tree, key=KEY, **jit_options):
    return jax.jit(lambda key: initialize(tree, key), **jit_options)(key)


def test_statistics_of_a_model():
    for path, x in leaves(jax.jit(functions(CONFIG).init)(KEY)).items():
        if path.endswith("bias"):
            assert not x.any(), path
        elif path.endswith("gain"):
            assert (x == 1).all(), path
        else:
            std = 0.05 / math.sqrt(2 * 4) if path.endswith(("out/weight", "down/weight")) else 0.05
            for layer in x if path.startswith("blocks") else [x]:
                assert abs(float(layer.std()) / std - 1) < 5 / math.sqrt(2 * layer.size), path
                assert abs(float(layer.mean())) < 5 * std / math.sqrt(layer.size), path


@pytest.mark.parametrize("spec", [jax.P("data"), jax.P(None, "data")])
def test_values_do_not_depend_on_the_sharding(spec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharded = jax.block_until_ready(init(records(), out_shardings=jax.NamedSharding(mesh, spec)))
    assert sharded["outer"].addressable_shards[0].data.size == 16 * 8 // 4
    jax.tree.map(np.testing.assert_array_equal, sharded, init(records()))


def test_values_do_not_depend_on_the_layers_that_follow():
    deep, shallow = init(records(layers=4)), init(records(layers=2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b), deep["blocks"], shallow["blocks"])
    np.testing.assert_array_equal(deep["outer"], shallow["outer"])


def test_layers_leaves_and_seeds_differ():
    params, other = init(records()), init(records(), jax.random.key(1))
    one, two = params["blocks"]["one"], params["blocks"]["two"]
    for a, b in ((one[0], one[1]), (one, two), (one, other["blocks"]["one"]), (one[0].T, params["outer"])):
        assert (a != b).mean() > 0.99


def test_sixteen_bit_values_are_the_rounded_float32_ones():
    wide, narrow = init(records()), init(records(dtype=jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), wide, narrow)


def test_one_record_gives_all():
    record = Parameter((3, 5), ("embed", None), jnp.bfloat16, normal(1.0))
    tree = stack({"a": {"weight": record}, "b": Parameter((2,), ("ffn",), jnp.float32, constant(4))}, 6)
    assert abstract(tree) == {
        "a": {"weight": jax.ShapeDtypeStruct((6, 3, 5), jnp.bfloat16)},
        "b": jax.ShapeDtypeStruct((6, 2), jnp.float32),
    }
    assert logical_axes(tree) == {"a": {"weight": ("layers", "embed", None)}, "b": ("layers", "ffn")}
    values = initialize(tree, jax.random.key(0))
    assert (values["b"] == 4).all()
    assert len(np.unique(np.asarray(values["a"]["weight"], np.float32))) > 60
    with pytest.raises(ValueError, match=r"expected an axis per dimension of \(3,\), found"):
        Parameter((3,), ("embed", "ffn"), jnp.float32, constant(0))


@pytest.mark.parametrize("decays", [False, True])
def test_norms_and_biases_decay_only_on_request(decays):
    tree = functions(
        GPTConfig(
            vocab_size=64, num_layers=2, do_layer_norm_weight_decay=decays, share_embeddings_and_output_weights=False
        )
    ).decay
    for path, decay in leaves(tree).items():
        assert decay == (decays or not path.endswith(("gain", "bias"))), path


def test_keys_whose_draws_depend_on_sharding_are_refused():
    with pytest.raises(JzeroError, match=r"initialize: expected a threefry key, .* found rbg; make it with"):
        functions(CONFIG).init(jax.random.key(0, impl="rbg"))
