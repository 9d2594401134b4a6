"""The layouts of a configuration on N GPUs that make sense, as overrides of its keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jzero.errors import JzeroError
from jzero.train.config import Config
from jzero.train.config_check import validate

POLICIES = ("replicated", "gather_on_forward", "gather_twice")
GRANULARITIES = ("full", "selective", None)  # from the least memory to the most
ACCUMULATIONS = ("local", "sharded")

KEYS = {
    "policy": "model.optim.policy",
    "micro_batch_size": "model.micro_batch_size",
    "granularity": "model.activations_checkpoint_granularity",
    "accumulation": "model.grad_accumulation",
    "replica": "model.replica_parallel_size",
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "sequence": "model.sequence_parallel",
}
"""The key that each field of a `Layout` sets."""

NARROWEST = 1024
"""Columns of the residual stream that a tensor rank should keep: narrower products waste the GPU."""


@dataclasses.dataclass(frozen=True, order=True)
class Layout:
    """One way to train: how the GPUs, the batch and the memory are divided.

    Attributes:
        micro_batch_size: samples of a device at a time.
        granularity: activation checkpointing, "" for none.
        policy: what is kept between steps.
        accumulation: where micro-batches are summed.
        replica: copies of the sharded state.
        tensor, pipeline: ranks that share a layer, and that share the layers.
        sequence: whether tensor ranks also split the sequence between the layers.
    """

    micro_batch_size: int
    granularity: str
    policy: str
    accumulation: str
    replica: int
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False

    @property
    def overrides(self) -> list[str]:
        """The keys to set: "model.optim.policy=gather_twice"."""
        words = {"granularity": self.granularity or "null", "sequence": str(self.sequence).lower()}
        values = dataclasses.asdict(self) | words
        gathers = str(self.policy != "replicated").lower()
        return [f"{KEYS[name]}={value}" for name, value in values.items()] + [
            f"model.optim.overlap_param_sync={gathers}"
        ]

    def needs_no_less_than(self, other: Layout) -> bool:
        """Whether this layout cannot fit where `other` does not: the same, with larger pieces or more of them kept."""
        order = [g or "" for g in GRANULARITIES]
        sizes = {"micro_batch_size": other.micro_batch_size, "granularity": other.granularity}
        same = dataclasses.replace(self, **sizes) == other
        more = order.index(self.granularity) >= order.index(other.granularity)
        return same and more and self.micro_batch_size >= other.micro_batch_size


def layouts(config: Config, fixed: Iterable[str] = ()) -> list[Layout]:
    """All layouts that make sense, those that need the least memory first.

    Args:
        config: the run, on its devices.
        fixed: keys that keep the configuration's value.

    Example:
        >>> from jzero.train.config import load_config
        >>> config = load_config(None, ["trainer.devices=8", "model.global_batch_size=8", "model.micro_batch_size=1"])
        >>> len(layouts(config)), len(layouts(config, ["model.optim.policy"]))
        (9, 3)
    """
    found = {layout for layout in _all(config, set(fixed)) if _valid(config, layout)}
    order = [g or "" for g in GRANULARITIES]
    policies: list[str] = list(reversed(POLICIES))
    return sorted(found, key=lambda x: (x.micro_batch_size, order.index(x.granularity), policies.index(x.policy), x))


def _valid(config: Config, layout: Layout) -> bool:
    """Whether the trainer takes it: it has rules of its own, and not every model can be split."""
    values = {KEYS[name].removeprefix("model."): value for name, value in dataclasses.asdict(layout).items()}
    optim = dataclasses.replace(
        config.model.optim, policy=values.pop("optim.policy"), overlap_param_sync=layout.policy != "replicated"
    )
    values["activations_checkpoint_granularity"] = layout.granularity or None
    model = dataclasses.replace(config.model, optim=optim, **values)
    try:
        validate(dataclasses.replace(config, model=model), config.num_devices)
    except JzeroError:
        return False
    return True


def _all(config: Config, fixed: set[str]) -> Iterator[Layout]:
    m, hosts = config.model, config.trainer.num_nodes

    def choice(name: str, own: Any, *others: Any) -> tuple[Any, ...]:
        return (own,) if KEYS[name] in fixed else others

    policies = choice("policy", config.policy, *(POLICIES if config.zero else (config.policy,)))
    replicas = choice("replica", m.replica_parallel_size, *sorted({1, hosts} if config.zero else {1}))
    granularities = choice("granularity", m.activations_checkpoint_granularity, *GRANULARITIES)
    accumulations = choice("accumulation", m.grad_accumulation, *ACCUMULATIONS)
    tensors = choice("tensor", m.tensor_model_parallel_size, *_tensor_sizes(config))
    pipelines = choice("pipeline", m.pipeline_model_parallel_size, *_powers(config.num_devices))
    for tensor, pipeline in itertools.product(tensors, pipelines):
        (sequence,) = choice("sequence", m.sequence_parallel, tensor > 1)
        # of a rank and step; replica and data split the batch alike
        rows = m.global_batch_size * tensor * pipeline // config.num_devices
        for size in choice("micro_batch_size", m.micro_batch_size, *_powers(rows)):
            for policy, granularity, accumulation, replica in itertools.product(
                policies, granularities, accumulations, replicas
            ):
                only = size == rows and KEYS["accumulation"] not in fixed  # one micro-batch: nothing is summed
                kept = "local" if only else accumulation
                yield Layout(size, granularity or "", policy, kept, replica, tensor, pipeline, sequence)


def _tensor_sizes(config: Config) -> list[int]:
    """Inside a machine, as long as the products stay wide."""
    widest = config.model.hidden_size // NARROWEST
    return [1, *(size for size in _powers(config.trainer.devices) if 1 < size <= widest)]


def _powers(value: int) -> list[int]:
    """Powers of two that divide a number."""
    return [2**i for i in range(value.bit_length()) if value % 2**i == 0]
