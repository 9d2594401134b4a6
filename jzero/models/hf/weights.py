"""Weights from a folder of Hugging Face's onto a mesh, and back; one tensor, or a part of one, at a time."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jzero.errors import JzeroError
from jzero.models.config import TransformerConfig
from jzero.models.functions import functions
from jzero.models.hf import configs, files, tables
from jzero.models.hf.files import Tensors
from jzero.models.hf.tables import Piece, Row, Table
from jzero.models.parameters import Tree

_MAX_NAMED = 3  # of the tensors that an error names


def read_config(folder: str | Path) -> TransformerConfig:
    """The architecture of the model in a folder of Hugging Face's, with float32 parameters; see `load` for an example.

    Args:
        folder: with config.json.

    Returns:
        A `GPTConfig` or a `BertConfig`.

    Raises:
        JzeroError: there is no config.json, or it is of a model that does not exist here.
    """
    return configs.from_hf(files.read_json(Path(folder) / files.CONFIG))


def load(folder: str | Path, config: TransformerConfig | None = None, like: Tree | None = None) -> Tree:
    """The parameters of the model in a folder of Hugging Face's, straight onto the devices.

    Each device reads its own part of each tensor: neither a device nor the host holds the model, or more of it than one
    tensor. Rows of a vocabulary's padding are zeros.

    Args:
        folder: with config.json and safetensors, in one file or several.
        config: the model; None: `read_config`'s.
        like: nested dict of `jax.ShapeDtypeStruct`s that say shapes, types and shardings, those of
            `jzero.models.functions(config).abstract` with shardings; layers may lie in more than one dimension
            ([chunks, layers of a chunk, ...]). None: the model's own shapes, on JAX's first device.

    Returns:
        Nested dict of arrays like `like`.

    Raises:
        JzeroError: tensors are missing, left over, or of another shape; names them.

    Example:
        >>> import tempfile
        >>> from jzero.models import GPTConfig
        >>> config = GPTConfig(vocab_size=64, num_layers=2, hidden_size=32, num_attention_heads=4)
        >>> folder = Path(tempfile.mkdtemp()) / "model"
        >>> save(folder, config, functions(config).init(jax.random.key(0)))
        >>> read_config(folder).num_layers, load(folder)["blocks"]["mlp"]["up"]["bias"].shape
        (2, (2, 128))
    """
    folder = Path(folder)
    config = config or read_config(folder)
    wanted = functions(config).abstract if like is None else like
    sizes = tables.sizes(config)
    with Tensors(folder) as tensors:
        table = _checked(_table(config), tensors, config)
        rows = {row.path: row for row in table.rows}

        def leaf(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
            row = rows[jax.tree_util.keystr(path, simple=True, separator="/")]
            read = functools.lru_cache(maxsize=1)(functools.partial(_read, tensors, row, sizes, x))
            sharding = x.sharding or SingleDeviceSharding(jax.local_devices()[0])
            bounds = lambda index: tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True))
            return jax.make_array_from_callback(x.shape, sharding, lambda index: read(bounds(index)))

        return jax.tree_util.tree_map_with_path(leaf, wanted)


def check(folder: str | Path, config: TransformerConfig) -> None:
    """Looks at the names and shapes of a folder's tensors; reads none.

    Args:
        folder: with safetensors, in one file or several.
        config: the model that they should be of.

    Raises:
        JzeroError: tensors are missing, left over, or of another shape; names them.
    """
    with Tensors(Path(folder)) as tensors:
        _checked(_table(config), tensors, config)


def save(
    folder: str | Path,
    config: TransformerConfig,
    params: Tree,
    *,
    dtype: Any = None,
    max_bytes: int = 5 * 10**9,
    beside: Sequence[Path] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model as Hugging Face's transformers read it; the folder appears complete, or not at all.

    Layers come off the mesh one at a time; the host holds the tensors of one file. Padding is left out. On several
    hosts every process calls it and process 0 writes.

    Args:
        folder: must not exist, or be empty.
        config: the model.
        params: its parameters, nested dict of arrays of the model's shapes, on any mesh.
        dtype: of the tensors; None: the parameters' own.
        max_bytes: most bytes of a file; more are several files with an index.
        beside: files to copy into the folder, such as tokenizer.json.
        extra: further keys of config.json, such as eos_token_id.

    Raises:
        JzeroError: Hugging Face has no such architecture, or there is something at `folder`.

    Example:
        >>> import tempfile
        >>> from jzero.models import BertConfig
        >>> config = BertConfig(vocab_size=64, num_layers=2, hidden_size=32, num_attention_heads=4,
        ...                     transformer_block_type="post_ln", activation="gelu_exact")
        >>> folder = Path(tempfile.mkdtemp()) / "model"
        >>> save(folder, config, functions(config).init(jax.random.key(0)), dtype="bfloat16")
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    values, table, sizes = configs.to_hf(config), _table(config), tables.sizes(config)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): x
            for path, x in jax.tree_util.tree_leaves_with_path(params)}  # fmt: skip
    kind = lambda row: jnp.dtype(dtype or flat[row.path].dtype)
    bytes_of = lambda row, piece: math.prod(tables.shape(piece.theirs, sizes)) * kind(row).itemsize
    order = {piece.name.replace("{}", str(i)): bytes_of(row, piece)
             for row, i in _each(table, config) for piece in row.pieces}  # fmt: skip
    tensors = ((name, x.astype(kind(row))) for row, i in _each(table, config)
               for name, x in _pieces(flat[row.path], row, i, sizes))  # fmt: skip
    if jax.process_index():
        for _ in tensors:  # takes part in bringing them off the mesh
            pass
        return
    with files.new_folder(Path(folder)) as new:
        files.write_files(new, files.assign(order, max_bytes), tensors)
        values |= {"dtype": kind(table.rows[0]).name, **(extra or {})}
        (new / files.CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        for path in beside:
            shutil.copyfile(path, new / path.name)


def _table(config: TransformerConfig) -> Table:
    return tables.TABLES[configs.kind(config)](config)


def _stacked(row: Row) -> bool:
    return "{}" in row.pieces[0].name


def _each(table: Table, config: TransformerConfig) -> Iterator[tuple[Row, int]]:
    """Rows with the number of a layer: what is outside of the layers once, then layer by layer."""
    for row in table.rows:
        if not _stacked(row):
            yield row, 0
    for i in range(config.num_layers):
        for row in table.rows:
            if _stacked(row):
                yield row, i


# --- reading ---------------------------------------------------------------------------------------------------------


def _checked(table: Table, tensors: Tensors, config: TransformerConfig) -> Table:
    """The table with the names that the files have; raises unless they hold exactly what it says."""
    if not any(name.startswith(table.prefix) for name in tensors.shapes):  # saved without its head
        bare = lambda piece: piece._replace(name=piece.name.removeprefix(table.prefix))
        table = table._replace(rows=tuple(row._replace(pieces=tuple(map(bare, row.pieces))) for row in table.rows))
    sizes = tables.sizes(config)
    expected = {piece.name.replace("{}", str(i)): tables.shape(piece.theirs, sizes)
                for row, i in _each(table, config) for piece in row.pieces}  # fmt: skip
    found = {name: shape for name, shape in tensors.shapes.items() if not table.ignored.fullmatch(name)}
    wrong = [f"{name}: expected {list(shape)}, found {list(found[name])}"
             for name, shape in expected.items() if name in found and found[name] != shape]  # fmt: skip
    problems = {
        "missing": [name for name in expected if name not in found],
        "not of this model": [name for name in found if name not in expected],
        "of another shape": wrong,
    }
    told = [f"{len(names)} {what} ({'; '.join(names[:_MAX_NAMED])}{', …' * (len(names) > _MAX_NAMED)})"
            for what, names in problems.items() if names]  # fmt: skip
    if told:
        raise JzeroError(
            f"{tensors.folder}: expected the {len(expected)} tensors of a {configs.kind(config)} model as configured, "
            f"found {', '.join(told)}; take the configuration that `jzero convert` writes for this folder"
        )
    return table


def _read(tensors: Tensors, row: Row, sizes: tables.Sizes, like: Any, index: tables.Box) -> np.ndarray:
    """A box of a parameter: its layers, which may lie in several dimensions, one by one."""
    lead = len(index) - len(row.ours.split())
    enumerated, box = index[:lead], index[lead:]
    out = np.zeros([end - first for first, end in index], like.dtype)
    numbers = np.arange(math.prod(like.shape[:lead])).reshape(like.shape[:lead])
    numbers = numbers[tuple(slice(*bounds) for bounds in enumerated)].ravel()
    layers = out.reshape(len(numbers), *out.shape[lead:])
    for layer, number in zip(layers, numbers, strict=True):
        for piece in row.pieces:
            slices = tensors.slices(piece.name.replace("{}", str(number)))
            _fill(layer, slices, piece, _offsets(row, piece, sizes), box, sizes)
    return out


def _offsets(row: Row, piece: Piece, sizes: tables.Sizes) -> tuple[int, ...]:
    """Where a piece begins in each dimension of its parameter."""
    part, whole = tables.shape(piece.ours, sizes), tables.shape(row.ours, sizes)
    return tuple(piece.start if n != m else 0 for n, m in zip(part, whole, strict=True))


def _fill(
    out: np.ndarray, slices: Any, piece: Piece, offsets: Sequence[int], box: tables.Box, sizes: tables.Sizes
) -> None:
    """Writes what lies of a piece in a box of the parameter into `out`, which is that box."""
    common = []  # in coordinates of the piece; what is beyond it (padding, other pieces) is left alone
    for (first, end), n, offset in zip(box, tables.shape(piece.ours, sizes), offsets, strict=True):
        common.append((max(first - offset, 0), min(end - offset, n)))
    if any(first >= end for first, end in common):
        return
    at = [slice(a + offset - first, b + offset - first)
          for (a, b), offset, (first, _) in zip(common, offsets, box, strict=True)]  # fmt: skip
    out[tuple(at)] = tables.read_box(slices, piece, tuple(common), sizes)


# --- writing ---------------------------------------------------------------------------------------------------------


def _pieces(x: jax.Array, row: Row, layer: int, sizes: tables.Sizes) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one layer's part of a parameter."""
    whole = _host(x, layer if _stacked(row) else None)
    for piece in row.pieces:
        ends = zip(_offsets(row, piece, sizes), tables.shape(piece.ours, sizes), strict=True)
        part = whole[tuple(slice(offset, offset + n) for offset, n in ends)]
        yield piece.name.replace("{}", str(layer)), tables.to_theirs(part, piece)


def _host(x: jax.Array | np.ndarray, layer: int | None) -> np.ndarray:
    """The whole of an array, or of one element of its first dimension, on the host."""
    if not isinstance(x, jax.Array):
        return x if layer is None else x[layer]
    if x.is_fully_addressable and next(iter(x.devices())).platform == "cpu":  # where NumPy sees the shards themselves
        out = np.empty(x.shape if layer is None else x.shape[1:], x.dtype)
        for shard in x.addressable_shards:
            if shard.replica_id:
                continue
            if layer is None:
                out[shard.index] = np.asarray(shard.data)
            elif layer in range(*shard.index[0].indices(x.shape[0])):
                out[shard.index[1:]] = np.asarray(shard.data)[layer - (shard.index[0].start or 0)]
        return out
    mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    return np.asarray(_taking(mesh)(x) if layer is None else _taking(mesh)(x, layer))


@functools.cache
def _taking(mesh: Any) -> Any:
    take = lambda x, layer=None: x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    return jax.jit(take, out_shardings=mesh and NamedSharding(mesh, PartitionSpec()))
