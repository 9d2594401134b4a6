"""The writer leaves two whole files or none."""

import os
import resource
import stat

import numpy as np
import pytest

from jzero.data import IndexedDataset, IndexedWriter
from jzero.data.writer import smallest_dtype
from jzero.errors import JzeroError


def write(prefix, dtype, documents, lengths=None, modes=None, *, error=None):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document, lengths, modes)
        if error is not None:
            raise error


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_after_an_error(tmp_path, error):
    with pytest.raises(error):
        write(tmp_path / "new" / "folder" / "text", "uint16", [np.arange(100_000) % 100], error=error)
    assert names(tmp_path) == []


def test_an_error_keeps_the_older_pair(tmp_path):
    write(tmp_path / "text", "uint16", [[1, 2]])
    with pytest.raises(RuntimeError):
        write(tmp_path / "text", "uint16", [[3]], error=RuntimeError)
    assert names(tmp_path) == ["text.bin", "text.idx"]
    assert IndexedDataset(tmp_path / "text")[0].tolist() == [1, 2]


def test_replaces_an_older_pair(tmp_path):
    for tokens in ([1, 2], [3]):
        write(tmp_path / "text", "uint16", [tokens])
    assert names(tmp_path) == ["text.bin", "text.idx"]
    assert IndexedDataset(tmp_path / "text").tokens.tolist() == [3]


@pytest.fixture
def file_limit():
    """Files may grow to 4 KiB: beyond, writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("documents", "size"), [(1, 100_000), (1, 2100), (100_000, 1), (1000, 1)])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, file_limit, documents, size):
    # Fails in the first write, at the last flush of .bin, while adding, and in .idx alone.
    tokens = np.zeros(size, np.uint16)
    file_limit()
    with pytest.raises(JzeroError) as error:
        write(tmp_path / "new" / "text", "uint16", [tokens] * documents)
    assert str(error.value).startswith(
        f"{tmp_path}/new/text.bin: expected to write here, found: File too large; free some"
    )
    assert "\n" not in str(error.value)
    assert names(tmp_path) == []


def test_a_folder_below_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JzeroError, match=r"file/text\.bin: expected to write here, found: .*; free"):
        IndexedWriter(tmp_path / "file" / "text", "uint16").__enter__()
    assert names(tmp_path) == ["file"]


def test_files_have_ordinary_permissions(tmp_path):
    write(tmp_path / "text", "uint8", [[1]])
    mask = os.umask(0)
    os.umask(mask)
    for suffix in (".bin", ".idx"):
        assert stat.S_IMODE((tmp_path / f"text{suffix}").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize(("dtype", "token", "limits"), [("uint16", 65536, "0..65535"), ("int8", -129, "-128..127")])
def test_a_token_that_does_not_fit(tmp_path, dtype, token, limits):
    with pytest.raises(JzeroError, match=rf"text\.bin: expected tokens in {limits} \({dtype}\), found {token};"):
        write(tmp_path / "text", dtype, [[1, token]])
    assert names(tmp_path) == []


def test_misuse(tmp_path):
    with pytest.raises(JzeroError, match=r"token dtype: expected one of uint8, .*, found uint32"):
        IndexedWriter(tmp_path / "text", "uint32")
    with pytest.raises(ValueError, match="inside of its `with` block"):
        IndexedWriter(tmp_path / "text", "uint8").add([1])
    with pytest.raises(TypeError, match="found float64"):
        write(tmp_path / "text", "uint8", [[0.5]])
    for lengths, modes in [([1], None), ([1, 1], [0]), ([3, -1], None)]:
        with pytest.raises(ValueError, match="lengths, modes: expected"):
            write(tmp_path / "text", "uint8", [[1, 2]], lengths, modes)
    assert names(tmp_path) == []


def test_smallest_dtype():
    assert [smallest_dtype(n).name for n in (257, 65499, 65500, 2**20)] == ["uint16", "uint16", "int32", "int32"]
