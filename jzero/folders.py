"""Folders made for an output, and their removal when nothing came of it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents that do not exist, outermost first.

    Example:
        >>> missing_folders(Path("/no-such/folder"))
        [PosixPath('/no-such'), PosixPath('/no-such/folder')]
    """
    return [path for path in (folder, *folder.parents) if not path.exists()][::-1]


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes those of the folders, outermost first, that hold nothing: by now others may have put something there."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()
