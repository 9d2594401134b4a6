"""Models that are there already: those of Hugging Face's folders and of other runs, to start from, use and convert.

initial_values   weights to train from (`model.restore_from_path`)
open_model       a model to evaluate or to ask for text, with its configuration
convert          a run -> a folder of Hugging Face's; such a folder -> a configuration that trains from it
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import yaml
from jax.sharding import NamedSharding

from jzero.data.loader import config_tokenizer, tokenizer_path
from jzero.data.text import Tokenizer
from jzero.errors import JzeroError
from jzero.fp8 import dequantise
from jzero.models import BertConfig, hf
from jzero.optim.fp8 import float32
from jzero.train.checkpoint import load_params, load_part
from jzero.train.config import Config, Model, load_config, model_config
from jzero.train.config_check import validate
from jzero.train.devices import build_mesh
from jzero.train.files import disk_errors, write_atomic
from jzero.train.layout import stored_plan
from jzero.train.memory import memory_errors
from jzero.train.step import Program, build_program

ONE_DEVICE = (
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "model.tensor_model_parallel_size=1",
    "model.sequence_parallel=false",
    "model.pipeline_model_parallel_size=1",
    "model.virtual_pipeline_model_parallel_size=null",
    "model.replica_parallel_size=1",
    "model.micro_batch_size=1",
    "model.global_batch_size=1",
    "model.attention_implementation=auto",  # cuDNN's, if the run asked for it, may not be here
    "model.optim.policy=replicated",
    "model.optim.overlap_param_sync=false",
)
"""A run as one device computes it."""
_LONGEST = 2048  # tokens of a training sequence that `convert` writes, where the model has more positions
_NOT_OF_A_FILE = {
    "fp8", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "attention_implementation", "do_layer_norm_weight_decay", "use_scaled_init_method",
}  # fmt: skip
_IMPORTED = ("model.optim.lr", "model.data.data_prefix")  # what to set besides


class Opened(NamedTuple):
    """A model that is there already."""

    config: Config
    program: Program
    params: Any  # as the program stores them
    fp8: Any  # scales of its FP8 products, as in a `TrainState`
    tokenizer: Tokenizer


def open_model(
    source: Path, overrides: Sequence[str] = (), *, checkpoint: str = "best", note: Callable[[str], None] = print
) -> Opened:
    """The model of a run, of a configuration, or of Hugging Face's; on one device, unless overrides say otherwise.

    Args:
        source: a run folder; a configuration, for the checkpoints of its run or else its `model.restore_from_path`; or
            a folder of Hugging Face's, which is computed in float32.
        overrides: "key=value" of the configuration.
        checkpoint: of a run: "best" (lowest validation loss; the last if none has one), "last", or a step.
        note: called with one line where there is something to say.

    Raises:
        JzeroError: there is no model at `source`, or it cannot be read.
    """
    source = Path(os.path.expanduser(source))
    config = _config_of(source, [*ONE_DEVICE, *overrides])
    config, mesh = build_mesh(config, lambda line: None)
    tokenizer = config_tokenizer(config)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    program = build_program(config, mesh, vocab_size)
    run = source if source.is_dir() else config.run_folder
    with memory_errors(config):
        if (run / "config.yaml").is_file():
            fields = {"params": program.abstract.params, "fp8": program.abstract.fp8}
            wanted = {name: tree for name, tree in fields.items() if jax.tree.leaves(tree)}
            found = {"fp8": (), **load_part(run, wanted, checkpoint, note, program.layout.plan)}
        elif config.model.restore_from_path is not None:
            values = initial_values(config, program, vocab_size, lambda line: None)
            state = jax.jit(lambda values: program.start(values)._replace(opt=()))(values)
            found = {"params": state.params, "fp8": state.fp8}
        else:
            raise JzeroError(
                f"{source}: expected a run in {run}, or model.restore_from_path, found neither; train it first"
            )
    return Opened(config, program, found["params"], found["fp8"], tokenizer)


def _config_of(source: Path, overrides: Sequence[str]) -> Config:
    if (source / "config.yaml").is_file():
        return load_config(source / "config.yaml", overrides)
    if hf.is_hf_folder(source):
        written = lambda value: value if isinstance(value, str) else json.dumps(value)
        own = [f"model.{key}={written(value)}" for key, value in _model_keys(source).items()]
        return load_config(None, ["trainer.precision=32", "generate.tokens=0", *own, *overrides])
    if not source.exists():
        raise JzeroError(
            f"{source}: expected the folder of a run or of Hugging Face's, or a configuration, found nothing there; "
            "check the path, relative to where you are"
        )
    if source.is_dir():
        raise JzeroError(
            f"{source}: expected the folder of a run, found no config.yaml in it; give exp_dir/name of a run, or a "
            "folder of Hugging Face's with config.json"
        )
    return load_config(source, overrides)


# --- weights ---------------------------------------------------------------------------------------------------------


def initial_values(config: Config, program: Program, vocab_size: int, note: Callable[[str], None]) -> Any:
    """The weights of `model.restore_from_path` as float32 shards, for `Program.start`.

    Args:
        config: the run's.
        program: of that run.
        vocab_size: tokens before padding.
        note: called with one line.

    Raises:
        JzeroError: there is no model, or another one than the configuration says.
    """
    path = Path(os.path.expanduser(config.model.restore_from_path or ""))
    layout = program.layout
    if hf.is_hf_folder(path):
        place = lambda leaf: NamedSharding(layout.mesh, leaf.param_spec if leaf.split is None else leaf.shard_spec)
        likes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=place(leaf)) for leaf in layout.plan.leaves]
        loaded = hf.load(path, model_config(config, vocab_size), layout.plan.unflatten(likes))
        note(f"starting from the weights of {path}")
        pairs = zip(jax.tree.leaves(loaded), layout.plan.leaves, strict=True)
        cut = jax.jit(layout.cut, static_argnums=1)
        return layout.plan.unflatten([cut(x, leaf) if leaf.split is None else x for x, leaf in pairs])
    if not (path / "config.yaml").is_file():
        raise JzeroError(
            f"model.restore_from_path: expected a folder with config.json (Hugging Face) or the folder of a run, found "
            f"{path}; correct it, or set null to begin without weights"
        )
    saved = load_config(path / "config.yaml")
    kinds = stored_plan(layout.plan, saved.param_dtype, program.model.products if saved.model.fp8_params else ())
    stored = dataclasses.replace(layout, plan=kinds).abstract_params()
    params = load_params(path, stored, "best", note, kinds)
    note(f"starting from the weights of {path}")
    own = lambda params: [float32(x) for x in layout.own_shards(params)]
    specs = jax.tree.map(lambda x: x.sharding.spec, stored)
    shards = [leaf.shard_spec for leaf in layout.plan.leaves]
    mapped = jax.shard_map(own, mesh=layout.mesh, in_specs=(specs,), out_specs=shards)
    return layout.plan.unflatten(jax.jit(mapped)(params))


# --- conversion ------------------------------------------------------------------------------------------------------


def convert(source: Path, output: Path, *, checkpoint: str = "best", note: Callable[[str], None] = print) -> None:
    """A run -> a folder of Hugging Face's, or such a folder -> a configuration that trains from it.

    What is written appears complete, or not at all.

    Args:
        source: a run folder, or a folder with config.json and safetensors.
        output: a new folder; or a file that ends in .yaml.
        checkpoint: of a run: "best", "last", or a step.
        note: called with one line where there is something to say.

    Raises:
        JzeroError: one of them is neither, Hugging Face has no such model, or there is something at `output`.
    """
    source, output = (Path(os.path.expanduser(path)) for path in (source, output))
    if hf.is_hf_folder(source):
        _import(source, output)
        return
    if output.suffix in (".yaml", ".yml"):
        raise JzeroError(
            f"{output}: expected a folder to write {source} into, found the name of a file; leave out {output.suffix}"
        )
    opened = open_model(source, checkpoint=checkpoint, note=note)
    config, tokenizer = opened.config, opened.tokenizer
    architecture = model_config(config, config.model.vocab_size or tokenizer.vocab_size)
    path = tokenizer_path(config)
    files = [path] if path else []
    ends = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    with disk_errors(str(output)):
        hf.save(output, architecture, dequantise(opened.params, jnp.float32), beside=files, extra=ends)


def _import(source: Path, output: Path) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise JzeroError(
            f"{output}: expected the name of a configuration, found no .yaml at its end; write {output}.yaml"
        )
    if output.exists():
        raise JzeroError(f"{output}: expected no such file, found one; give another name, or remove it")
    hf.check(source, hf.read_config(source))
    plain = dataclasses.asdict(Model())
    chosen = {key: value for key, value in _model_keys(source).items() if value != plain[key]}
    sections = {"exp_manager": {"name": output.stem}, "model": chosen, "generate": {"tokens": 0}}
    text = yaml.safe_dump(sections, sort_keys=False)
    with disk_errors(str(output)):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, f"# Trains from the weights of {source}; set {' and '.join(_IMPORTED)}.\n{text}")
    validate(load_config(output))


def _model_keys(folder: Path) -> dict[str, Any]:
    """The section `model` of a configuration for the model in a folder of Hugging Face's."""
    config = hf.read_config(folder)
    shared = {field.name for field in dataclasses.fields(Model)} & {field.name for field in dataclasses.fields(config)}
    keys = {name: getattr(config, name) for name in shared - _NOT_OF_A_FILE}
    keys["type"] = "bert" if isinstance(config, BertConfig) else "gpt"
    keys["data"] = {"data_prefix": "data/text"}  # the built-in corpus has tokens of its own
    keys["encoder_seq_length"] = min(config.max_position_embeddings, _LONGEST)
    keys["restore_from_path"] = os.path.abspath(folder)
    if (folder / "tokenizer.json").is_file():
        keys["tokenizer"] = {"library": "tokenizers", "model": os.path.abspath(folder / "tokenizer.json")}
    return dict(sorted(keys.items()))
