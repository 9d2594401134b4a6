"""Hugging Face's folders: every number lands where its name says, on any mesh; damage is named, halves never stay.

The tensors are made here by hand, from the layout that transformers' modelling files have; tests/parity runs those.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jzero import make_mesh
from jzero.errors import JzeroError
from jzero.models import GPTConfig, functions, hf
from jzero.models.hf import files, weights

save_file = pytest.importorskip("safetensors.numpy").save_file
D, H, K, F, L, V = 24, 4, 6, 40, 3, 13
GPT2 = {
    "model_type": "gpt2", "vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 8, "n_inner": F,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
    "num_key_value_heads": 2, "intermediate_size": F, "max_position_embeddings": 8,
}  # fmt: skip


def gpt2_tensors():
    rng, draw = np.random.default_rng(0), lambda *shape: rng.normal(size=shape).astype(np.float32)
    tensors = {"wte.weight": draw(V, D), "wpe.weight": draw(8, D), "ln_f.weight": draw(D), "ln_f.bias": draw(D)}
    for i in range(L):
        shapes = {
            "ln_1.weight": (D,), "ln_1.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,), "attn.c_proj.weight": (D, D),
            "attn.c_proj.bias": (D,), "mlp.c_fc.weight": (D, F), "mlp.c_fc.bias": (F,), "mlp.c_proj.weight": (F, D),
            "mlp.c_proj.bias": (D,),
        }  # fmt: skip
        tensors |= {f"h.{i}.{name}": draw(*shape) for name, shape in shapes.items()}
    return {f"transformer.{name}": x for name, x in tensors.items()}


def llama_tensors():
    rng, draw = np.random.default_rng(1), lambda *shape: rng.normal(size=shape).astype(np.float32)
    tensors = {"model.embed_tokens.weight": draw(V, D), "model.norm.weight": draw(D), "lm_head.weight": draw(V, D)}
    for i in range(L):
        shapes = {
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (D, D), "self_attn.k_proj.weight": (2 * K, D),
            "self_attn.v_proj.weight": (2 * K, D), "self_attn.o_proj.weight": (D, D),
            "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
        }  # fmt: skip
        tensors |= {f"model.layers.{i}.{name}": draw(*shape) for name, shape in shapes.items()}
    return tensors


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), b)


def test_gpt2_every_head_is_where_it_belongs(tmp_path):
    tensors = gpt2_tensors()
    params = hf.load(write(tmp_path, GPT2, tensors))
    blocks = params["blocks"]
    same(params["embedding"]["token"], tensors["transformer.wte.weight"])
    same(params["embedding"]["position"], tensors["transformer.wpe.weight"])
    for i in range(L):
        of = lambda name, i=i: tensors[f"transformer.h.{i}.{name}"]
        for head in range(H):
            for role in range(3):  # query, key, value
                columns = slice(role * D + head * K, role * D + (head + 1) * K)
                same(blocks["attention"]["qkv"]["weight"][i, :, head, role], of("attn.c_attn.weight")[:, columns])
                same(blocks["attention"]["qkv"]["bias"][i, head, role], of("attn.c_attn.bias")[columns])
            rows = slice(head * K, (head + 1) * K)
            same(blocks["attention"]["out"]["weight"][i, head], of("attn.c_proj.weight")[rows])
        same(blocks["mlp"]["up"]["weight"][i], of("mlp.c_fc.weight"))
        same(blocks["mlp"]["down"]["weight"][i], of("mlp.c_proj.weight"))
        same(blocks["mlp_norm"]["bias"][i], of("ln_2.bias"))


def test_llama_every_head_is_where_it_belongs(tmp_path):
    tensors = llama_tensors()
    params = hf.load(write(tmp_path, LLAMA, tensors))
    blocks = params["blocks"]
    same(params["head"]["weight"], tensors["lm_head.weight"])
    for i in range(L):
        of = lambda name, i=i: tensors[f"model.layers.{i}.{name}.weight"]
        fused = blocks["attention"]["qkv"]["weight"][i]  # [D, G, R + 2, K]
        for group in range(2):
            for r in range(2):
                rows = slice((2 * group + r) * K, (2 * group + r + 1) * K)
                same(fused[:, group, r], of("self_attn.q_proj")[rows].T)
            rows = slice(group * K, (group + 1) * K)
            same(fused[:, group, 2], of("self_attn.k_proj")[rows].T)
            same(fused[:, group, 3], of("self_attn.v_proj")[rows].T)
        same(blocks["attention"]["out"]["weight"][i].reshape(D, D), of("self_attn.o_proj").T)
        same(blocks["mlp"]["up"]["weight"][i, :, 0], of("mlp.gate_proj").T)
        same(blocks["mlp"]["up"]["weight"][i, :, 1], of("mlp.up_proj").T)
        same(blocks["mlp"]["down"]["weight"][i], of("mlp.down_proj").T)


@pytest.mark.parametrize(
    ("config", "tensors"), [(GPT2, gpt2_tensors()), (LLAMA, llama_tensors())], ids=["gpt2", "llama"]
)
def test_what_is_written_is_what_was_read(tmp_path, config, tensors):
    """From shards on eight devices, in several files; names, shapes and every bit."""
    folder = write(tmp_path / "there", config, tensors)
    params = hf.load(folder, like=placed(hf.read_config(folder)))
    hf.save(tmp_path / "back", hf.read_config(folder), params, max_bytes=5000)
    with files.Tensors(tmp_path / "back") as found:
        assert set(found.shapes) == set(tensors)
        for name, x in tensors.items():
            same(found.slices(name)[tuple(slice(None) for _ in x.shape)], x)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 5
    assert hf.read_config(tmp_path / "back") == hf.read_config(folder)


def placed(config):
    """Abstract parameters on a mesh of eight, matrices split over both axes where they divide; chunks of layers."""
    mesh = make_mesh(4, 2)

    def one(x):
        parts = iter(["tensor", "data"])
        spec = [next(parts, None) if n % 4 == 0 else None for n in x.shape[::-1]]
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec[::-1])))

    return jax.tree.map(one, functions(config).abstract)


def test_layers_may_lie_in_chunks(tmp_path):
    folder = write(tmp_path, {**GPT2, "n_layer": L}, gpt2_tensors())
    whole, like = hf.load(folder), functions(hf.read_config(folder)).abstract
    chunked = lambda x: jax.ShapeDtypeStruct((3, 1, *x.shape[1:]), x.dtype)
    like["blocks"] = jax.tree.map(chunked, like["blocks"])
    found = hf.load(folder, like=like)
    jax.tree.map(lambda a, b: same(a.reshape(b.shape), b), found, whole)


def test_a_device_reads_its_own_part(tmp_path, monkeypatch):
    """Split over eight devices along any dimension but that of fused roles, all together read a tensor once."""
    folder = write(tmp_path, LLAMA, llama_tensors())
    read = []

    class Counted:
        def __init__(self, slices, name):
            self.slices, self.name = slices, name

        def __getitem__(self, index):
            part = self.slices[index]
            read.append((self.name, part.size))
            return part

    original = weights._fill
    monkeypatch.setattr(
        weights, "_fill", lambda out, s, piece, *rest: original(out, Counted(s, piece.name), piece, *rest)
    )
    like = placed(hf.read_config(folder))
    hf.load(folder, like=like)
    down = [size for name, size in read if name == "model.layers.{}.mlp.down_proj.weight"]
    assert len(down) == 8 * L
    assert sum(down) == L * F * D
    assert max(size for name, size in read if "proj" in name) < F * D / 2


def test_padding_of_the_vocabulary(tmp_path):
    """Ours has rows that theirs lacks: zeros, which are left out again."""
    folder = write(tmp_path / "there", LLAMA, llama_tensors())
    config = GPTConfig(**{**vars(hf.read_config(folder)), "vocab_size": 16, "vocab_padding": 3})
    params = hf.load(folder, config)
    assert params["head"]["weight"].shape == (16, D)
    assert not np.asarray(params["embedding"]["token"][V:]).any()
    hf.save(tmp_path / "back", config, params)
    with files.Tensors(tmp_path / "back") as found:
        assert found.shapes["lm_head.weight"] == (V, D)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == V


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sixteen_bits(tmp_path, dtype):
    tensors = {name: x.astype(dtype) for name, x in gpt2_tensors().items()}
    token = hf.load(write(tmp_path / "there", GPT2, tensors))["embedding"]["token"]
    assert token.dtype == jnp.float32
    same(token, tensors["transformer.wte.weight"].astype(np.float32))


def test_names_without_the_models_own_prefix_and_what_holds_nothing(tmp_path):
    """As `gpt2` itself is stored; its masks, and a head that is the embedding, are passed over."""
    tensors = {name.removeprefix("transformer."): x for name, x in gpt2_tensors().items()}
    extra = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32), "lm_head.weight": tensors["wte.weight"].copy()}
    params = hf.load(write(tmp_path, GPT2, tensors | extra))
    same(params["embedding"]["token"], tensors["wte.weight"])


def test_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = gpt2_tensors()
    del tensors["transformer.h.1.ln_2.bias"]
    tensors["transformer.h.7.ln_1.bias"] = np.zeros(3, np.float32)
    tensors["transformer.wpe.weight"] = np.zeros((9, D), np.float32)
    with pytest.raises(JzeroError) as error:
        hf.load(write(tmp_path, GPT2, tensors))
    for part in (
        "1 missing (transformer.h.1.ln_2.bias)",
        "1 not of this model (transformer.h.7.ln_1.bias)",
        "1 of another shape (transformer.wpe.weight: expected [8, 24], found [9, 24])",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mamba"}, "model_type: expected gpt2 or llama or bert, found mamba"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type: expected default, found llama3"),
        ({"hidden_act": "relu"}, "hidden_act: expected silu, found relu"),
        ({"attention_bias": True}, "mlp_bias: expected True, found False"),
    ],
)
def test_variants_that_do_not_exist_here_are_refused(change, text):
    with pytest.raises(JzeroError, match=text):
        hf.from_hf({**LLAMA, **change})


def test_a_model_that_hugging_face_does_not_have():
    with pytest.raises(JzeroError, match=r"gpt2 is the nearest, found model\.normalization=rmsnorm"):
        hf.to_hf(GPTConfig(vocab_size=16, hidden_size=24, num_attention_heads=4, normalization="rmsnorm"))


def test_damage_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(JzeroError, match=r"expected model\.safetensors or .*json, found neither"):
        hf.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(JzeroError, match="expected a safetensors file, found"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JzeroError, match="expected a JSON file"):
        hf.read_config(tmp_path)


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    config = GPTConfig(vocab_size=16, num_layers=2, hidden_size=24, num_attention_heads=4)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), functions(config).abstract)
    made = iter([None, OSError(28, "No space left on device")])
    original = files.safetensors().numpy.save_file

    def failing(*arguments, **options):
        if error := next(made):
            raise error
        original(*arguments, **options)

    monkeypatch.setattr(files.safetensors().numpy, "save_file", failing)
    with pytest.raises(OSError, match="No space"):
        hf.save(tmp_path / "a" / "b", config, params, max_bytes=10_000)
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(JzeroError, match="expected no such file or folder, found one"):
        hf.save(tmp_path / "full", config, params)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
