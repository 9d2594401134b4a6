"""GPT against NumPy in every combination of its options, and what must hold of any GPT."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracles import gpt as oracle

from jzero.errors import JzeroError
from jzero.models import GPT, Dropout, GPTConfig, functions
from jzero.parallel.tensor import TensorParallel

B, T, V = 2, 7, 24
cross_entropy = TensorParallel().cross_entropy
SMALL = {
    "vocab_size": V,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 20,
    "max_position_embeddings": 9,
}
OPTIONS = {
    "normalization": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "swiglu"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "num_query_groups": (None, 2),
    "share_embeddings_and_output_weights": (True, False),
    "bias": (True, False),
}
ALL = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
# Eight of the 64 in which any two options meet in all four ways (an orthogonal array).
PAIRS = [
    {name: OPTIONS[name][bit] for name, bit in zip(OPTIONS, (a, b, c, a ^ b, a ^ c, b ^ c), strict=True)}
    for a, b, c in itertools.product((0, 1), repeat=3)
]
ALL_BUT_PAIRS_SLOW = [pytest.param(o, marks=[] if o in PAIRS else [pytest.mark.slow]) for o in ALL]


def name_of(options):
    return "-".join(str(value) for value in options.values())


def make(**options):
    return GPTConfig(**{**SMALL, **options})


def random_params(config, seed=0):
    """Values of ordinary size everywhere, biases and gains included, so that every parameter matters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.normal(0.3, 0.3, a.shape).astype(np.float32), functions(config).abstract)


def random_batch(seed=0, batch=B, length=T):
    rng = np.random.default_rng(seed)
    tokens, labels = (rng.integers(0, V, (batch, length), dtype=np.int32) for _ in range(2))
    return {"tokens": tokens, "labels": labels}


def outer_of(params):
    return {name: value for name, value in params.items() if name != "blocks"}


def losses(f, params, batch, dropout=None):
    """Losses by the pure functions, as a train step composes them."""
    outer, count = outer_of(params), jax.tree.leaves(params["blocks"])[0].shape[0]
    x = f.embed(outer, batch, dropout)

    def body(x, layer):
        return f.block(layer[0], x, batch, dropout, layer[1]), None

    x, _ = jax.lax.scan(body, x, (params["blocks"], jnp.arange(count)))
    return f.losses(outer, x, batch)


