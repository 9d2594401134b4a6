"""How the tensors of each architecture are named and laid out at Hugging Face: one table per architecture, as data.

A row says which tensors make one parameter of ours. A tensor and the part of the parameter that it fills are described
by the same letters: words are dimensions, letters of a word are factors of it, the slowest first. "HK D" is a matrix
whose H · K rows become the dimensions H and K of "D H K".

Letters: D and E model, F feed-forward, V vocabulary, P positions, G groups = heads of keys and values, R query heads
of a group, H = G · R heads, K head width, C = R + 2 roles of a head (queries, key, value), S = 2 halves of a gated
layer or classes, O one of such roles or halves, T kinds of segments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jzero.models.config import TransformerConfig

Sizes = dict[str, int]
"""Letter -> size."""
Box = tuple[tuple[int, int], ...]
"""(first, one past the last) of every dimension."""


class Piece(NamedTuple):
    """One tensor, and where it goes."""

    name: str  # "{}" stands for the number of the layer
    theirs: str  # its dimensions: "HK D"
    ours: str  # those of the part that it fills: "D H K"
    start: int = 0  # where the part begins in the one dimension in which it is smaller than the parameter


class Row(NamedTuple):
    """One parameter of ours and its tensors."""

    path: str  # "blocks/attention/qkv/weight"
    ours: str  # its dimensions, of one layer: "D G C K"
    pieces: tuple[Piece, ...]


class Table(NamedTuple):
    """An architecture."""

    rows: tuple[Row, ...]
    prefix: str  # of tensors of the model without its head; files of that model alone leave it out
    ignored: re.Pattern  # tensors that hold nothing to learn, or the same as another one


def _row(path: str, dimensions: str, name: str, theirs: str | None = None) -> Row:
    return Row(path, dimensions, (Piece(name, theirs or dimensions, dimensions),))


def _gpt2(config: TransformerConfig) -> Table:
    """GPT2LMHeadModel: linear layers lie [inputs, outputs], queries, keys and values one behind the other."""
    layer, ours = "transformer.h.{}.", "blocks/"
    rows = [
        _row("embedding/token", "V D", "transformer.wte.weight"),
        _row("embedding/position", "P D", "transformer.wpe.weight"),
        _row("final_norm/gain", "D", "transformer.ln_f.weight"),
        _row("final_norm/bias", "D", "transformer.ln_f.bias"),
        _row(ours + "attention_norm/gain", "D", layer + "ln_1.weight"),
        _row(ours + "attention_norm/bias", "D", layer + "ln_1.bias"),
        _row(ours + "attention/qkv/weight", "D G C K", layer + "attn.c_attn.weight", "D CGK"),
        _row(ours + "attention/qkv/bias", "G C K", layer + "attn.c_attn.bias", "CGK"),
        _row(ours + "attention/out/weight", "H K D", layer + "attn.c_proj.weight", "HK D"),
        _row(ours + "attention/out/bias", "D", layer + "attn.c_proj.bias"),
        _row(ours + "mlp_norm/gain", "D", layer + "ln_2.weight"),
        _row(ours + "mlp_norm/bias", "D", layer + "ln_2.bias"),
        _row(ours + "mlp/up/weight", "D F", layer + "mlp.c_fc.weight"),
        _row(ours + "mlp/up/bias", "F", layer + "mlp.c_fc.bias"),
        _row(ours + "mlp/down/weight", "F D", layer + "mlp.c_proj.weight"),
        _row(ours + "mlp/down/bias", "D", layer + "mlp.c_proj.bias"),
    ]
    return Table(
        (*rows, *_head(config)), "transformer.", _ignored(config, r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
    )


def _llama(config: TransformerConfig) -> Table:
    """LlamaForCausalLM: linear layers lie [outputs, inputs]; its rotary pairs lie as ours do."""
    layer, ours, group = "model.layers.{}.", "blocks/", config.num_attention_heads // config.query_groups
    attention = layer + "self_attn.{}_proj."
    rows = [
        _row("embedding/token", "V D", "model.embed_tokens.weight"),
        _row("final_norm/gain", "D", "model.norm.weight"),
        _row(ours + "attention_norm/gain", "D", layer + "input_layernorm.weight"),
        Row(ours + "attention/qkv/weight", "D G C K", _query_key_value(attention + "weight", group, " D")),
        _row(ours + "attention/out/weight", "H K D", layer + "self_attn.o_proj.weight", "D HK"),
        _row(ours + "mlp_norm/gain", "D", layer + "post_attention_layernorm.weight"),
        Row(ours + "mlp/up/weight", "D S F", _gated(layer + "mlp.{}_proj.weight", " D")),
        _row(ours + "mlp/down/weight", "F D", layer + "mlp.down_proj.weight", "D F"),
    ]
    if config.bias:
        rows += [
            Row(ours + "attention/qkv/bias", "G C K", _query_key_value(attention + "bias", group)),
            _row(ours + "attention/out/bias", "D", layer + "self_attn.o_proj.bias"),
            Row(ours + "mlp/up/bias", "S F", _gated(layer + "mlp.{}_proj.bias")),
            _row(ours + "mlp/down/bias", "D", layer + "mlp.down_proj.bias"),
        ]
    return Table((*rows, *_head(config)), "model.", _ignored(config, r".*rotary_emb\.inv_freq"))


def _bert(config: TransformerConfig) -> Table:
    """BertForPreTraining or BertForMaskedLM: linear layers lie [outputs, inputs]; a norm follows each sum."""
    rows = [
        _row("embedding/token", "V D", "bert.embeddings.word_embeddings.weight"),
        _row("embedding/position", "P D", "bert.embeddings.position_embeddings.weight"),
        _row("embedding/token_type", "T D", "bert.embeddings.token_type_embeddings.weight"),
        *_norm("embedding/norm", "bert.embeddings.LayerNorm"),
        *_bert_layer("bert.encoder.layer.{}."),
        *_dense("head/transform", "D E", "cls.predictions.transform.dense", "E D"),
        *_norm("head/norm", "cls.predictions.transform.LayerNorm"),
        _row("head/bias", "V", "cls.predictions.bias"),
    ]
    same = r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.(weight|bias)"
    if getattr(config, "bert_binary_head", False):
        rows += _dense("pooler", "D E", "bert.pooler.dense", "E D")
        rows += _dense("binary_head", "D S", "cls.seq_relationship", "S D")
    else:
        same += r"|bert\.pooler\..*|cls\.seq_relationship\..*"
    return Table(tuple(rows), "bert.", re.compile(same))


def _bert_layer(layer: str) -> list[Row]:
    rows = [
        *_dense("blocks/attention/out", "H K D", layer + "attention.output.dense", "D HK"),
        *_norm("blocks/attention_norm", layer + "attention.output.LayerNorm"),
        *_dense("blocks/mlp/up", "D F", layer + "intermediate.dense", "F D"),
        *_dense("blocks/mlp/down", "F D", layer + "output.dense", "D F"),
        *_norm("blocks/mlp_norm", layer + "output.LayerNorm"),
    ]
    for kind, front, back in (("weight", "D ", " D"), ("bias", "", "")):
        pieces = [
            Piece(f"{layer}attention.self.{role}.{kind}", "GOK" + back, front + "G O K", start)
            for start, role in enumerate(("query", "key", "value"))
        ]
        rows.append(Row(f"blocks/attention/qkv/{kind}", front + "G C K", tuple(pieces)))
    return rows


TABLES: dict[str, Callable[[TransformerConfig], Table]] = {"gpt2": _gpt2, "llama": _llama, "bert": _bert}
"""By the `model_type` of config.json."""


def _dense(path: str, dimensions: str, name: str, theirs: str) -> list[Row]:
    """Weight and bias of a linear layer; outputs are the first dimension there and the last here."""
    outputs = theirs.split()[0]
    return [_row(f"{path}/weight", dimensions, f"{name}.weight", theirs), _row(f"{path}/bias", outputs, f"{name}.bias")]


def _norm(path: str, name: str) -> list[Row]:
    return [_row(f"{path}/gain", "D", f"{name}.weight"), _row(f"{path}/bias", "D", f"{name}.bias")]


def _query_key_value(name: str, group: int, inputs: str = "") -> tuple[Piece, ...]:
    """Three tensors for the roles of each group: its R queries, its key, its value."""
    front = "D " if inputs else ""
    named = lambda role: name.replace("{}", "\0", 1).replace("{}", role).replace("\0", "{}")
    return (
        Piece(named("q"), "GRK" + inputs, front + "G R K"),
        Piece(named("k"), "GOK" + inputs, front + "G O K", group),
        Piece(named("v"), "GOK" + inputs, front + "G O K", group + 1),
    )


def _gated(name: str, inputs: str = "") -> tuple[Piece, ...]:
    """Two tensors: the gate, then what it gates."""
    front = "D " if inputs else ""
    named = lambda half: name.replace("{}", "\0", 1).replace("{}", half).replace("\0", "{}")
    return (Piece(named("gate"), "OF" + inputs, front + "O F"), Piece(named("up"), "OF" + inputs, front + "O F", 1))


def _head(config: TransformerConfig) -> list[Row]:
    tied = getattr(config, "share_embeddings_and_output_weights", True)
    return [] if tied else [_row("head/weight", "V D", "lm_head.weight")]


def _ignored(config: TransformerConfig, pattern: str) -> re.Pattern:
    return re.compile(pattern if _head(config) else rf"{pattern}|lm_head\.weight")


# --- the layout of one tensor ----------------------------------------------------------------------------------------


def sizes(config: TransformerConfig) -> Sizes:
    """The size of every letter; V without padding.

    Example:
        >>> sizes(TransformerConfig(vocab_size=384, hidden_size=64, num_attention_heads=4))["K"]
        16
    """
    per_group = config.num_attention_heads // config.query_groups
    return {
        "D": config.hidden_size, "E": config.hidden_size, "F": config.ffn_width,
        "V": config.vocab_size - config.vocab_padding,
        "P": config.max_position_embeddings, "G": config.query_groups, "R": per_group, "C": per_group + 2,
        "H": config.num_attention_heads, "K": config.head_width, "S": 2, "O": 1,
        "T": getattr(config, "num_tokentypes", 0),
    }  # fmt: skip


def shape(dimensions: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape of what has these dimensions.

    Example:
        >>> shape("HK D", {"H": 2, "K": 3, "D": 5})
        (6, 5)
    """
    return tuple(math.prod(sizes[letter] for letter in word) for word in dimensions.split())


