"""RLIMIT_FSIZE, which a batch system may set, in a process of its own."""

import sys
from pathlib import Path

from support.captured import captured

_TESTS = str(Path(__file__).parents[1])
_CHILD = """
import errno, json, os, resource, sys
import numpy as np
from iobench.errors import TransferError
from iobench.writers import registry
from iobench.writers.image import FileImage

name, directory, settings, tests = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if name == "gds":
    sys.path.insert(0, tests)
    from support.fake_cufile import play_gds
    make = play_gds()
else:
    make = registry.writer_class(name)
data = np.ones((1 << 20) + 70_000, dtype=np.uint8)
for fallocate in (True, False):
    for how in ("write", "stream"):
        writer = make(**{**json.loads(settings), "fallocate": fallocate})
        try:
            if how == "write":
                writer.write(FileImage.of("model", [data]), directory)
            else:
                with writer.open(f"{directory}/model") as stream:
                    stream.write(data)
        except TransferError as error:
            assert error.errno == errno.EFBIG, error
        else:
            sys.exit(f"the limit was not met: {how}, fallocate={fallocate}")
        writer.write(FileImage.of(f"small-{how}-{fallocate}", [data[:5000]]), directory)
        print(how, fallocate, *sorted(os.listdir(directory)))
"""


def test_size_limit(make, name: str, settings, tmp_path) -> None:
    """The caller gets EFBIG, the earlier file stays, and a smaller file can be written. By `write`
    and by a stream, with and without reserved space."""
    make(tmp_path)
    (tmp_path / "model").write_bytes(b"the last good one")
    done = captured(
        [sys.executable, "-W", "error", "-c", _CHILD, name, str(tmp_path), settings, _TESTS]
    )
    assert (done.returncode, done.stderr) == (0, "")
    names = ["model"]
    for line in done.stdout.splitlines():
        how, fallocate, *found = line.split()
        names.append(f"small-{how}-{fallocate}")
        assert found == sorted(names), line
        assert (tmp_path / names[-1]).read_bytes() == b"\x01" * 5000
    assert len(names) == 5
    assert (tmp_path / "model").read_bytes() == b"the last good one"
