"""The layouts of a configuration on N GPUs that make sense, as overrides of its keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jzero.train.config import Config

POLICIES = ("replicated", "gather_on_forward", "gather_twice")
GRANULARITIES = ("full", "selective", None)  # from the least memory to the most
ACCUMULATIONS = ("local", "sharded")

KEYS = {
    "policy": "model.optim.policy",
    "micro_batch_size": "model.micro_batch_size",
    "granularity": "model.activations_checkpoint_granularity",
    "accumulation": "model.grad_accumulation",
    "replica": "model.replica_parallel_size",
}
"""The key that each field of a `Layout` sets. Tensor and pipeline sizes join here when the trainer can run them."""


@dataclasses.dataclass(frozen=True, order=True)
class Layout:
    """One way to train: how the GPUs, the batch and the memory are divided.

    Attributes:
        micro_batch_size: samples of a device at a time.
        granularity: activation checkpointing, "" for none.
        policy: what is kept between steps.
        accumulation: where micro-batches are summed.
        replica: copies of the sharded state.
    """

    micro_batch_size: int
    granularity: str
    policy: str
    accumulation: str
    replica: int

    @property
    def overrides(self) -> list[str]:
        """The keys to set: "model.optim.policy=gather_twice"."""
        values = dataclasses.asdict(self) | {"granularity": self.granularity or "null"}
        gathers = str(self.policy != "replicated").lower()
        return [f"{KEYS[name]}={value}" for name, value in values.items()] + [
            f"model.optim.overlap_param_sync={gathers}"
        ]

    def needs_no_less_than(self, other: Layout) -> bool:
        """Whether this layout cannot fit where `other` does not: the same, with larger pieces or more of them kept."""
        order = [g or "" for g in GRANULARITIES]
        same = (self.policy, self.accumulation, self.replica) == (other.policy, other.accumulation, other.replica)
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
    found = set(_all(config, set(fixed)))
    order = [g or "" for g in GRANULARITIES]
    policies: list[str] = list(reversed(POLICIES))
    return sorted(found, key=lambda x: (x.micro_batch_size, order.index(x.granularity), policies.index(x.policy), x))


def _all(config: Config, fixed: set[str]) -> Iterator[Layout]:
    m, hosts = config.model, config.trainer.num_nodes

    def choice(name: str, own: Any, *others: Any) -> tuple[Any, ...]:
        return (own,) if KEYS[name] in fixed else others

    policies = choice("policy", config.policy, *(POLICIES if config.zero else (config.policy,)))
    replicas = choice("replica", m.replica_parallel_size, *sorted({1, hosts} if config.zero else {1}))
    granularities = choice("granularity", m.activations_checkpoint_granularity, *GRANULARITIES)
    accumulations = choice("accumulation", m.grad_accumulation, *ACCUMULATIONS)
    rows = m.global_batch_size // config.num_devices  # of a rank and step; replica and data split the batch alike
    sizes = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
    for size in choice("micro_batch_size", m.micro_batch_size, *sizes):
        for policy, granularity, accumulation, replica in itertools.product(
            policies, granularities, accumulations, replicas
        ):
            only = size == rows and KEYS["accumulation"] not in fixed  # one micro-batch: nothing is summed
            yield Layout(size, granularity or "", policy, "local" if only else accumulation, replica)
