"""A run's configuration: `load_config`, then `validate`, then build.

The keys, with their defaults, limits and meaning, are in `jzero.train.config_keys`; this file nests them into `Config`
and derives what follows from them (mesh, micro-batches, policy, dtypes, padded vocabulary). `python -m
jzero.train.config` prints the reference page docs/config.md.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jzero.errors import JzeroError
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from jzero.train import options_file
from jzero.train.config_keys import (
    Checkpoint,
    Data,
    ExpManager,
    Generate,
    Model,
    Optim,
    Sched,
    Tokenizer,
    Trainer,
)
from jzero.train.nemo_keys import HINTS
from jzero.train.options import reference

if TYPE_CHECKING:
    from jzero.models.bert import BertConfig
    from jzero.models.gpt import GPTConfig

__all__ = [
    "Checkpoint",
    "Config",
    "Data",
    "ExpManager",
    "Generate",
    "Model",
    "Optim",
    "Sched",
    "Tokenizer",
    "Trainer",
    "load_config",
    "model_config",
    "to_yaml",
]

_DTYPES = {"fp32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Config:
    """A whole run. Immutable and hashable; `load_config` makes one from a file and overrides.

    Example:
        >>> config = Config(trainer=Trainer(devices=4), model=Model(global_batch_size=32))
        >>> config.data_parallel_size, config.num_micro_batches, config.policy
        (4, 2, 'replicated')
        >>> config.padded_vocab_size(50257)
        50304
    """

    trainer: Trainer = field(default_factory=Trainer)
    exp_manager: ExpManager = field(default_factory=ExpManager)
    model: Model = field(default_factory=Model)
    generate: Generate = field(default_factory=Generate)

    @property
    def num_devices(self) -> int:
        """Devices over all nodes.

        Raises:
            JzeroError: `trainer.devices` is still -1; `validate` replaces it with a number.
        """
        if self.trainer.devices == -1:
            raise JzeroError(
                "trainer.devices: expected a number of devices, found -1; call validate(config, n_devices)"
            )
        return self.trainer.devices * self.trainer.num_nodes

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of each mesh axis: {"pipeline": ..., "replica": ..., "data": ..., "tensor": ...}."""
        m = self.model
        pipeline, replica, tensor = (
            m.pipeline_model_parallel_size,
            m.replica_parallel_size,
            m.tensor_model_parallel_size,
        )
        data = self.num_devices // (pipeline * replica * tensor)
        return {"pipeline": pipeline, "replica": replica, "data": data, "tensor": tensor}

    @property
    def data_parallel_size(self) -> int:
        """Size of the mesh axis "data", over which the optimizer's state is sharded."""
        return self.mesh_shape["data"]

    @property
    def batch_parallel_size(self) -> int:
        """Devices that see different sequences: data × replica."""
        return self.data_parallel_size * self.model.replica_parallel_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each device folds into one optimizer step."""
        return self.model.global_batch_size // (self.model.micro_batch_size * self.batch_parallel_size)

    @property
    def run_folder(self) -> Path:
        """Where the run's files go: exp_dir/name, with ~ as the user's home."""
        return Path(os.path.expanduser(self.exp_manager.exp_dir)) / self.exp_manager.name

    @property
    def zero(self) -> bool:
        """Whether the optimizer's state is sharded."""
        return self.model.optim.name == "distributed_fused_adam"

    @property
    def policy(self) -> str:
        """What is kept between steps: "replicated", "gather_on_forward" or "gather_twice"."""
        optim = self.model.optim
        return optim.policy or ("gather_on_forward" if optim.overlap_param_sync else "replicated")

    @property
    def param_dtype(self) -> jnp.dtype:
        """Type of the parameters and of the computation: bfloat16 or float32."""
        return _DTYPES["bf16" if self.trainer.precision == "bf16" else "fp32"]

    @property
    def grad_sync_dtype(self) -> jnp.dtype | None:
        """Type of the gradients on the wire; None is float32."""
        name = self.model.optim.grad_sync_dtype
        return None if name is None else _DTYPES[name]

    @property
    def param_sync_dtype(self) -> jnp.dtype | None:
        """Type of the parameters on the wire; None leaves them as they are."""
        name = self.model.optim.param_sync_dtype
        return None if name is None else _DTYPES[name]

    @property
    def state_dtype(self) -> str | dict[str, str]:
        """How the moments are stored, as `jzero.zero` takes it: one choice where both are alike."""
        m, v = self.model.optim.exp_avg_dtype, self.model.optim.exp_avg_sq_dtype
        return m if m == v else {"mu": m, "nu": v}

    @property
    def fp8_recipe(self) -> Recipe | None:
        """How the scales of FP8 products are chosen; None: no FP8."""
        m = self.model
        if not m.fp8:
            return None
        fp8_format = "hybrid" if m.fp8_hybrid else "e4m3"
        if m.fp8_recipe == "mxfp8":
            return BlockScaling(fp8_format)
        common = {"fp8_format": fp8_format, "margin": m.fp8_margin, "power_of_two": m.fp8_power_of_two_scales}
        if m.fp8_recipe == "current":
            return CurrentScaling(**common)
        return DelayedScaling(
            **common,
            interval=m.fp8_interval,
            amax_history_len=m.fp8_amax_history_len,
            amax_compute_algo=m.fp8_amax_compute_algo,  # type: ignore[arg-type]  checked by its choices
        )

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` rounded up to a multiple of make_vocab_size_divisible_by that the tensor ranks divide.

        Megatron takes the product of the two, so that its model depends on the mesh: this one does not where the tensor
        size divides make_vocab_size_divisible_by.
        """
        unit = math.lcm(self.model.make_vocab_size_divisible_by, self.model.tensor_model_parallel_size)
        return -(-vocab_size // unit) * unit


def load_config(path: str | PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and dotted overrides, each checked key by key; later overrides win.

    Args:
        path: A YAML file with some of the keys of docs/config.md; None is all defaults.
        overrides: "key=value" texts, the value in YAML: "trainer.devices=4", "model.optim.betas=[.9,.95]".

    Returns:
        The run's Config. Rules between keys are `jzero.train.config_check.validate`'s.

    Raises:
        JzeroError: The file cannot be read, or a key or value is wrong. One line, naming the key and where it stands.

    Example:
        >>> load_config(None, ["trainer.devices=4", "model.optim.lr=3e-3"]).model.optim.lr
        0.003
    """
    return options_file.load(Config, path, overrides, HINTS)


def to_yaml(config: Config) -> str:
    """Every key as YAML; `load_config` of it gives an equal Config.

    Example:
        >>> print(to_yaml(Config())[:21])
        trainer:
          devices: 1
    """
    return options_file.dump(config)


def model_config(config: Config, vocab_size: int | None = None) -> "GPTConfig | BertConfig":
    """The architecture part of a run, as the model takes it.

    Args:
        config: The run.
        vocab_size: Tokens of the tokenizer, before padding; None where `model.vocab_size` says it (no tokenizer is
            needed to compile).

    Raises:
        JzeroError: The vocabulary is unknown or smaller than the tokenizer's, or sizes of the model contradict
            one another.

    Example:
        >>> model_config(load_config(None), 257).vocab_size
        384
    """
    from jzero.models.bert import BertConfig  # a configuration is read and checked without Flax
    from jzero.models.gpt import GPTConfig

    kind = {"gpt": GPTConfig, "bert": BertConfig}[config.model.type]
    m = config.model
    tokens = m.vocab_size or vocab_size
    if tokens is None:
        raise JzeroError("model.vocab_size: expected a number of tokens where there is no tokenizer, found null")
    if vocab_size is not None and tokens < vocab_size:
        raise JzeroError(f"model.vocab_size: expected at least the tokenizer's {vocab_size}, found {tokens}; set null")
    padded = config.padded_vocab_size(tokens)
    derived = {
        "vocab_size": padded,
        "vocab_padding": padded - tokens,
        "max_position_embeddings": m.max_position_embeddings or m.encoder_seq_length,
        "param_dtype": config.param_dtype,
        "fp8": config.fp8_recipe,
    }
    shared = {field.name for field in dataclasses.fields(kind)} - set(derived)
    return kind(**derived, **{name: getattr(m, name) for name in shared})


def main() -> None:
    """Print the reference page."""
    introduction = (
        "Every key of a configuration file, with NeMo's names. On the command line: `jzero train FILE key=value ...`.\n"
        "Written by `python -m jzero.train.config > docs/config.md`."
    )
    print(reference(Config, "Configuration", introduction), end="")


if __name__ == "__main__":
    main()
