"""Writer: the behaviour that all writers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.errors import UnavailableError, UnknownNameError, UsageError
from iobench.writers.buffered import BufferedOptions, BufferedWriter
from iobench.writers.null import NullWriter
from iobench.writers.odirect import ODirectOptions, ODirectWriter


def test_made_from_options_or_values() -> None:
    """Both ways give the same writer, and no options give the defaults."""
    assert BufferedWriter(BufferedOptions(threads=3)).options == BufferedWriter(threads=3).options
    assert BufferedWriter().options == BufferedOptions()


def test_not_from_both() -> None:
    """Options and values together are refused."""
    with pytest.raises(UsageError, match="not both"):
        BufferedWriter(BufferedOptions(), threads=3)


def test_not_from_another_writers_options() -> None:
    """The options of another writer are refused, naming both."""
    with pytest.raises(UsageError, match="ODirectOptions are not options of writer 'buffered'"):
        BufferedWriter(ODirectOptions())


def test_unknown_values() -> None:
    """An unknown option is refused."""
    with pytest.raises(UnknownNameError, match="iodepth"):
        NullWriter(iodepth=3)


def test_repr_shows_the_options() -> None:
    """The repr is the call that makes an equal writer."""
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
