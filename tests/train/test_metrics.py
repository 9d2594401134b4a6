"""metrics.jsonl: whole lines, each step once; the same numbers in the files of TensorBoard."""

import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from jzero.train.metrics import Metrics, cut_metrics, read_metrics


def write(folder: Path, steps, after_step=0, **options):
    metrics = Metrics(folder, after_step=after_step, **options)
    for step in steps:
        metrics.write({"step": step, "loss": 1 / step})
        if step % 2 == 0:
            metrics.write({"step": step, "val_loss": 2 / step})
    metrics.close()


def events(folder: Path) -> list:
    """Every event of every file, oldest file first; the framing is TFRecord's: length, crc, bytes, crc."""
    found = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def test_a_line_is_on_disk_when_it_is_written(tmp_path):
    metrics = Metrics(tmp_path, after_step=0, tensorboard=False)
    metrics.write({"step": 1, "loss": 0.1 + 0.2})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.30000000000000004}]
    metrics.close()


def test_continuing_cuts_the_steps_after_the_checkpoint(tmp_path):
    write(tmp_path, range(1, 8), tensorboard=False)
    write(tmp_path, range(5, 8), after_step=4, tensorboard=False)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in lines if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["step"] for r in lines if "val_loss" in r] == [2, 4, 6]


@given(st.integers(0, 300))
def test_wherever_a_process_is_killed_whole_lines_stay(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("cut")
    write(folder, range(1, 8), tensorboard=False)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    os.truncate(path, length)
    kept = cut_metrics(path, 5)
    whole = [line for i, line in enumerate(lines) if sum(map(len, lines[: i + 1])) <= length]
    assert kept == [record for record in map(json.loads, whole) if record["step"] <= 5]
    assert path.read_text() == "".join(json.dumps(record) + "\n" for record in kept)
    assert [p.name for p in folder.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_needs_no_cut_is_not_written_again(tmp_path):
    write(tmp_path, range(1, 4), tensorboard=False)
    before = (tmp_path / "metrics.jsonl").stat()
    cut_metrics(tmp_path / "metrics.jsonl", 3)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_numbers_that_json_has_not_are_null(tmp_path):
    metrics = Metrics(tmp_path, after_step=0, tensorboard=False)
    metrics.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    metrics.close()
    strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert strict == {"step": 1, "loss": None, "grad_norm": None}


def test_a_full_disk_leaves_no_half_line(tmp_path):
    """A limit on the size of files cuts a write short, as the end of a disk does."""
    import resource
    import signal

    metrics = Metrics(tmp_path, after_step=0, tensorboard=False)
    metrics.write({"step": 1, "loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            metrics.write({"step": 2, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        metrics.close()
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_tensorboard_holds_the_same_numbers_and_hides_what_was_cut(tmp_path):
    write(tmp_path, range(1, 8), tensorboard_every=3)
    write(tmp_path, range(5, 8), after_step=4, tensorboard_every=3)
    found = events(tmp_path)
    points = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
    first = [(2, "val_loss", 1.0), (3, "loss", 1 / 3), (4, "val_loss", 0.5), (6, "loss", 1 / 6), (6, "val_loss", 1 / 3)]
    assert points == [(s, tag, pytest.approx(x)) for s, tag, x in [*first, *first[3:]]]
    restarts = [e.step for e in found if e.session_log.status == event_pb2.SessionLog.START]
    assert restarts == [1, 5]
    assert [e.file_version for e in found if e.file_version] == ["brain.Event:2"] * 2
