"""kill -9 at random moments of saves into a bucket: fifty, and forty on another server.

`make test-all` adds as many at other moments.
"""

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from support.captured import captured
from support.killed_saves import killed_saves
from support.s3_servers import SERVERS, s3_server

from iobench.checkpoint.manifest import MANIFEST
from iobench.errors import TransferError
from iobench.testing import LocalS3
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter

_KILLS = {
    "rclone": {"write": 15, "stream": 15, "checkpoint": 20},
    "moto": {"write": 12, "stream": 12, "checkpoint": 16},
}
_SEEDS = pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.exhaustive)])
_SIZE = 11 * MIB + 64  # three parts
_OPTIONS = {"part_size": "5MiB", "threads": 2}
_COMPLETED_S = 5.0  # how long a store may take to complete an upload


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[LocalS3]:
    """Each of the two servers, active."""
    with s3_server(request.param) as running, running.active():
        yield running


@pytest.fixture
def kills(server: LocalS3, request: pytest.FixtureRequest) -> dict[str, int]:
    """The number of killed saves of each kind."""
    return _KILLS[request.node.callspec.params["server"]]


class _Seen:
    """The objects and uploads below one prefix, as another client sees them."""

    def __init__(self, target: str) -> None:
        self._writer = S3Writer(checksum="none")
        self._place = S3Target.parse(target)
        self._objects = S3Objects(self._writer.client, self._place)

    def keys(self) -> set[str]:
        found = self._objects.keys()
        return {key.removeprefix(f"{self._place.key}/") for key in found}

    def number(self, name: str, size_bytes: int, *, replaced: bool = False) -> int:
        """Return the number of the checkpoint in the complete object. It is requested again while
        rclone breaks off its answers, as it does during a replacement.

        `replaced`: the store may be completing an upload to this key. rclone removes the old file
        before it renames the new one, so for a moment it may find no object.
        """
        until_s = time.monotonic() + (_COMPLETED_S if replaced else 0)
        while True:
            try:
                body = self._read(name)
                break
            except TransferError as error:
                if error.errno != errno.ENOENT or time.monotonic() >= until_s:
                    raise
            time.sleep(0.01)
        found = np.frombuffer(body, dtype=np.uint64)
        assert found.nbytes == size_bytes
        assert (found == found[0]).all(), "a torn object"
        return int(found[0])

    def _read(self, name: str) -> bytes:
        where = {"Bucket": self._place.bucket, "Key": self._place.below(name).key}
        return self._writer.client.call(
            lambda s3: s3.get_object(**where)["Body"].read(), Meter(), doing="reading", where=name
        )

    def abort_uploads(self) -> int:
        """Abort all incomplete uploads. Return their number."""
        left = self._objects.uploads()
        for upload in left:
            self._objects.abort(upload)
        assert not self._objects.uploads()
        return len(left)


@_SEEDS
@pytest.mark.parametrize("how", ["write", "stream"])
def test_objects(server, kills, how: str, seed: int) -> None:
    """The key has a complete object, the last or the one before; the uploads that are left can be
    aborted."""
    target = f"{server.target}/killed-{how}-{seed}"
    seen, met, kept, left = _Seen(target), Counter[str](), Counter[bool](), 0
    with killed_saves("s3", _OPTIONS, target, how=how, size_bytes=_SIZE, seed=seed) as saves:
        saves.save(1)
        held = 1
        for number in range(2, 2 + kills[how]):
            phase = saves.kill(number)
            if phase != "commit":  # the store may still be completing this upload
                left += seen.abort_uploads()
            before, held = held, seen.number("model", _SIZE, replaced=phase == "commit")
            assert before <= held <= number  # a store may finish what it was asked after the kill
            assert phase != "done" or held == number
            met[phase] += 1
            kept[held == number] += 1
        saves.save(1000)
    seen.abort_uploads()
    assert seen.number("model", _SIZE) == 1000
    assert seen.keys() == {"model"}
    assert left
    assert min(kept[True], kept[False]) >= kills[how] // 10, (
        "the kills all fell before or after the publication"
    )
    assert len(met) >= 3


@_SEEDS
def test_checkpoints(server, kills, seed: int) -> None:
    """A prefix with a manifest is a complete checkpoint; the earlier ones stay."""
    target = f"{server.target}/killed-checkpoints-{seed}"
    seen, met, done = _Seen(target), Counter[str](), {1}
    with killed_saves(
        "s3", _OPTIONS, target, how="checkpoint", size_bytes=_SIZE, seed=seed
    ) as saves:
        saves.save(1)
        for number in range(2, 2 + kills["checkpoint"]):
            phase = saves.kill(number)
            met[phase] += 1
            if phase == "done":
                done.add(number)
        saves.save(1000)
    seen.abort_uploads()
    keys = seen.keys()
    visible = {int(key.split("/")[0][5:]) for key in keys if key.endswith(f"/{MANIFEST}")}
    assert done | {1000} <= visible
    for number in visible:
        assert seen.number(f"step-{number}/model", _SIZE - _SIZE // 4) == number
        for shard in ("0", "1"):
            assert seen.number(f"step-{number}/shards/{shard}", _SIZE // 8) == number
    assert {key for key in keys if key.endswith("/shards/0")} - {
        f"step-{number}/shards/0" for number in visible
    }, "no kill fell into a save"
    assert len(met) >= 4


def test_abort_uploads(server, iobench_inside) -> None:
    """The command lists and aborts the uploads of a killed save; it changes no object."""
    target = f"{server.target}/aborted"
    seen = _Seen(target)
    with killed_saves("s3", _OPTIONS, target, how="write", size_bytes=_SIZE) as saves:
        saves.save(1)
        saves.kill(2, phase="upload", entry=1)
    listed = iobench_inside("s3", "list-uploads", target)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == 1
    aborted = iobench_inside("s3", "abort-uploads", target)
    assert aborted.returncode == 0, aborted.stderr
    assert aborted.stdout == f"aborted {target}/model\n"
    assert server.secret_key not in listed.stderr + aborted.stderr
    assert not seen.abort_uploads()
    assert seen.number("model", _SIZE) == 1


def test_a_server_dies_with_its_process() -> None:
    """However the process ends, neither the server nor its directory is left."""
    code = (
        "import os, signal\nfrom iobench.testing import local_s3\n"
        "with local_s3() as server:\n"
        "    print(server.endpoint_url, server.directory.parent, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = captured([sys.executable, "-c", code])
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
