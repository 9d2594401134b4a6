"""Plans: of any step that a user wrote, and of a configuration of the trainer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jzero.errors import JzeroError
from jzero.mesh import make_mesh
from jzero.plan import targets
from jzero.plan.advice import advise, advise_config
from jzero.plan.compile import compile_step
from jzero.plan.result import Report, make_report
from jzero.train.config import Config, model_config
from jzero.train.config_check import validate

if TYPE_CHECKING:
    from jzero.train.step import Program


def report(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    devices: int | None = None,
    hosts: int = 1,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    flops: float | None = None,
    tokens: int | None = None,
    dtype: str = "bf16",
) -> Report:
    """What GPUs would do with a step: its memory, its collectives and what hides them, its estimated time.

    The step is compiled for the described GPU, and its schedule is read; nothing runs. A mesh that the step itself
    holds (in `shard_map`, in `jzero.zero(mesh=...)`) must be made of `jzero.plan.devices(target, n)`; the shardings
    of `args` may be over any devices.

    Args:
        fn: a function, jitted or not.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s. At least one has a `NamedSharding` where there are
            several devices; those without one are replicated.
        target: the GPU, a name in `jzero.plan.TARGETS`.
        devices: number of GPUs; None: as many as the shardings speak of.
        hosts: machines they stand in.
        donate_argnums, compiler_options: for `jax.jit`, where `fn` is not jitted.
        flops: operations that the model needs in one step, over all devices, for MFU; None: those of the module.
        tokens: of one step over all devices, for tokens/s.
        dtype: type of the matrix products whose rate MFU is relative to, "bf16", "f32" (as TF32) or "f8".

    Returns:
        A `Report`: print it, or take `report.json()`.

    Raises:
        JzeroError: unknown target, no GPU compiler, or arguments that do not say how devices share them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from jzero.plan import available, devices, report
        >>> def step(params, batch):
        ...     return params - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
        >>> def of(mesh, shape, spec):
        ...     return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        >>> if available():
        ...     mesh = jax.make_mesh((8,), ("data",), devices=devices("h100-sxm-80gb", 8))
        ...     params, batch = of(mesh, (1024, 1024), P()), of(mesh, (8192, 1024), P("data"))
        ...     found = report(step, params, batch, target="h100-sxm-80gb")
        ...     assert [use.axis for use in found.collectives] == ["data"]
    """
    compiled = compile_step(
        fn,
        args,
        target=target,
        devices=devices,
        hosts=hosts,
        donate_argnums=donate_argnums,
        compiler_options=compiler_options,
    )
    title = getattr(fn, "__name__", "step")
    found = make_report(compiled, title=title, dtype=dtype, flops=flops, tokens=tokens)
    return dataclasses.replace(found, advice=advise(found))


def plan(config: Config, target: str, devices: int | None = None, hosts: int | None = None) -> Report:
    """What GPUs would do with the training step of a configuration.

    Args:
        config: as `load_config` gives it.
        target: the GPU, a name in `jzero.plan.TARGETS`.
        devices: number of GPUs; None: what the configuration says.
        hosts: machines they stand in; None: what the configuration says.

    Raises:
        JzeroError: unknown target, no GPU compiler, or a configuration that contradicts itself.

    Example:
        >>> from jzero.plan import available, plan
        >>> from jzero.train.config import load_config
        >>> config = load_config(None, ["model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=2"])
        >>> if available():
        ...     assert plan(config, "h100-sxm-80gb", 2).memory.fits
    """
    config, program, notes = described(config, target, devices, hosts)
    compiled = compile_step(
        program.step,
        (program.abstract, program.abstract_batch()),
        target=target,
        hosts=config.trainer.num_nodes,
    )
    sixteen_bits, m = config.param_dtype.itemsize == 2, config.model
    pieces = f"{config.num_micro_batches} × {m.micro_batch_size} × {m.encoder_seq_length} tokens per device"
    found = make_report(
        compiled,
        title=f"{config.exp_manager.name}, {config.policy}, {pieces}",
        dtype="bf16" if sixteen_bits else "f32",
        flops=model_flops(config, program.model.abstract),
        tokens=m.global_batch_size * m.encoder_seq_length,
        pipeline_idle=float(program.layout.pipeline.timetable(config.num_micro_batches).idle_share()),
        notes=notes,
    )
    return dataclasses.replace(found, advice=advise_config(found, config, program.model.abstract))


def described(
    config: Config, target: str, devices: int | None = None, hosts: int | None = None
) -> tuple[Config, Program, list[str]]:
    """The training program of a configuration on described GPUs, not compiled.

    Args:
        config, target, devices, hosts: as for `plan`.

    Returns:
        The configuration as it would be compiled here, the program, and what the reader must know.

    Raises:
        JzeroError: as `plan`.
    """
    targets.find(target)
    config = on_devices(config, devices, hosts)
    vocab_size = vocabulary(config)
    config, notes = _attention(config, vocab_size)
    from jzero.train.step import build_program  # imports Flax

    gpus = targets.devices(target, config.num_devices, config.trainer.num_nodes)
    sizes = config.mesh_shape
    mesh = make_mesh(sizes["data"], sizes["tensor"], sizes["pipeline"], sizes["replica"], devices=gpus)
    return config, build_program(config, mesh, vocab_size), notes


def on_devices(config: Config, devices: int | None, hosts: int | None) -> Config:
    """The configuration on this many GPUs of this many machines, validated."""
    trainer = config.trainer
    for name, given in (("devices", devices), ("hosts", hosts)):
        if given is not None and given < 1:
            raise JzeroError(f"plan: --{name}: expected at least 1, found {given}")
    hosts = hosts or trainer.num_nodes
    if devices is None and trainer.devices == -1:
        raise JzeroError("plan: trainer.devices is -1, all that there are; say how many with --devices")
    devices = devices or trainer.devices * hosts
    if devices % hosts:
        raise JzeroError(f"plan: devices {devices}: expected a multiple of the {hosts} hosts; change one of them")
    trainer = dataclasses.replace(trainer, devices=devices // hosts, num_nodes=hosts)
    return validate(dataclasses.replace(config, trainer=trainer), devices)


def vocabulary(config: Config) -> int | None:
    """Tokens of the tokenizer, where the configuration does not say it."""
    if config.model.vocab_size is not None:
        return None
    from jzero.data import config_tokenizer

    return config_tokenizer(config).vocab_size


def model_flops(config: Config, abstract: Any) -> float:
    """Operations of forward and backward that the model itself asks for, of one step over all devices.

    6 N + 12 L T H K per token (Chowdhery et al., arXiv 2204.02311, appendix B): N parameters that are multiplied (the
    layers and the output head, no positions), and attention's two products over T positions. Nothing recomputed.

    Args:
        config: the run.
        abstract: the parameters' tree of shapes.
    """
    m = config.model
    blocks = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract["blocks"]))
    head = [x.shape for x in jax.tree.leaves(abstract.get("head", {})) if len(x.shape) > 1]
    if "weight" not in abstract.get("head", {}):  # the token embedding serves as the last matrix
        head.append(abstract["embedding"]["token"].shape)
    width = m.num_attention_heads * (m.kv_channels or m.hidden_size // m.num_attention_heads)
    per_token = 6 * (blocks + sum(map(math.prod, head))) + 12 * m.num_layers * m.encoder_seq_length * width
    return float(per_token) * m.global_batch_size * m.encoder_seq_length


def _attention(config: Config, vocab_size: int | None) -> tuple[Config, list[str]]:
    """The configuration that can be compiled here, and what that changes."""
    from jzero.models.attention import flash_attention_fits  # imports Flax, with the package around it

    model, architecture = config.model, model_config(config, vocab_size)
    fits = flash_attention_fits(architecture.param_dtype, architecture.head_width, "gpu")
    auto = model.attention_implementation == "auto" and fits and not architecture.attention_dropout
    if not (auto or model.attention_implementation == "cudnn") or targets.cudnn_available():
        return config, []
    note = (
        "compiled with XLA's attention, as cuDNN is not installed here; this is not what the run would use: flash "
        "attention takes less time and memory (pip install 'jzero[plan-cudnn]' to compile it)"
    )
    model = dataclasses.replace(model, attention_implementation="xla")
    return dataclasses.replace(config, model=model), [note]
