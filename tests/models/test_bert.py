"""BERT against NumPy, with norms before and after, and what must hold of any BERT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import bert as oracle
from oracles.gpt import directional_derivative

from jzero.errors import JzeroError
from jzero.models import BERT, BertConfig, Dropout, GPTConfig, functions
from jzero.models.config import TransformerConfig

B, T, V = 3, 7, 24
SMALL = {
    "vocab_size": V,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 20,
    "max_position_embeddings": 9,
    "layernorm_epsilon": 1e-12,
}
KINDS = [("post_ln", "gelu_exact"), ("pre_ln", "gelu")]  # Devlin's, Megatron's
each_kind = pytest.mark.parametrize(("block", "activation"), KINDS)


def make(block="post_ln", activation="gelu_exact", **options):
    return BertConfig(**{**SMALL, "transformer_block_type": block, "activation": activation, **options})


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.normal(0.3, 0.3, a.shape).astype(np.float32), functions(config).abstract)


def random_batch(seed=0):
    rng = np.random.default_rng(seed)
    text = np.arange(T) < np.array([7, 5, 4])[:, None]
    tokens, labels = (rng.integers(0, V, (B, T), dtype=np.int32) for _ in range(2))
    chosen = (rng.random((B, T)) < 0.5) & text
    return {
        "tokens": tokens, "labels": labels, "segments": text.astype(np.int32),
        "token_types": ((np.arange(T) >= 3) & text).astype(np.int32),
        "loss_mask": chosen.astype(np.float32), "is_random": np.array([1, 0, 1], np.int32),
    }  # fmt: skip


def double(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def outer_of(params):
    return {name: value for name, value in params.items() if name != "blocks"}


def run(f, params, batch, dropout=None):
    x = f.embed(outer_of(params), batch, dropout)
    for i in range(SMALL["num_layers"]):
        x = f.block(jax.tree.map(lambda w, i=i: w[i], params["blocks"]), x, batch, dropout, i)
    return x


def loss(f, params, batch):
    weighted = batch | {
        "weight": batch["loss_mask"] / batch["loss_mask"].sum(), "sample_weight": np.full(B, 1 / B, np.float32)
    }  # fmt: skip
    return f.loss(outer_of(params), run(f, params, batch), weighted)


@each_kind
def test_logits_match_numpy(block, activation):
    config, batch = make(block, activation), random_batch()
    params = random_params(config)
    model = BERT(config, params=jax.tree.map(jnp.asarray, params))
    found = jax.jit(lambda b: model(b["tokens"], b["token_types"], b["segments"]))(batch)
    for a, b in zip(found, oracle.logits(double(params), config, batch), strict=True):
        assert a.dtype == jnp.float32
        text = batch["segments"] == 1 if a.ndim == 3 else slice(None)  # padding sees padding; it counts nowhere
        np.testing.assert_allclose(a[text], b[text], rtol=1e-5, atol=1e-5)


@each_kind
def test_gradients_match_central_differences(block, activation):
    config, batch = make(block, activation), random_batch()
    f, params = functions(config), random_params(config)
    found, grads = jax.jit(jax.value_and_grad(lambda p: loss(f, p, batch)))(params)
    exact, reference = double(params), lambda p: oracle.loss(p, config, batch)
    assert float(found) == pytest.approx(reference(exact), rel=1e-6)
    rng = np.random.default_rng(1)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        direction = rng.normal(size=grad.shape)
        expected = directional_derivative(reference, exact, tuple(k.key for k in path), direction)
        scale = np.linalg.norm(grad) * np.sqrt(grad.size)
        assert abs(np.vdot(grad, direction) - expected) < 1e-5 * max(scale, 1e-3), jax.tree_util.keystr(path)


@each_kind
def test_measures_are_those_of_numpy(block, activation):
    config, batch = make(block, activation), random_batch()
    f, params = functions(config), random_params(config)
    sums = jax.jit(lambda p: f.measures(outer_of(p), run(f, p, batch), batch))(params)
    found = {name: float(sums[name] / count) for name, count in f.counts(batch).items()}
    assert found == pytest.approx(oracle.means(double(params), config, batch), rel=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_padding_changes_nothing_and_both_sides_count(implementation):
    config = make(attention_implementation=implementation)
    model, batch = BERT(config, nnx.Rngs(0)), random_batch()
    look = jax.jit(lambda tokens: model(tokens, batch["token_types"], batch["segments"]))
    before = look(batch["tokens"])
    padded = np.where(batch["segments"] == 1, batch["tokens"], (batch["tokens"] + 1) % V)
    text = batch["segments"] == 1
    after = look(padded)
    np.testing.assert_array_equal(before[0][text], after[0][text])
    np.testing.assert_array_equal(before[1], after[1])
    alone = model(batch["tokens"][2:, :4], batch["token_types"][2:, :4])
    np.testing.assert_allclose(before[0][2, :4], alone[0][0], atol=1e-5)
    for place in (0, 6):
        changed = batch["tokens"].copy()
        changed[0, place] = (changed[0, place] + 1) % V
        assert np.abs(look(changed)[0][0] - before[0][0]).max(-1).min() > 0


@each_kind
@pytest.mark.parametrize("binary", [True, False])
def test_module_and_functions_have_one_tree(block, activation, binary):
    config = make(block, activation, bert_binary_head=binary, param_dtype=jnp.bfloat16)
    f = functions(config)
    model = nnx.eval_shape(lambda: BERT(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert of(params) == of(f.abstract) == of(jax.eval_shape(f.init, jax.random.key(0)))
    dimensions = jax.tree.map(len, f.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert dimensions == jax.tree.map(lambda x: x.ndim, f.abstract)
    assert ("pooler" in params, "binary_head" in params, f.has_sample_loss) == (binary,) * 3
    assert ("norm" in params["embedding"], "final_norm" in params) == (block == "post_ln", block == "pre_ln")
    assert f.decay["head"] == {"transform": {"weight": True, "bias": False}, "norm": {"gain": False, "bias": False},
                               "bias": False}  # fmt: skip


def test_module_and_functions_drop_alike():
    config = make(hidden_dropout=0.5, attention_dropout=0.5)
    f, params, batch = functions(config), random_params(config), random_batch()
    dropout = Dropout(jax.random.key(0), jnp.arange(B))
    model = BERT(config, params=jax.tree.map(jnp.asarray, params))

    @jax.jit
    def both(params):
        scores, _ = model(batch["tokens"], batch["token_types"], batch["segments"], dropout=dropout)
        return scores, f.logits(outer_of(params), run(f, params, batch, dropout))

    scores, found = both(params)
    np.testing.assert_allclose(scores, found, atol=1e-5)
    assert np.abs(scores - model(batch["tokens"], batch["token_types"], batch["segments"])[0]).max() > 0.1


def test_bert_large_is_described_without_its_arrays():
    """The published BertForPreTraining of 1024 × 24: 336,226,108 numbers with a vocabulary of 30,522."""
    config = BertConfig(
        vocab_size=30522, num_layers=24, hidden_size=1024, num_attention_heads=16, transformer_block_type="post_ln"
    )
    before = sum(x.nbytes for x in jax.live_arrays())
    f = functions(config)
    assert sum(x.size for x in jax.tree.leaves(f.abstract)) == 336_226_108
    assert f.abstract == jax.eval_shape(f.init, jax.random.key(0))
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 2**20


def test_mistakes_are_named():
    with pytest.raises(JzeroError, match=r"model\.num_tokentypes: expected a whole number of at least 0, found -1"):
        make(num_tokentypes=-1)
    with pytest.raises(JzeroError, match=r"model\.transformer_block_type: expected pre_ln for a GPT, found post_ln"):
        GPTConfig(vocab_size=4, transformer_block_type="post_ln")
    with pytest.raises(JzeroError, match=r"a known kind of model, found TransformerConfig"):
        functions(TransformerConfig(vocab_size=4))
    with pytest.raises(TypeError, match="either rngs or params, found neither; write"):
        BERT(make())
