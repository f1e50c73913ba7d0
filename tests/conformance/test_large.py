"""The checks that move more than 2 GiB: files on tmpfs, which wears no disk, and objects."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from support.fake_cufile import FakeCuFile
from support.fake_device import FakeBytes, FakeDevice, on_device

from iobench.errors import UnavailableError
from iobench.testing import Bucket, Check, local_s3, writer_checks
from iobench.units import GIB, MIB
from iobench.writers import gds, registry
from iobench.writers.image import Bytes


@pytest.fixture
def tmpfs(new_filesystem) -> Path:
    """A tmpfs for one file of 2 GiB, if enough memory is free."""
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    if free < 6 * GIB:
        pytest.skip(f"needs 6 GiB of free memory, {free // MIB} MiB are free")
    return new_filesystem("tmpfs", 2 * GIB + 64 * MIB)


@pytest.mark.root
@pytest.mark.parametrize(
    "name",
    [
        *("buffered", "odirect", "uring"),  # vectors, direct blocks and rings; others combine these
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("uncached", "hybrid")),
        pytest.param("aiofiles", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("item", writer_checks(large=True), ids=str)
def test_large(item: Check, name: str, tmpfs) -> None:
    """Each large claim holds for each writer that stores."""
    make = functools.partial(registry.make, name)
    if not make().available(tmpfs).ok:
        pytest.skip(make().available(tmpfs).reason)
    item(make, tmpfs)


class _InPlace(FakeDevice):
    """A device that uses the memory of the image itself, as a copy of 2 GiB takes too long."""

    def upload(self, data: Bytes) -> FakeBytes:
        return FakeBytes(self, data)

    def download(self, memory: FakeBytes) -> Bytes:
        self.own.run_to(len(self.own))
        return memory.memory


@pytest.mark.root
@pytest.mark.parametrize("item", writer_checks(large=True), ids=str)
def test_large_by_gds(item: Check, tmpfs, monkeypatch) -> None:
    """Each large claim holds for `gds` with a fake cuFile."""
    fake = FakeCuFile(_InPlace())
    fake.use(monkeypatch)
    make = on_device(gds.GdsWriter, fake.device)
    item(make, tmpfs)
    assert fake.operations > 128


@pytest.mark.parametrize("item", writer_checks(large=True, stores=False), ids=str)
def test_large_unstored(item: Check, tmp_path) -> None:
    """Each large claim that does not need storage holds for `null`."""
    item(lambda: registry.make("null", threads=2), tmp_path)


@pytest.mark.exhaustive  # 50 s: parts are far smaller than what the kernel moves at once
@pytest.mark.parametrize("item", writer_checks(large=True), ids=str)
def test_large_object(item: Check) -> None:
    """Each large claim holds in a bucket; the server keeps the object on disk."""
    with tempfile.TemporaryDirectory() as room:
        if shutil.disk_usage(room).free < 6 * GIB:
            pytest.skip("needs 6 GiB of free disk space")
    try:
        with local_s3() as server, server.active():
            item(lambda: registry.make("s3"), Bucket(f"{server.target}/large"))
    except UnavailableError as error:
        pytest.skip(str(error))
