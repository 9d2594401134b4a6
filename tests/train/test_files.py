"""The run folder and errors of the disk."""

import errno

import pytest

from jzero import JzeroError
from jzero.train.files import RunFolder, disk_errors, disk_reason, write_atomic


def test_the_cause_is_found_under_other_exceptions():
    error = RuntimeError("cannot save")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "a/b")
    assert disk_reason(error) == "No space left on device: a/b"
    quoted = ValueError("RESOURCE_EXHAUSTED: writing: No space left on device [os_error_code='28']")
    assert disk_reason(quoted) == "No space left on device"
    assert disk_reason(ValueError("shapes differ")) is None
    assert disk_reason(FileNotFoundError(errno.ENOENT, "No such file or directory")) is None


@pytest.mark.parametrize("error", [ValueError("no disk"), JzeroError("already one line"), KeyboardInterrupt()])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, disk_errors("run"):
        raise error
    assert caught.value is error


def test_a_mistake_while_an_error_of_the_disk_is_handled_is_that_mistake():
    def cannot_tidy_up():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            return {}["missing"]

    with pytest.raises(KeyError), disk_errors("run"):
        cannot_tidy_up()


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \udc80")
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "old"


def fail(path, before=lambda folder: None):
    """Opens a run folder in which something fails."""

    def work(folder):
        before(folder)
        raise RuntimeError("mistake")

    with pytest.raises(RuntimeError, match="mistake"), RunFolder(path) as folder:
        work(folder)


def test_what_a_failed_start_made_is_removed(tmp_path):
    (tmp_path / "runs").mkdir()
    fail(tmp_path / "runs" / "a" / "b", lambda folder: (folder.path / "config.yaml").write_text(""))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_began_beside_a_failed_one_stays(tmp_path):
    def begin_another(folder):
        with RunFolder(tmp_path / "new" / "good") as good:
            good.keep()

    fail(tmp_path / "new" / "bad", begin_another)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["good"]


def test_what_was_there_before_or_is_worth_keeping_stays(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("")
    fail(tmp_path / "old")
    assert (tmp_path / "old" / "notes.txt").exists()
    fail(tmp_path / "new", lambda folder: folder.keep())
    assert (tmp_path / "new").is_dir()


def test_an_empty_folder_is_empty_again_after_a_failed_start(tmp_path):
    fail(tmp_path, lambda folder: (folder.path / "checkpoints").mkdir())
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.keep()
        with pytest.raises(JzeroError, match=r"run: expected no other process training into it, found one that holds"):
            RunFolder(tmp_path / "run").__enter__()
        assert (tmp_path / "run").is_dir()
    with RunFolder(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_used_is_told_before_the_others_go_on(tmp_path):
    answers = []

    def refuse(path):
        raise JzeroError(f"{path}: expected a new folder")

    (tmp_path / "metrics.jsonl").touch()
    for path in (tmp_path, tmp_path / "new"):
        with pytest.raises(JzeroError, match="expected a new folder"):
            RunFolder(path, agree=lambda ok: answers.append(ok) or ok, check=refuse).__enter__()
    assert answers == [False, False]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "metrics.jsonl"]
    with RunFolder(tmp_path):  # nobody holds it
        pass


def test_processes_that_do_not_write_follow_the_one_that_does(tmp_path):
    with RunFolder(tmp_path / "run", writer=False, agree=lambda ok: True):
        assert not (tmp_path / "run").exists()
    with pytest.raises(JzeroError, match="expected process 0 to open it"):
        RunFolder(tmp_path / "run", writer=False, agree=lambda ok: False).__enter__()
