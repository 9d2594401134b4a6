"""A folder of safetensors as Hugging Face lays it out: one file, or several with an index that says what lies where.

model.safetensors                    or  model-00001-of-00003.safetensors …
                                         model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jzero.errors import JzeroError
from jzero.folders import missing_folders, remove_empty

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


class Tensors:
    """The tensors of a folder, none of which is read before a part of it is asked for; a context manager.

    Attributes:
        shapes: of every tensor by name.

    Raises:
        JzeroError: a file is missing or damaged, or the folder has no safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open = contextlib.ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}  # the file of a tensor, and its name there
        library = safetensors()
        try:
            for name in _file_names(folder):
                try:
                    file = self._open.enter_context(library.safe_open(str(folder / name), framework="np"))
                except (OSError, library.SafetensorError) as error:
                    raise JzeroError(
                        f"{folder / name}: expected a safetensors file, found: {error}; copy it again"
                    ) from None
                self._files |= {_modern(stored): (file, stored) for stored in file.keys()}  # noqa: SIM118  no mapping
            self.shapes = {name: tuple(self.slices(name).get_shape()) for name in self._files}
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def slices(self, name: str) -> Any:
        """What gives a NumPy array of a part of a tensor for one slice per dimension."""
        file, stored = self._files[name]
        return file.get_slice(stored)


def _modern(name: str) -> str:
    """The name of today for a norm's tensor in files of 2019 (`bert-base-uncased`)."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def safetensors() -> ModuleType:
    """The library.

    Raises:
        JzeroError: it is not installed.
    """
    try:
        import safetensors.numpy as numpy_part
    except ImportError:
        raise JzeroError(
            "safetensors: expected the library that reads and writes Hugging Face's files, found none; "
            "pip install 'jzero[hf]'"
        ) from None
    return sys.modules[numpy_part.__name__.rpartition(".")[0]]


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))[:1]
        found = f"{others[0]}: convert it with transformers' save_pretrained" if others else "neither"
        raise JzeroError(f"{folder}: expected {SINGLE} or {INDEX}, found {found}")
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise JzeroError(f"{folder / INDEX}: expected JSON with a weight_map, found none; copy it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        JzeroError: the file is missing or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JzeroError(f"{path}: expected a JSON file, found: {error}; copy it again") from None
    if not isinstance(values, dict):
        raise JzeroError(f"{path}: expected a JSON object, found {type(values).__name__}; copy it again")
    return values


def is_hf_folder(path: Path) -> bool:
    """Whether a folder holds a model as Hugging Face saves it.

    Example:
        >>> is_hf_folder(Path("/no-such-folder"))
        False
    """
    return (path / CONFIG).is_file() and not (path / "config.yaml").is_file()


# --- writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that appears at `path` complete, when the block ends well, or not at all.

    Raises:
        JzeroError: there is something at `path`.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise JzeroError(f"{path}: expected no such file or folder, found one; give another name, or remove it")
    made = missing_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_empty(made)
        raise


def assign(tensors: Mapping[str, int], limit: int) -> list[list[str]]:
    """Which tensors lie in which file, in their order.

    Args:
        tensors: bytes by name.
        limit: most bytes of a file; a tensor that is larger has one of its own.

    Example:
        >>> assign({"a": 3, "b": 3, "c": 9}, 6)
        [['a', 'b'], ['c']]
    """
    files, room = [], 0
    for name, size in tensors.items():
        if not files or size > room:
            files, room = [*files, []], limit
        files[-1].append(name)
        room -= size
    return files


def write_files(folder: Path, files: Sequence[Sequence[str]], tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Writes tensors, which come in the order of `files`, and the index where there is more than one file."""
    library, where, total = safetensors(), {}, 0
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        content = dict(next(tensors) for _ in names)
        if list(content) != list(names):
            raise ValueError(f"tensors: expected {list(names)}, found {list(content)}")
        library.numpy.save_file(content, str(folder / file), metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library makes it readable by its owner alone
        where |= dict.fromkeys(names, file)
        total += sum(x.nbytes for x in content.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
