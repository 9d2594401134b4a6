"""Checkpoints: bit-exact through an asynchronous save, restored to any mesh, and never read wrongly in silence."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero import JzeroError, make_mesh
from jzero.train import checkpoint
from jzero.train.checkpoint import Checkpoints, load_params
from jzero.train.identity import changed_keys

MODEL = {"hidden_size": 32, "num_attention_heads": 4, "optim": {"lr": 1e-3}}
CONFIG = SimpleNamespace(model=SimpleNamespace(seed=1, encoder_seq_length=8))


@pytest.fixture(scope="module")
def program(small_program):
    return small_program(CONFIG, make_mesh(data=4, devices=jax.devices()[:4]))


@pytest.fixture
def notes():
    return []


@pytest.fixture
def checkpoints(tmp_path, notes):
    opened = Checkpoints(tmp_path, note=notes.append)
    yield opened
    opened.close()


def batch(program, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 257, (8, 9), np.int32)
    return program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((8, 8), np.float32)})


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def damage(folder: Path, how: str):
    """Changes the largest data file of a tree that Orbax wrote."""
    file = max((f for f in folder.rglob("d/*") if f.is_file()), key=lambda f: f.stat().st_size)
    if how == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()


def test_what_is_restored_is_what_was_there_when_save_returned(program, checkpoints):
    state, _ = program.step(program.init(), batch(program))
    saved = jax.tree.map(np.array, state)
    checkpoints.save(1, state, {"model": MODEL, "samples": 8})
    for seed in range(3):  # the donated buffers are overwritten while the save goes on
        state, _ = program.step(state, batch(program, seed))
        jax.block_until_ready(state)
    checkpoints.wait()
    restored, record = checkpoints.restore(program.abstract, MODEL)
    assert_same_bits(saved, restored)
    assert (record["step"], record["samples"], record["model"]) == (1, 8, MODEL)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(program.abstract)]


def test_the_parameters_come_back_on_another_mesh(small_program, program, checkpoints, tmp_path):
    state = program.init()
    checkpoints.save(0, state, {})
    checkpoints.wait()
    other = small_program(CONFIG, make_mesh(devices=jax.devices()[5:6]))
    params = load_params(tmp_path, other.abstract.params)
    assert_same_bits(state.params, params)
    assert params["embedding"].devices() == {jax.devices()[5]}


def test_the_best_and_the_last_stay(program, tmp_path):
    checkpoints = Checkpoints(tmp_path, top_k=2, last_k=1, async_save=False)
    state = program.init()
    for step, loss in enumerate([5.0, 2.0, 4.0, 3.0, float("nan"), 6.0, None], 1):
        checkpoints.save(step, state._replace(step=jnp.int32(step)), {}, val_loss=loss)
    checkpoints.close()
    reopened = Checkpoints(tmp_path, top_k=2)
    reopened.save(8, state._replace(step=jnp.int32(8)), {}, val_loss=9.0)  # knows the losses of an earlier process
    reopened.wait()
    assert (reopened.steps, reopened.best()) == ([2, 4, 8], [2, 4, 8])
    reopened.close()


@pytest.mark.parametrize("tree", ["params", "optimizer"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(program, tmp_path, notes, tree, how):
    first = program.init()
    expected = jax.tree.map(np.array, first)
    checkpoints = Checkpoints(tmp_path, last_k=3, note=notes.append)
    checkpoints.save(0, first, {})
    second, _ = program.step(first, batch(program))
    checkpoints.save(1, second, {})
    checkpoints.wait()
    damage(tmp_path / "checkpoints" / "1" / tree, how)
    restored, record = checkpoints.restore(program.abstract)
    assert record["step"] == 0
    assert_same_bits(expected, restored)
    assert len(notes) == 1
    assert notes[0].startswith("checkpoint 1 is damaged (")
    assert notes[0].endswith(f"): moved to {tmp_path}/unreadable_checkpoints")
    assert (tmp_path / "unreadable_checkpoints" / "1").is_dir()
    checkpoints.save(1, second, {})  # its name is free again
    checkpoints.wait()
    assert checkpoints.restore(program.abstract)[1]["step"] == 1
    checkpoints.close()


@pytest.fixture(scope="module")
def two_checkpoints(program, tmp_path_factory):
    """A run folder with the checkpoints 0 and 1."""
    folder = tmp_path_factory.mktemp("two")
    checkpoints = Checkpoints(folder, last_k=2)
    for step in (0, 1):
        checkpoints.save(step, program.init()._replace(step=jnp.int32(step)), {"model": MODEL})
    checkpoints.close()
    return folder


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "garbage"])
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "_sharding", "d"])
def test_damage_is_never_taken_for_another_model(program, two_checkpoints, tmp_path, notes, name, how):
    """Of any file that says what a checkpoint is, of the parameters here. Orbax does without `_sharding`."""
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints, run)
    top = run / "checkpoints" / "1"
    file = top / name if name.startswith("_CHECK") else top / "params" / name
    file = max(file.iterdir(), key=lambda f: f.stat().st_size) if file.is_dir() else file
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "garbage": bytes(range(256))}.get(how, b""))
    if how == "missing":
        file.unlink()
    load_params(run, program.abstract.params, "last", notes.append)
    checkpoints = Checkpoints(run, note=notes.append)
    restored, record = checkpoints.restore(program.abstract, MODEL)
    checkpoints.close()
    damaged = name != "_sharding"
    assert (record["step"], int(restored.step), len(notes)) == ((0, 0, 2) if damaged else (1, 1, 0))
    assert all(note.startswith("checkpoint 1 is damaged (its ") for note in notes)


def test_a_record_that_was_changed_is_damage_too(program, two_checkpoints, tmp_path, notes):
    """Otherwise one byte would make it a checkpoint of another model."""
    shutil.copytree(two_checkpoints, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "1" / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace('"hidden_size": 32', '"hidden_size": 33'))
    checkpoints = Checkpoints(tmp_path / "run", note=notes.append)
    assert checkpoints.restore(program.abstract, MODEL)[1]["step"] == 0
    assert notes[0].startswith("checkpoint 1 is damaged (its record is not what was written): moved to ")
    checkpoints.close()


def test_a_damaged_record_is_no_candidate_for_the_best(program, tmp_path):
    checkpoints = Checkpoints(tmp_path, top_k=1)
    for step, loss in ((0, 1.0), (1, 2.0)):
        checkpoints.save(step, program.init()._replace(step=jnp.int32(step)), {}, val_loss=loss)
    checkpoints.close()
    (tmp_path / "checkpoints" / "0" / "_CHECKPOINT_METADATA").unlink()
    reopened = Checkpoints(tmp_path, top_k=1)
    assert reopened.best() == [1]
    reopened.close()


@pytest.mark.parametrize("part", range(3))
def test_what_another_host_cannot_read_is_set_aside_here_too(program, tmp_path, notes, monkeypatch, part):
    """The hosts ask one another after the description, the arrays and the comparison; here another one says no."""
    checkpoints = Checkpoints(tmp_path, last_k=3, note=notes.append)
    checkpoints.save(0, program.init(), {})
    checkpoints.save(1, program.init()._replace(step=jnp.int32(1)), {})
    checkpoints.wait()
    asked = []
    monkeypatch.setattr(checkpoint, "on_every_host", lambda here: asked.append(here) or len(asked) != part + 1)
    assert checkpoints.restore(program.abstract)[1]["step"] == 0
    assert asked == [True] * (part + 1 + 3)
    assert notes == [
        f"checkpoint 1 is damaged (another host cannot read it): moved to {tmp_path}/unreadable_checkpoints"
    ]
    checkpoints.close()


def test_absl_is_silenced_for_orbax_alone(caplog):
    logging.getLogger("absl").error("of another library")
    assert "of another library" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_when_no_checkpoint_can_be_read_the_run_does_not_start_again_by_itself(program, checkpoints, tmp_path):
    checkpoints.save(3, program.init()._replace(step=jnp.int32(3)), {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "params")
    with pytest.raises(JzeroError, match=r"expected a readable checkpoint, found none \(steps 3 are damaged"):
        checkpoints.restore(program.abstract)


def test_unfinished_checkpoints_are_removed_with_a_note(tmp_path, notes):
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, note=notes.append)
    assert notes == ["ignored checkpoint 5.orbax-checkpoint-tmp: it was not finished"]
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert checkpoints.restore(None) is None
    checkpoints.close()


def test_a_checkpoint_of_other_shapes_names_the_leaf(small_program, program, checkpoints, tmp_path):
    checkpoints.save(0, program.init(), {"model": MODEL})
    checkpoints.wait()
    wider = small_program(CONFIG, program.mesh, width=64)
    message = (
        rf"^checkpoint {tmp_path}/checkpoints/0 is of another model: params/embedding: expected float32\[257,64\], "
        r"found float32\[257,32\] \(model.hidden_size was 32, is 64\); restore the old settings or train under another"
    )
    with pytest.raises(JzeroError, match=message):
        checkpoints.restore(wider.abstract, {**MODEL, "hidden_size": 64})
    with pytest.raises(JzeroError, match=r"params/embedding: expected float32\[257,64\]"):
        load_params(tmp_path, wider.abstract.params)


def test_a_checkpoint_of_another_tree_names_the_leaf(program, checkpoints):
    checkpoints.save(0, program.init(), {"model": MODEL})
    checkpoints.wait()
    abstract = program.abstract
    more = {**abstract.params, "extra": abstract.params["hidden"]}
    with pytest.raises(JzeroError, match=r"params/extra: expected float32\[64,32\], found no such leaf"):
        checkpoints.restore(abstract._replace(params=more), MODEL)
    less = {key: value for key, value in abstract.params.items() if key != "head"}
    with pytest.raises(JzeroError, match=r"params/head/bias: expected no such leaf, found bfloat16\[257\]"):
        checkpoints.restore(abstract._replace(params=less), MODEL)


def test_equal_shapes_with_another_meaning_are_another_model(program, checkpoints):
    checkpoints.save(0, program.init(), {"model": MODEL})
    checkpoints.wait()
    with pytest.raises(JzeroError, match=r"model.num_attention_heads: expected 8, found 4"):
        checkpoints.restore(program.abstract, {**MODEL, "num_attention_heads": 8})
    assert checkpoints.restore(program.abstract, {**MODEL, "optim": {"lr": 1.0}}) is not None
    assert changed_keys(MODEL, {**MODEL, "optim": {"lr": 1.0}}) == ["optim.lr"]


def test_empty_leaves_survive(program, tmp_path):
    state = program.init()
    state = state._replace(params={**state.params, "none": jnp.zeros((0, 4))})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, {})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored, _ = checkpoints.restore(abstract)
    assert_same_bits(state, restored)
    checkpoints.close()


FULL_DISK = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from typing import Any, NamedTuple
from jzero import JzeroError
from jzero.train.checkpoint import Checkpoints
class State(NamedTuple):
    step: Any
    params: Any
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, last_k=3)
state = lambda step: State(jnp.int32(step), {"w": jax.random.normal(jax.random.key(step), (1 << 18,))})
checkpoints.save(1, state(1), {})
checkpoints.save(2, state(2), {})
checkpoints.wait()
checkpoints.save(3, state(3), {})
try:
    checkpoints.wait()
except JzeroError as error:
    print(error)
print(sorted(p.name for p in (folder / "checkpoints").iterdir()))
print(int(checkpoints.restore(state(0))[0].step))
"""


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(tmp_path):
    """On a file system of 2.5 MB of its own, where two checkpoints of 1 MB find room, but not a third."""
    mount = f"mount -t tmpfs -o size=2500k tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs a mount namespace (unshare -rm)")
    command = f"{mount} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    error, names, step = done.stdout.splitlines()
    assert error.startswith(
        f"checkpoint in {tmp_path}/checkpoints: expected room and permission to write, found No space"
    )
    assert (names, step) == ("['1', '2']", "2")
    assert done.stderr == ""
