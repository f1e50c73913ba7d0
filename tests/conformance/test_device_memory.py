"""Every writer passes the whole suite with the memory of all images on a fake device."""

import functools
from collections.abc import Iterator

import pytest
from support.check_groups import check_groups
from support.fake_device import FakeDevice, on_device
from support.s3_servers import s3_server

from iobench.testing import Bucket, Check
from iobench.testing.suite import run_checks
from iobench.writers import registry

_SETTINGS: dict[str, dict[str, object]] = {
    "buffered": {"block_size": "64KiB"},
    "uncached": {"block_size": "64KiB", "threads": 3},
    "odirect": {"block_size": "64KiB", "threads": 3},
    "hybrid": {"block_size": "64KiB", "iodepth": 3, "small_size": "8KiB"},
    "aiofiles": {"block_size": "64KiB", "iodepth": 3},
    "uring": {"block_size": "64KiB", "iodepth": 4},
    "null": {"block_size": "64KiB", "threads": 3},
}
_MORE = (
    ("uncached", {"block_size": "64KiB", "method": "sync_file_range"}),
    ("hybrid", {"block_size": "64KiB", "paths": "uncached"}),
    ("hybrid", {"block_size": "64KiB", "paths": "direct", "uring": False}),
)
_MIXED = ("hybrid", "buffered", "odirect", "aiofiles")
_FIRST, _OF_OTHERS = "hybrid", ("bytes", "memory", "streams", "failures")
"""The writer whose checks `make test` runs all, and the groups of the others: one Staging copies
for all of them."""


def _cases() -> Iterator[object]:
    for name, options in (*_SETTINGS.items(), *_MORE):
        stores = registry.writer_class(name).stores
        for mixed in (False, True) if name in _MIXED and options is _SETTINGS[name] else (False,):
            shown = ",".join([name, *(f"{k}={v}" for k, v in options.items())])
            for group, checks in check_groups(stores=stores).items():
                where = "mixed" if mixed else "device"
                first = name == _FIRST and options is _SETTINGS[name]
                more = not first and (mixed or group not in _OF_OTHERS)
                marks = [pytest.mark.exhaustive] if more or (name, options) in _MORE else []
                case = f"{shown}-{where}-{group}"
                yield pytest.param(checks, name, options, mixed, id=case, marks=marks)


@pytest.mark.parametrize(("checks", "name", "options", "mixed"), list(_cases()))
def test_files(checks, name, options, mixed, on_ext4) -> None:
    """Each claim holds for device memory; every copy uses pinned memory, and none is left over."""
    device = FakeDevice()
    make = functools.partial(on_device(registry.writer_class(name), device, mixed=mixed), **options)
    answer = make().available(on_ext4)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    run_checks(checks, make, lambda _: on_ext4, lambda: _expect_none_left(device))


def _expect_none_left(device: FakeDevice) -> None:
    assert not device.pending
    assert not device.pageable


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server("rclone") as server, server.active():
        yield server.target


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(checks, id=group, marks=[] if group in _OF_OTHERS else pytest.mark.exhaustive)
        for group, checks in check_groups().items()
    ],
)
def test_buckets(checks: tuple[Check, ...], bucket) -> None:
    """The same for `s3`, with parts of 5 MiB."""
    device = FakeDevice()
    kind = on_device(registry.writer_class("s3"), device, mixed=True)
    make = functools.partial(kind, part_size="5MiB")
    run_checks(
        checks,
        make,
        lambda check: Bucket(f"{bucket}/device/{check}"),
        lambda: _expect_none_left(device),
    )
