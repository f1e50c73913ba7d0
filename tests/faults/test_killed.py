"""kill -9 in the middle of a save, at moments that differ from run to run of the child."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from iobench.testing import content
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

_KILLS = 15
_WORDS = 1 << 18  # 2 MiB
_LEFTOVER = re.compile(r"\.model\..*\.iobench-part")

_CHILD = """
import json
import sys
import numpy as np
from iobench.writers import registry
from iobench.writers.image import FileImage

name, first, words, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
writer = registry.make(name, **json.loads(sys.argv[5]))
for number in range(first, first + 10_000):
    data = np.full(words, number, dtype=np.uint64)
    print(number, flush=True)
    if number % 2:
        writer.write(FileImage.of("model", [data]), directory)
    else:
        with writer.open(f"{directory}/model") as stream:
            stream.write(data.view(np.uint8))
"""


def _kill_while_saving(
    name: str, first: int, directory: Path, settings: str, after_s: float
) -> int:
    """Let a child save checkpoint after checkpoint and kill it; the number it began last."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, name, str(first), str(_WORDS), str(directory), settings],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        begun = int(child.stdout.readline())
        threading.Event().wait(after_s)
        child.kill()
        for line in child.stdout:
            if line.endswith("\n"):
                begun = int(line)
    return begun


def test_killed(
    make: Callable[..., Writer], name: str, names, settings: str, tmp_path: Path
) -> None:
    """The name holds the last whole checkpoint or the one before, never a torn one."""
    writer = make(tmp_path)
    moments = random.Random(7)
    first, held = 1, None
    for _ in range(_KILLS):
        begun = _kill_while_saving(name, first, tmp_path, settings, moments.uniform(0, 0.03))
        before = begun - 1 if begun > first else held
        others = names(tmp_path) - {"model"}
        assert all(_LEFTOVER.fullmatch(other) for other in others), others
        held = _held(tmp_path / "model")
        assert held in (begun, before)
        first = begun + 1
    _saves_again(writer, tmp_path)


def _held(path: Path) -> int | None:
    """The number of the checkpoint under the name, which is whole."""
    if not path.exists():
        return None
    found = np.fromfile(path, dtype=np.uint64)
    assert len(found) == _WORDS
    assert (found == found[0]).all(), "a torn file"
    return int(found[0])


def _saves_again(writer: Writer, directory: Path) -> None:
    writer.write(FileImage.of("model", [content(100_001)]), directory)
    assert (directory / "model").read_bytes() == content(100_001).tobytes()
