"""Writer: the behaviour that all writers share. A file in memory as a Source."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UnavailableError, UsageError
from iobench.writers import registry
from iobench.writers.base import ImageSource
from iobench.writers.buffered import BufferedOptions, BufferedWriter
from iobench.writers.image import FileImage
from iobench.writers.odirect import ODirectOptions, ODirectWriter


def test_made_from_options_or_values() -> None:
    """Both ways give the same writer, and no options give the defaults; those of another writer are
    refused. The repr is the call that makes an equal writer."""
    assert BufferedWriter(BufferedOptions(threads=3)).options == BufferedWriter(threads=3).options
    assert BufferedWriter().options == BufferedOptions()
    with pytest.raises(UsageError, match="ODirectOptions are not options of writer 'buffered'"):
        BufferedWriter(ODirectOptions())
    assert repr(BufferedWriter(threads=3)) == (
        "BufferedWriter(block_size=16777216, threads=3, fallocate=True)"
    )


@pytest.mark.parametrize("writer", [BufferedWriter(), ODirectWriter()], ids=lambda w: w.name)
def test_a_missing_directory_is_unavailable(writer, tmp_path: Path) -> None:
    """`available` says which directory is missing and what to do; `require` raises that."""
    answer = writer.available(tmp_path / "missing")
    assert not answer.ok
    assert "missing: No such file or directory" in answer.reason
    assert answer.remedy
    with pytest.raises(UnavailableError, match="No such file or directory"):
        writer.require(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("writer", ["buffered", "s3"])
def test_a_path_made_of_a_url_is_refused(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path("s3://bucket/run") is the relative path `s3:/bucket/run`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="a Path drops a slash of s3://; give the target as a str"):
        registry.make(writer).write(FileImage.of("f", [b"x"]), Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())


def test_a_python_without_the_gil_is_refused() -> None:
    """Two workers could get one block there."""
    program = "import sys; sys._is_gil_enabled = lambda: {}; import iobench.writers.workers_end"
    for enabled, message in (
        (True, "ModuleNotFoundError"),
        (False, "iobench is not available here: this Python runs without the GIL. Start it with"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", program.format(enabled)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert message in ended.stderr.splitlines()[-1]


_steps = st.lists(
    st.tuples(st.integers(-20, 40), st.sampled_from([0, 1, 2]), st.integers(-1, 30)), max_size=8
)


@given(st.lists(st.binary(max_size=12), max_size=4), _steps)
def test_as_a_file(pieces: list[bytes], steps: list[tuple[int, int, int]]) -> None:
    """Any seek and read; before the start it raises EINVAL, past the end it returns no bytes."""
    data = b"".join(pieces)
    source, file = ImageSource(FileImage.of("x", pieces)), io.BytesIO(data)
    assert source.size_bytes == len(data)
    for offset, whence, size in steps:
        base = (0, file.tell(), len(data))[whence]
        if base + offset < 0:
            with pytest.raises(OSError, match="a seek to") as caught:
                source.seek(offset, whence)
            assert caught.value.errno == errno.EINVAL
            continue
        assert source.seek(offset, whence) == file.seek(base + offset) == source.tell()
        assert source.read(size) == file.read(size)
        assert source.tell() == file.tell()


def test_ranges() -> None:
    """Many ranges at once; the last one is shorter."""
    source = ImageSource(FileImage.of("x", [b"hello", b" world"]))
    assert source.read_at([3, 0, 9, 50], 4) == [b"lo w", b"hell", b"ld", b""]
