"""The file of -o: UTF-8 in any locale, and durable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iobench.cli.autotune import _check_config
from iobench.cli.pages import write_file
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import dump_writer, read_config

_COPY = """
import sys
from pathlib import Path
from iobench.cli.autotune import _check_config
from iobench.cli.pages import write_file
_check_config(Path(sys.argv[1]))
write_file(Path(sys.argv[2]), Path(sys.argv[1]).read_bytes())
"""


@pytest.mark.slow
def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    """In the locale C, which is ASCII, the same bytes are read and written."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_bytes(dump_writer(BufferedWriter(), comment=["\N{ROCKET}"]).encode())
    subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", _COPY, first, second],
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        check=True,
    )
    assert second.read_bytes() == first.read_bytes()


def test_it_is_durable_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it gets its name, and its directory after that."""
    done: list[tuple[str, bool]] = []
    fsync, path = os.fsync, tmp_path / "writer.toml"

    def syncing(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(("directory" if name == tmp_path else "file", path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", syncing)
    write_file(path, dump_writer(BufferedWriter()).encode())
    assert done == [("file", False), ("directory", True)]
    assert read_config(path).name == "buffered"
    assert os.listdir(tmp_path) == ["writer.toml"]
    _check_config(path)
