"""A tiny workload, and a real file system to run commands on."""

import fcntl
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.captured import captured
from support.s3_servers import s3_server

from iobench.testing import Bucket, LocalS3
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """A workload of 6 MiB: raw, safetensors and torch files of rank 0, one raw file of rank 1."""
    return Path(__file__).with_name("tiny.yaml")


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[RankPool]]:
    pools: list[RankPool] = []
    yield pools
    for one in pools:
        one.close()


@pytest.fixture
def ranks(_pools: list[RankPool]) -> RankPool:
    """Four ranks, which live as long as the session unless a test breaks them."""
    if not _pools:
        _pools.append(RankPool(4))
    if _pools[0].broken:
        _pools.pop().kill()
        _pools.append(RankPool(4))
    return _pools[0]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of each checkpoint of the corpus; tests change copies of them.

    The workers of a run share one, since the frameworks that make it take 15 s.
    """
    at = tmp_path_factory.getbasetemp()
    at = (at.parent if "PYTEST_XDIST_WORKER" in os.environ else at) / "corpus"
    with open(f"{at}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not at.exists():
            made = tmp_path_factory.mktemp("corpus-made")
            done = captured(
                [sys.executable, "-m", "support.checkpoint_corpus", str(made)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert done.returncode == 0, done.stderr
            made.rename(at)
    return at.joinpath


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    """rclone's server."""
    with s3_server("rclone") as running:
        yield running


@pytest.fixture(
    scope="module", params=["moto", pytest.param("rclone", marks=pytest.mark.exhaustive)]
)
def either_server(request: pytest.FixtureRequest) -> Iterator[LocalS3]:
    """Each of the two servers; test_s3 and test_s3_proxy show how they differ."""
    with s3_server(request.param) as running:
        yield running


@pytest.fixture
def bucket(either_server: LocalS3) -> Iterator[Bucket]:
    """A prefix of its own for each test."""
    with either_server.active():
        yield Bucket(f"{either_server.target}/run-{secrets.token_hex(4)}")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The directory of the checkpoints."""
    return tmp_path / "local"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The directory of the remote tier."""
    return tmp_path / "remote"


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty directory on an ext4 that no other test uses; otherwise any directory. Results are
    written elsewhere, so that it must be empty again after every command."""
    if os.geteuid() != 0:
        made = tmp_path / "target"
    else:
        make = request.getfixturevalue("shared_filesystems")
        made = _ext4(make) / tmp_path.name
    made.mkdir()
    return made


_made: dict[str, Path] = {}


def _ext4(make: Callable[..., Path]) -> Path:
    if "ext4" not in _made:
        _made["ext4"] = make("ext4", 1024 * 2**20)
    return _made["ext4"]
