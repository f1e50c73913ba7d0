"""kill -9 in the middle of an upload: the key never holds half of it, and the rest is aborted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from iobench.errors import UnavailableError
from iobench.testing import Bucket, LocalS3, content, local_s3
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.image import FileImage

_KILLS = 4
_CHILD = """
import sys
from iobench.testing import content
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.image import FileImage

writer = registry.make("s3", part_size="5MiB", threads=2)
data = content(24 * MIB, 2)
print("begun", flush=True)
while True:
    if sys.argv[1] == "write":
        writer.write(FileImage.of("model", [data]), sys.argv[2])
    else:
        with writer.open(f"{sys.argv[2]}/model") as stream:
            stream.write(data)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    """rclone's server, active."""
    try:
        with local_s3() as running, running.active():
            yield running
    except UnavailableError as error:
        pytest.skip(str(error))


def _kill_while_uploading(how: str, target: str, after_s: float) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, how, target], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(after_s)
        child.kill()


def _iobench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "iobench", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("how", ["write", "stream"])
def test_killed(server: LocalS3, how: str) -> None:
    """The key holds the old object or the new one; abort-uploads clears what was left."""
    target = f"{server.target}/killed-{how}"
    place = Bucket(target)
    old, new = content(MIB, 1).tobytes(), content(24 * MIB, 2).tobytes()
    place.put("model", old)
    left = 0
    for number in range(_KILLS):
        _kill_while_uploading(how, target, 0.02 + 0.03 * number)
        assert place.stored("model") in (old, new)
        left = len([name for name in place.names() if name.endswith("(upload)")])
        if left:
            break
    listed = _iobench("s3", "list-uploads", target)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == left
    aborted = _iobench("s3", "abort-uploads", target)
    assert aborted.returncode == 0, aborted.stderr
    assert aborted.stdout.count(f"aborted {target}/model") == left
    assert place.names() == {"model"}
    assert server.secret_key not in listed.stderr + aborted.stderr
    registry.make("s3").write(FileImage.of("model", [content(100)]), target)
    assert place.stored("model") == content(100).tobytes()


def test_a_server_dies_with_its_process() -> None:
    """However the process ends, neither the server nor its directory stays."""
    code = (
        "import os, signal\nfrom iobench.testing import local_s3\n"
        "with local_s3() as server:\n"
        "    print(server.endpoint_url, server.directory.parent, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "rclone" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    endpoint, directory = done.stdout.split()
    deadline = time.monotonic() + 20
    while os.path.exists(directory) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(directory)
    port = f":{int(endpoint.rpartition(':')[2]):04X} "
    with open("/proc/net/tcp") as table:
        assert not [line for line in table if port in line and " 0A " in line]
