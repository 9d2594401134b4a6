"""The run folder: made and locked on entry, removed again if nothing came of it; and errors of the disk as one line.

A run folder holds everything of one run: `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/` and `lock`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jzero.errors import JzeroError
from jzero.folders import missing_folders, remove_empty

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOT_A_FOLDER = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
_DISK_ERRORS = {*_FULL_DISK, *_NOT_WRITABLE, *_NOT_A_FOLDER}
_FULL = "No space left on device"


def disk_reason(error: BaseException | None) -> str | None:
    """What the disk refused, in one phrase, if that is the cause of an exception; else None.

    Libraries wrap such errors (TensorStore gives a ValueError that quotes the system's message), so the chain of causes
    is searched. What merely happened while such an error was handled is another mistake.

    Example:
        >>> disk_reason(OSError(errno.ENOSPC, "No space left on device", "a/b"))
        'No space left on device: a/b'
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        if _FULL in str(error):
            return _FULL
        error = error.__cause__
    return None


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an error of the disk inside the block into a one-line JzeroError about `what`; others pass unchanged.

    For blocks that write, and nothing else: that a file cannot be read is not told apart.

    Example:
        >>> with disk_errors("run folder"):
        ...     open("/dev/null/x", "w")
        Traceback (most recent call last):
            ...
        jzero.errors.JzeroError: run folder: expected room and permission to write, found Not a directory: /dev/null/x
    """
    try:
        yield
    except JzeroError:
        raise
    except Exception as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        found = " ".join(reason.split())
        raise JzeroError(f"{what}: expected room and permission to write, found {found}") from error


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old or the new content, never a part; nothing stays on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class RunFolder:
    """A run folder, held by one process: a context manager that makes and locks it.

    If the block fails before `keep()` was called, whatever this process put there is removed again, so that a mistake
    leaves nothing behind. A folder that held something before is left as it is.

    Args:
        path: the folder; missing parents are created.
        writer: whether this process writes (process 0 of a run). Others neither create nor lock.
        agree: from whether this process got the folder to whether the writer did; called once by every process.
        check: called by the writer once it holds the folder; what it raises means that the folder cannot be used.

    Raises:
        JzeroError: the folder cannot be made (a parent is a regular file, the disk is full), or another process trains
            into it, or `check` raised it.

    Example:
        >>> import tempfile
        >>> with RunFolder(Path(tempfile.mkdtemp()) / "run") as run:
        ...     run.keep()
        ...     run.path.is_dir()
        True
    """

    def __init__(
        self,
        path: Path,
        *,
        writer: bool = True,
        agree: Callable[[bool], bool] = bool,
        check: Callable[[Path], None] = lambda path: None,
    ):
        self.path = path
        self.writer = writer
        self._agree = agree
        self._check = check
        self._made: list[Path] = []  # the folders that were not there before, outermost first
        self._was_empty = False
        self._lock = -1
        self._kept = False

    def keep(self) -> None:
        """Says that the folder now holds something worth keeping."""
        self._kept = True

    def __enter__(self) -> RunFolder:
        if self.writer:
            try:
                self._create()
                self._check(self.path)
            except BaseException:
                self._discard()
                self._unlock()
                self._agree(False)
                raise
        if not self._agree(True):
            raise JzeroError(f"run folder {self.path}: expected process 0 to open it, found that it could not")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None and not self._kept:
            self._discard()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _create(self) -> None:
        with disk_errors(f"run folder {self.path}"):
            self._made = missing_folders(self.path)
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # /proc and the like answer so
                raise JzeroError(f"run folder {self.path}: expected to make it, found {error.strerror}") from error
            self._was_empty = not any(self.path.iterdir())
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._made, self._was_empty = [], False  # it is the other process's folder
            raise JzeroError(
                f"run folder {self.path}: expected no other process training into it, found one that holds "
                f"{self.path / 'lock'}; wait for it or set another exp_manager.name"
            ) from error

    def _discard(self) -> None:
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            remove_empty(self._made)  # another run may have begun beside this one
        elif self._was_empty:
            for path in self.path.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
