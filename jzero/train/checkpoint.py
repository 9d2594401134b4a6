"""Checkpoints of a run: saved while training goes on, restored straight into their shards, and checked bit for bit.

A checkpoint `checkpoints/<step>` holds trees written by Orbax, `params`, `fp8` (scales and histories, where there are
any) and `optimizer` (everything else of the state), and a sealed record beside them (`jzero.train.record`): the step,
the position in the data, the model's configuration, the shapes, and a *fingerprint* of each leaf (the sum of its bits
as integers, modulo 2^32: the same on any mesh, as integer addition has no rounding). Whether a checkpoint is of another
model is read from the record alone; what differs from the record is damage. After a restore the fingerprints are
computed again: a leaf that was not read, or read wrongly, is an error and not a bad run. (Orbax itself reads a file
with a flipped bit without a word.)

Which checkpoints stay: the last k, and of those whose step was evaluated the best k by validation loss. One that was
being written when the process died is removed on the next start; a damaged one is set aside, and the one before it is
used.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jzero.errors import JzeroError
from jzero.optim.partition import Plan
from jzero.train.devices import on_every_host, together
from jzero.train.files import disk_errors
from jzero.train.identity import check_same, same_meaning
from jzero.train.orbax_io import Keep, best_first, join_threads, no_echo, reading
from jzero.train.record import Record, UnreadableError, compare_bits, leaves, seal, unseal
from jzero.train.reshape import check_orders, orders, parameters, readable, to_wanted
from jzero.train.state_tree import join, nested, split, unsplit


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: the run folder; checkpoints lie in `folder/checkpoints`.
        top_k: how many to keep by lowest validation loss (-1: all, 0: none for that reason).
        last_k: how many of the newest to keep, at least 1.
        async_save: write in the background; the next save, `wait` or `close` waits for it.
        note: called with one line where something was ignored or set aside.
        read_only: only look; whatever another process is writing there is left alone.
        plan: how the model's parameters are cut. With it, leaves whose shape depends on the number of ranks are taken
            up from another number of them.

    Example:
        >>> import tempfile
        >>> from typing import NamedTuple
        >>> import jax.numpy as jnp
        >>> class State(NamedTuple):
        ...     step: jax.Array
        ...     params: dict
        >>> state = State(jnp.int32(3), {"w": jnp.ones(4)})
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
        >>> checkpoints.save(3, state, {"model": {"hidden_size": 4}})
        >>> checkpoints.wait()
        >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        >>> restored, record = checkpoints.restore(abstract)
        >>> int(restored.step), record["step"]
        (3, 3)
        >>> checkpoints.close()
    """

    def __init__(
        self,
        folder: Path,
        *,
        top_k: int = 10,
        last_k: int = 1,
        async_save: bool = True,
        note: Callable[[str], None] = print,
        read_only: bool = False,
        plan: Plan | None = None,
    ):
        if last_k < 1:
            raise JzeroError(f"exp_manager.checkpoint.save_last_k: expected at least 1, found {last_k}")
        self.folder = folder / "checkpoints"
        self._policy = Keep(top_k, last_k, self._val_loss)
        self._losses: dict[int, float | None] = {}  # by step, as far as they were asked for
        self._async = async_save
        self._note = note
        self._leaves = parameters(plan) if plan else {}
        self._writing: Any = None
        self._threads_before: set[threading.Thread] = set()
        self._is_main = jax.process_index() == 0
        if self._is_main and not read_only:
            self._remove_unfinished(lambda name: note(f"ignored checkpoint {name}: it was not finished"))
        self._orbax = self._open()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending; also of the one that is still being written."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def best(self) -> list[int]:
        """The steps that have a validation loss, best first (the later one of two equal ones first)."""
        return best_first(self.steps, self._val_loss)

    def save(self, step: int, state: Any, record: Mapping[str, Any], *, val_loss: float | None = None) -> None:
        """Saves a state; returns as soon as it may be donated to the next step.

        Args:
            step: the number of steps done, the checkpoint's name.
            state: a NamedTuple of arrays with a field `params`.
            record: JSON values to keep beside it. `step` and what `seal` says are added.
            val_loss: what the best checkpoints are chosen by; None: not a candidate.

        Raises:
            JzeroError: the disk is full or cannot be written (also when that happened to the previous save in the
                background); nothing half-written stays.
        """
        self.wait()
        trees = split(state)
        self._losses[step] = val_loss if val_loss is not None and math.isfinite(val_loss) else None
        own = {"step": step, "candidate": self._losses[step], "orders": orders(trees, self._leaves)}
        full = seal({**record, **own}, trees)
        self._threads_before = set(threading.enumerate())
        with self._cleaned_up():
            self._writing = self._orbax.save_checkpointables_async(step, trees, custom_metadata=full, force=True)
        if not self._async:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background, if there is one; raises what became of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._cleaned_up():
                writing.result()

    def close(self) -> None:
        """Waits for the save in the background and lets Orbax go."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def restore(self, abstract: Any, model: Record | None = None) -> tuple[Any, Record] | None:
        """The newest checkpoint that can be read, as arrays with the shardings of `abstract`.

        Args:
            abstract: the state as `jax.ShapeDtypeStruct`s with shardings.
            model: the configuration of the model now, compared with the saved one; None: not compared.

        Returns:
            (state, record), or None if there is no checkpoint.

        Raises:
            JzeroError: the checkpoint is of another model, or checkpoints exist and none can be read.
        """
        self.wait()
        tried = []
        while self.steps:
            step = self.steps[-1]
            try:
                return self._read(step, abstract, model)
            except UnreadableError as error:
                tried.append(step)
                self._set_aside(step, str(error))
        if tried:
            raise JzeroError(
                f"{self.folder}: expected a readable checkpoint, found none (steps {', '.join(map(str, tried))} are "
                f"damaged and were moved to {self.folder.parent / 'unreadable_checkpoints'}); train under another "
                "exp_manager.name to start again"
            )
        return None

    def restore_part(self, abstract: dict[str, Any], step: int) -> dict[str, Any]:
        """Some trees of one checkpoint, such as "params", as arrays with the shardings of `abstract` (any mesh).

        Raises:
            JzeroError: they are of another model.
            UnreadableError: they cannot be read.
        """
        loaded, _ = self._load(step, {name: nested(tree) for name, tree in abstract.items()}, None)
        return {name: join(tree, loaded[name]) for name, tree in abstract.items()}

    def _read(self, step: int, abstract: Any, model: Record | None) -> tuple[Any, Record]:
        loaded, record = self._load(step, split(abstract), model)
        state = unsplit(abstract, loaded)
        if int(state.step) != step:  # the same on every host, as is the array
            raise UnreadableError(f"it holds step {int(state.step)}")
        return state, record

    def _together(self, read: Callable[[], Any]) -> Any:
        """Calls `read` on every host; where one raises UnreadableError, all do, so that none waits for another."""
        why = ""
        try:
            result = read()
        except UnreadableError as error:
            why, result = str(error) or "unreadable", None
        if not on_every_host(not why):
            raise UnreadableError(why or "another host cannot read it")
        return result

    def _record(self, step: int) -> Record:
        metadata = reading(lambda: self._orbax.checkpointables_metadata(step), "its record")
        return unseal(metadata.custom_metadata, step)

    def _val_loss(self, step: int) -> float | None:
        """What a checkpoint is compared by with others; None: it is not a candidate, or is damaged."""
        if step not in self._losses:
            try:
                self._losses[step] = self._record(step)["candidate"]
            except UnreadableError:
                self._losses[step] = None
        return self._losses[step]

    def _load(self, step: int, wanted: dict[str, Any], model: Record | None) -> tuple[dict[str, Any], Record]:
        """The trees of `wanted`, checked, and the record."""
        record = self._together(lambda: self._record(step))
        saved = leaves(record)
        reads = readable(wanted, saved, self._leaves)
        if self._leaves and same_meaning(record, model):
            check_orders(record.get("orders", {}), wanted, self._leaves)
        check_same(self.folder / str(step), reads, saved, record, model)
        load = lambda: self._orbax.load_checkpointables(step, reads)
        loaded = self._together(lambda: reading(load, f"its {' or '.join(sorted(reads, reverse=True))}"))
        loaded = {name: loaded[name] for name in wanted}
        self._together(lambda: compare_bits(record, loaded))
        return to_wanted(loaded, wanted, self._leaves, self._note), record

    def _open(self) -> ocp.training.Checkpointer:
        with disk_errors(f"checkpoints {self.folder}"):
            return ocp.training.Checkpointer(str(self.folder.absolute()), preservation_policy=self._policy)

    def _set_aside(self, step: int, why: str) -> None:
        aside = self.folder.parent / "unreadable_checkpoints"
        self._note(f"checkpoint {step} is damaged ({why}): moved to {aside}")
        self._orbax.close()
        with together(str(self.folder)), disk_errors(str(self.folder)):
            if self._is_main:
                shutil.rmtree(aside / str(step), ignore_errors=True)
                aside.mkdir(exist_ok=True)
                (self.folder / str(step)).rename(aside / str(step))
        self._orbax = self._open()
        self._losses.pop(step, None)

    def _remove_unfinished(self, report: Callable[[str], None] = lambda name: None) -> None:
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            report(path.name)
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Around a save: an error of the disk becomes one line, and what was half-written is removed."""
        try:
            with no_echo(), disk_errors(f"checkpoint in {self.folder}"):
                yield
        except BaseException:
            with contextlib.suppress(Exception):  # the same error once more
                self._orbax.close()
            join_threads(self._threads_before)
            self._remove_unfinished()
            self._orbax = self._open()
            raise


