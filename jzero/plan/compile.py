"""From a step that a user wrote, or a configuration, to an executable for GPUs that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.plan import targets
from jzero.plan.targets import Target

ROLES = {
    "parameters": {"params", "parameters", "weights", "model"},
    "optimizer": {"opt", "opt_state", "optimizer", "optimizer_state", "tx_state"},
    "batch": {"batch", "data", "inputs", "tokens", "x", "y"},
}
"""Names of arguments, and of fields and keys inside them, that say what an array is for."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An executable and what was asked for.

    Attributes:
        target: the GPU.
        mesh: name and size of the mesh axes, outermost first.
        domain: GPUs joined by the fast links.
        text: the scheduled module.
        seconds: lowering and compiling took.
        arguments: bytes on one device of the arguments, per role ("parameters", "optimizer", "batch", "other").
        outputs: bytes of results that overwrite no argument.
        temporaries: bytes of everything else.
    """

    target: Target
    mesh: dict[str, int]
    domain: int
    text: str
    seconds: float
    arguments: dict[str, int]
    outputs: int
    temporaries: int


def compile_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    target: str,
    devices: int | None = None,
    hosts: int = 1,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile a function for described GPUs. Arguments as for `jzero.plan.report`."""
    facts = targets.find(target)
    placed, mesh = place(args, target, devices, hosts)
    jitted = fn
    if not hasattr(fn, "lower"):
        jitted = jax.jit(fn, donate_argnums=donate_argnums, compiler_options=compiler_options or None)
    elif donate_argnums != () or compiler_options:
        raise JzeroError(
            "report: donate_argnums and compiler_options go to jax.jit, found a function that is already jitted; "
            "give them there"
        )
    begin = time.perf_counter()
    try:
        with _without_cache():
            compiled = jitted.lower(*placed).compile()  # type: ignore[attr-defined]  both are jitted here
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise JzeroError(
            "report: the step holds a mesh of other devices; build it from "
            f"jzero.plan.devices('{target}', {mesh.size}), or take the mesh from the arguments"
        ) from error
    seconds = time.perf_counter() - begin
    used, text = compiled.memory_analysis(), compiled.as_text()
    if used is None or text is None:
        raise JzeroError("report: expected an executable that shows its schedule and memory; use another jaxlib")
    return Compiled(
        target=facts,
        mesh=dict(mesh.shape),
        domain=max(facts.span, mesh.size // hosts),
        text=text,
        seconds=seconds,
        arguments=argument_bytes(compiled, args, argument_names(fn, len(args))),
        outputs=used.output_size_in_bytes - used.alias_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """JAX's cache on disk cannot read back executables of a GPU that is not there: write none, and do not warn."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]  JAX adds it at run time
    jax.config.update(name, float("inf"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            yield
    finally:
        jax.config.update(name, before)


# --- arguments -------------------------------------------------------------------------------------------------------


def place(args: Sequence[Any], target: str, devices: int | None, hosts: int) -> tuple[Sequence[Any], Mesh]:
    """Abstract arguments on described GPUs, and the mesh that they lie on.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s; their `NamedSharding`s may be over any devices, or an abstract mesh.
        target: a name in `TARGETS`.
        devices: number of GPUs; None: as many as the shardings speak of.
        hosts: machines they stand in.

    Raises:
        JzeroError: nothing says how several devices share the arguments, or another number of devices.
    """
    meshes = {x.sharding.mesh.shape_tuple: x.sharding.mesh for x in jax.tree.leaves(args) if _named(x)}
    if len(meshes) > 1:
        found = " and ".join(str(dict(shape)) for shape in meshes)
        raise JzeroError(f"report: expected arguments on one mesh, found {found}; use one of them")
    given: Mesh | AbstractMesh | None = next(iter(meshes.values()), None)
    if given is None and (devices or 1) > 1:
        raise JzeroError(
            f"report: nothing says how {devices} devices share the arguments; give at least one a NamedSharding"
        )
    size = math.prod(n for _, n in given.shape_tuple) if given else 1
    if devices not in (None, size):
        raise JzeroError(f"report: devices {devices}, but the arguments lie on a mesh of {size}; change one of them")
    if isinstance(given, Mesh) and given.devices.flat[0].device_kind == targets.find(target).name:
        mesh = given
    else:
        gpus = targets.devices(target, size, hosts)
        shape = dict(given.shape_tuple) if given else {"device": 1}
        types = given.axis_types if given else (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=gpus)

    def one(x: Any) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if _named(x) else PartitionSpec()
        value = x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.numpy.asarray(x)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, args), mesh


def _named(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def argument_bytes(compiled: Any, args: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    """Bytes on one device of a compiled function's arguments, per role.

    Args:
        compiled: the executable.
        args: its arguments, positional.
        names: of the arguments.
    """
    found = dict.fromkeys((*ROLES, "other"), 0)
    infos = jax.tree.leaves(compiled.args_info[0])
    shardings = jax.tree.leaves(compiled.input_shardings[0])
    paths = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    for info, sharding, ((first, *rest), _) in zip(infos, shardings, paths, strict=True):
        size = math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
        keys = [str(getattr(key, "name", getattr(key, "key", ""))) for key in rest]
        found[role([names[int(first.idx)], *keys])] += size
    return found


def role(names: Sequence[str]) -> str:
    """What an argument is for, by the first of the names on the way to it that says so.

    Example:
        >>> role(["state", "opt", "master", "w"])
        'optimizer'
    """
    for name in names:
        for kind, words in ROLES.items():
            if name.lower() in words:
                return kind
    return "other"


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of a function's positional arguments; "" where it has none."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [*names[:count], *[""] * (count - len(names))]