def to_theirs(part: np.ndarray, piece: Piece) -> np.ndarray:
    """The part of our parameter that a piece fills, as the tensor lies in the file.

    Example:
        >>> to_theirs(np.arange(12).reshape(2, 2, 3), Piece("", "HK D", "D H K")).shape
        (6, 2)
    """
    ours, theirs = piece.ours.split(), piece.theirs.split()
    known = dict(zip(ours, part.shape, strict=True))
    lying = part.transpose([ours.index(letter) for word in theirs for letter in word])
    return np.ascontiguousarray(lying.reshape(shape(piece.theirs, known)))


def read_box(tensor: Any, piece: Piece, box: Box, sizes: Sizes) -> np.ndarray:
    """A box of the part that a piece fills, reading little more of the tensor than it needs.

    Args:
        tensor: anything that gives a NumPy array for one slice per dimension.
        piece: its layout.
        box: of the part, in the order of `piece.ours`.
        sizes: of every letter.

    Example:
        >>> tensor, piece = np.arange(12).reshape(6, 2), Piece("", "HK D", "D H K")
        >>> read_box(tensor, piece, ((0, 1), (1, 2), (0, 3)), {"D": 2, "H": 2, "K": 3}).tolist()
        [[[6, 8, 10]]]
    """
    ours, theirs = piece.ours.split(), piece.theirs.split()
    wanted = dict(zip(ours, box, strict=True))
    # A dimension is read from the first to the last of its slowest factor; the faster ones are chosen from in memory.
    step = {word: math.prod(sizes[letter] for letter in word[1:]) for word in theirs}
    read = tensor[tuple(slice(*(end * step[word] for end in wanted[word[0]])) for word in theirs)]
    first = lambda word: wanted[word[0]][1] - wanted[word[0]][0]
    apart = read.reshape([n for word in theirs for n in (first(word), *(sizes[letter] for letter in word[1:]))])
    fast = [slice(None) if i == 0 else slice(*wanted[letter]) for word in theirs for i, letter in enumerate(word)]
    letters = "".join(theirs)
    return apart[tuple(fast)].transpose([letters.index(letter) for letter in ours])
