"""Every writer of files meets every fault; afterwards nothing may be open or running."""

import gc
import importlib.util
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_cufile import FakeCuFile
from support.fake_device import FakeDevice, on_device
from support.nodes import Nodes, open_nodes
from support.preloaded import run_preloaded
from support.scripted_s3 import ScriptedS3, scripted_s3

from iobench.testing import Footprint
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store import client

_WRITERS = {
    "buffered": {"threads": 2},
    "uncached": {"threads": 2},
    "odirect": {"threads": 2},
    "uring": {"rings": 2, "iodepth": 4},
    "hybrid": {"iodepth": 2, "small_size": "16KiB"},
    "aiofiles": {"iodepth": 2, "fallocate": True},
    "gds": {"threads": 2},
}
"""The settings with which small blocks are moved by two workers. gds is played."""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with Footprint.unchanged():
        yield


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four nodes of their own."""
    with open_nodes(4, directory=tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture
def no_process_left(nodes: Nodes) -> Iterator[None]:
    """At the end of a test none of its processes runs, and all nodes are connected."""
    yield
    for node in nodes:
        node.link("up")
    left = [node.running() for node in nodes]
    nodes.kill_all()
    assert not any(left), left


@pytest.fixture(scope="module")
def importing() -> None:
    """Start the process that has imported everything, before anything is counted."""
    run_preloaded(["-c", "pass"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`name` is each writer that stores files. QUICK of a module has those of `make test`: the
    others store by the same file and stream, and move their blocks like one of these."""
    if "name" in metafunc.fixturenames:
        quick = getattr(metafunc.module, "QUICK", _WRITERS)
        more = {name: [] if name in quick else pytest.mark.exhaustive for name in _WRITERS}
        metafunc.parametrize("name", [pytest.param(n, marks=m) for n, m in more.items()])


@pytest.fixture
def settings(name: str) -> str:
    """The options for a child process, as JSON."""
    return json.dumps({"block_size": "64KiB", **_WRITERS[name]})


@pytest.fixture
def device() -> FakeDevice:
    """The location of gds's memory."""
    return FakeDevice()


@pytest.fixture
def make(name: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Writer]:
    """Make that writer, perhaps with other options; skip where it is unavailable."""
    kind = registry.writer_class(name)
    if name == "gds":
        FakeCuFile(device).use(monkeypatch)
        kind = on_device(kind, device)

    def made(directory: Path, **options: object) -> Writer:
        writer = kind(**{"block_size": "64KiB", **_WRITERS[name], **options})
        # What a played cuFile lacks must not skip a test: only O_DIRECT may be missing for `gds`.
        judged = registry.make("odirect") if name == "gds" else writer
        answer = judged.available(directory)
        if not answer.ok:
            pytest.skip(f"{answer.reason} {answer.remedy}")
        return writer

    return made


@pytest.fixture
def names() -> Callable[[Path], set[str]]:
    """The names in a directory, with hidden ones, without `lost+found`."""
    return lambda directory: set(os.listdir(directory)) - {"lost+found"}


_SECRET, _TOKEN = "SECRETsecretSECRETsecret+/do-not-tell", "TOKENtokenTOKENtoken-do-not-tell"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    """A store that follows a script, with credentials that no output may show."""
    if importlib.util.find_spec("boto3") is None:
        pytest.skip("boto3 is not installed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", _TOKEN)
    for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(variable, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(client, "delay_s", lambda failures: 0.001 * failures)
    with scripted_s3() as script:
        yield script
        gc.collect()


@pytest.fixture
def writer(server: ScriptedS3) -> Iterator[S3Writer]:
    """The writer `s3` for that store: few attempts, short timeouts."""
    made = S3Writer(
        endpoint_url=server.endpoint_url,
        addressing_style="path",
        part_size="5MiB",
        threads=2,
        max_attempts=4,
        connect_timeout_s=2,  # also the timeout of a request's body
        read_timeout_s=2,
    )
    yield made
    made.client.close()


@pytest.fixture
def s3_save() -> Callable[..., object]:
    """Save bytes as s3://bucket/run/model, by `write` or by a stream. Return the Transfer."""

    def save(writer: S3Writer, how: str, data) -> object:
        if how == "write":
            return writer.write(FileImage.of("model", [data]), "s3://bucket/run")
        with writer.open("s3://bucket/run/model") as stream:
            for start in range(0, len(data), 3_000_000):
                stream.write(data[start : start + 3_000_000])
        return stream.transfer

    return save


@pytest.fixture
def expect_no_secret() -> Callable[[BaseException], None]:
    """Neither the message of an error nor its traceback shows a credential."""

    def expect(error: BaseException) -> None:
        shown = "".join(traceback.format_exception(error)) + repr(error)
        assert _SECRET not in shown
        assert _TOKEN not in shown

    return expect