def double(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize("options", ALL_BUT_PAIRS_SLOW, ids=name_of)
def test_logits_match_numpy(options):
    config = make(**options)
    params, batch = random_params(config), random_batch()
    model = GPT(config, params=jax.tree.map(jnp.asarray, params))
    found = jax.jit(lambda tokens: model(tokens))(batch["tokens"])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, oracle.logits(double(params), config, batch["tokens"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", PAIRS, ids=name_of)
def test_gradients_match_central_differences(options):
    config = make(**options)
    f, params, batch = functions(config), random_params(config), random_batch()
    loss, grads = jax.jit(jax.value_and_grad(lambda p: losses(f, p, batch).mean()))(params)

    def reference(p):
        return oracle.losses(p, config, batch["tokens"], batch["labels"]).mean()

    exact = double(params)
    assert float(loss) == pytest.approx(reference(exact), rel=1e-6)
    rng = np.random.default_rng(1)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        direction = rng.normal(size=grad.shape)
        expected = oracle.directional_derivative(reference, exact, tuple(k.key for k in path), direction)
        scale = np.linalg.norm(grad) * np.sqrt(grad.size)
        assert abs(np.vdot(grad, direction) - expected) < 1e-5 * max(scale, 1e-3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", ["learned_absolute", "rope"])
def test_positions_and_segments_match_numpy(kind):
    rotary = {"kv_channels": 8, "rotary_percentage": 0.5} if kind == "rope" else {}
    config = make(position_embedding_type=kind, **rotary)
    params, batch = random_params(config), random_batch()
    segments = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0, 1]], np.int32)
    model = GPT(config, params=jax.tree.map(jnp.asarray, params))
    run = jax.jit(lambda *arguments: model(*arguments))
    found = run(batch["tokens"], positions, segments)
    expected = oracle.logits(double(params), config, batch["tokens"], positions, segments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    alone = run(batch["tokens"][:1, 3:])  # the second document of the first sample, by itself
    np.testing.assert_allclose(found[:1, 3:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_the_future_does_not_change_the_past(implementation):
    config = make(attention_implementation=implementation, attention_dropout=0.5)
    model = GPT(config, nnx.Rngs(0))
    tokens = random_batch()["tokens"]
    changed = tokens.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % V
    run = jax.jit(lambda tokens, dropout: model(tokens, dropout=dropout))
    for dropout in (None, Dropout(jax.random.key(0), jnp.arange(B))):
        before, after = run(tokens, dropout), run(changed, dropout)
        np.testing.assert_array_equal(before[:, :4], after[:, :4])
        assert np.abs(before[:, 4:] - after[:, 4:]).min(axis=-1).max() > 0


@pytest.mark.parametrize("options", PAIRS, ids=name_of)
def test_module_and_functions_have_one_tree(options):
    config = make(**options, param_dtype=jnp.bfloat16)
    f = functions(config)
    model = nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert of(params) == of(f.abstract) == of(jax.eval_shape(f.init, jax.random.key(0)))
    dimensions = jax.tree.map(len, f.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert dimensions == jax.tree.map(lambda x: x.ndim, f.abstract)


def test_a_module_is_trained_as_any_other():
    model = GPT(make(), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    batch = random_batch()

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return cross_entropy(model(batch["tokens"]), batch["labels"]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(5)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 0.05


def test_dropout_of_rate_zero_changes_nothing():
    f = functions(make(hidden_dropout=0.0, attention_dropout=0.0))
    params, batch = f.init(jax.random.key(0)), random_batch()
    dropout = Dropout(jax.random.key(1), jnp.arange(B))
    run = jax.jit(lambda dropout: losses(f, params, batch, dropout))
    np.testing.assert_array_equal(run(dropout), run(None))


@pytest.mark.parametrize(
    ("hidden", "attention", "silent"), [(0.5, 0.0, ("attention", "out")), (0.5, 0.0, ("mlp", "down")), (0.0, 0.5, None)]
)
def test_every_site_drops_anew_in_every_layer(hidden, attention, silent):
    config = make(hidden_dropout=hidden, attention_dropout=attention)
    params, batch = random_params(config), random_batch()
    if silent:  # leaves the other branch as the only one that can differ
        params["blocks"][silent[0]][silent[1]] = jax.tree.map(np.zeros_like, params["blocks"][silent[0]][silent[1]])
    layer, x = jax.tree.map(lambda p: p[0], params["blocks"]), np.ones((B, T, 16), np.float32)
    dropout = Dropout(jax.random.key(0), jnp.arange(B))
    run = jax.jit(lambda index: functions(config).block(layer, x, batch, dropout, index))
    assert (run(0) != run(1)).mean() > 0.2


def test_module_and_functions_drop_alike():
    config = make(hidden_dropout=0.5, attention_dropout=0.5)
    f, params, batch = functions(config), random_params(config), random_batch()
    dropout = Dropout(jax.random.key(0), jnp.arange(B))
    model = GPT(config, params=jax.tree.map(jnp.asarray, params))

    def difference():
        scores = model(batch["tokens"], dropout=dropout)
        return cross_entropy(scores, batch["labels"]) - losses(f, params, batch, dropout)

    np.testing.assert_allclose(jax.jit(difference)(), 0, atol=1e-5)


def test_sixteen_bits_follow_float32():
    wide, narrow = make(num_query_groups=2), make(num_query_groups=2, param_dtype=jnp.bfloat16)
    batch = random_batch()

    def loss_and_init(config):
        f = functions(config)
        return lambda p: losses(f, p, batch).mean(), jax.jit(f.init)(jax.random.key(0))

    loss, params = loss_and_init(wide)
    expected = jax.jit(loss)(params)
    loss, params = loss_and_init(narrow)
    found, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(float(expected), rel=5e-3)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def products(jaxpr):
    """Operand types of every dot_general in a jaxpr, inner ones included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield tuple(v.aval.dtype.name for v in eqn.invars)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def test_no_product_of_a_16_bit_model_is_done_in_float32():
    f = functions(make(param_dtype=jnp.bfloat16))
    batch, dropout = random_batch(), Dropout(jax.random.key(1), jnp.arange(B))
    traced = jax.make_jaxpr(jax.grad(lambda p: losses(f, p, batch, dropout).mean()))(f.abstract)
    found = list(products(traced.jaxpr))
    assert len(found) >= 18  # six products of a layer and the head, each with two more in the backward pass
    assert set(found) == {("bfloat16", "bfloat16")}


def test_manual_region_gives_the_numbers_of_one_device():
    config = make(hidden_dropout=0.3, attention_dropout=0.3, position_embedding_type="rope", num_query_groups=2)
    f = functions(config)
    params, batch = random_params(config), random_batch(batch=8)
    batch["segments"] = np.repeat([[0, 0, 0, 1, 1, 1, 1]], 8, 0).astype(np.int32)
    batch["positions"] = np.repeat([[0, 1, 2, 0, 1, 2, 3]], 8, 0).astype(np.int32)

    def gradient(params, batch, key, samples):
        return jax.value_and_grad(lambda p: losses(f, p, batch, Dropout(key, samples)).sum())(params)

    axes = ("replica", "data")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(params, *args):
        own = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), params)
        return jax.lax.psum(gradient(own, *args), axes)

    rows, key = jax.P(axes), jax.random.key(5)
    specs = (jax.P(), rows, jax.P(), rows)
    spread = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=True))
    found = jax.block_until_ready(spread(params, batch, key, jnp.arange(8)))
    expected = jax.jit(gradient)(params, batch, key, jnp.arange(8))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_selective_keeps_projections_and_no_attention_weights():
    length = 11  # unlike any other size
    f = functions(make(max_position_embeddings=length))
    params, batch = random_params(make(max_position_embeddings=length)), random_batch(length=length)
    layer, x = jax.tree.map(lambda x: jnp.asarray(x[0]), params["blocks"]), jnp.ones((B, length, 16))

    def kept(policy):
        block = lambda layer, x: f.block(layer, x, batch, Dropout(jax.random.key(1), jnp.arange(B)), 0)
        block = block if policy is None else jax.checkpoint(block, policy=policy)

        def residuals(layer, x):
            own = {id(leaf) for leaf in jax.tree.leaves(layer)}
            return [leaf for leaf in jax.tree.leaves(jax.vjp(block, layer, x)[1]) if id(leaf) not in own]

        return [leaf.shape for leaf in jax.eval_shape(residuals, layer, x)]

    is_scores = lambda shape: shape[-2:] == (length, length)
    assert any(map(is_scores, kept(None)))
    chosen = kept(f.selective_policy)
    assert not any(map(is_scores, chosen))
    assert (B, length, 4, 3, 4) in chosen  # queries, keys and values
    assert (B, length, 20) in chosen  # what goes into the activation


def test_gpt3_175b_is_described_without_its_arrays():
    config = GPTConfig(
        vocab_size=51200, num_layers=96, hidden_size=12288, num_attention_heads=96, max_position_embeddings=2048
    )
    before = sum(x.nbytes for x in jax.live_arrays())
    f = functions(config)
    params = jax.eval_shape(f.init, jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(params))
    d, layers = 12288, 96
    assert count == layers * (12 * d * d + 13 * d) + (51200 + 2048) * d + 2 * d
    assert params == f.abstract
    batch = {name: jax.ShapeDtypeStruct((1, 2048), jnp.int32) for name in ("tokens", "labels")}
    assert jax.eval_shape(lambda p, b: losses(f, p, b), params, batch).shape == (1, 2048)
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 2**20


def test_sequence_longer_than_the_position_table_is_refused():
    model = GPT(make(), nnx.Rngs(0))
    with pytest.raises(JzeroError, match=r"tokens: expected at most 9 positions .*, found 10; shorten"):
        model(jnp.zeros((1, 10), jnp.int32))


def test_a_model_needs_values_from_one_source():
    with pytest.raises(TypeError, match="either rngs or params, found neither; write"):
        GPT(make())