def load_params(
    run: Path,
    abstract: Any,
    which: str = "best",
    note: Callable[[str], None] = print,
    plan: Plan | None = None,
) -> Any:
    """The parameters of a run, as arrays with the shardings of `abstract` (any mesh, any machine).

    Args:
        run: the run folder.
        abstract: the parameters as `jax.ShapeDtypeStruct`s with shardings.
        which, note, plan: as for `load_part`.
    """
    return load_part(run, {"params": abstract}, which, note, plan)["params"]


def load_part(
    run: Path,
    abstract: dict[str, Any],
    which: str = "best",
    note: Callable[[str], None] = print,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Some trees of a run's state: "params", and "fp8" where it has delayed scales.

    Args:
        run: the run folder.
        abstract: each tree as `jax.ShapeDtypeStruct`s with shardings.
        which: "best" by validation loss (the last, if none has one), "last", or a step.
        note: called with one line for each checkpoint that cannot be read; the next candidate is taken.
        plan: see `Checkpoints`.

    Raises:
        JzeroError: there is no such checkpoint, none can be read, or it is of another model.
    """
    if not (run / "checkpoints").is_dir():
        raise JzeroError(f"{run}: expected checkpoints, found none; was exp_manager.create_checkpoint_callback on?")
    checkpoints = Checkpoints(run, note=note, read_only=True, plan=plan)
    try:
        newest = checkpoints.steps[::-1]
        candidates = {"best": [*dict.fromkeys([*checkpoints.best(), *newest])], "last": newest}.get(which)
        if candidates is None:
            candidates = [step for step in newest if str(step) == which]
        for step in candidates:
            try:
                return checkpoints.restore_part(abstract, step)
            except UnreadableError as error:
                note(f"checkpoint {step} is damaged ({error}): trying the next one")
        raise JzeroError(f"{run}: expected a readable checkpoint '{which}', found only steps {checkpoints.steps}")
    finally:
        checkpoints.close()
