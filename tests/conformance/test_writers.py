"""Every registered writer, with several settings, passes the conformance suite."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path

import pytest

from iobench.testing import (
    Check,
    check_contract,
    check_durability,
    check_torch,
    writer_checks,
)
from iobench.writers import registry

_SETTINGS = {
    "buffered": (
        {},
        {"block_size": "4KiB"},
        {"block_size": "64KiB", "threads": 3, "fallocate": False},
    ),
    "uncached": (
        {},
        {"block_size": "4KiB", "threads": 3},
        {"block_size": "64KiB", "method": "sync_file_range"},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "odirect": (
        {},
        {"block_size": "4KiB", "threads": 1},
        {"block_size": "64KiB", "threads": 3},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "hybrid": (
        {},
        {"block_size": "4KiB", "iodepth": 1},
        {"block_size": "64KiB", "iodepth": 3, "uring": False, "small_size": "8KiB"},
        {"block_size": "64KiB", "small_size": "4KiB", "paths": "uncached", "fallocate": False},
        {"block_size": "64KiB", "small_size": "16KiB", "paths": "direct", "read_soon": True},
    ),
    "aiofiles": (
        {},
        {"block_size": "64KiB", "iodepth": 3},
        {"block_size": "1MiB", "fallocate": True},
    ),
    "uring": (
        {},
        {"block_size": "4KiB", "iodepth": 1},
        {"block_size": "64KiB", "iodepth": 3, "rings": 2},
        {"block_size": "64KiB", "rings": 3, "direct": False},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "null": ({}, {"block_size": "4KiB", "threads": 3}),
    "s3": (),  # in test_s3.py, with servers
    "gds": (),  # in unit/writers/test_gds.py with a fake; on a GPU in integration/test_gpu.py
}
# Settings for every kind of file system. The first one of each writer runs every check; the others
# run those of bytes, memory, reads, streams and failures. The remaining claims (torch, options,
# threads, many files) may depend on the setting or on the file system, but not on both together:
# `test_here` runs them with every setting.
_ELSEWHERE = {
    **dict.fromkeys(
        ("buffered", "uncached", "odirect"),
        ({"block_size": "64KiB", "threads": 3}, {"block_size": "1MiB", "fallocate": False}),
    ),
    "hybrid": (
        {"block_size": "64KiB", "iodepth": 3, "small_size": "8KiB"},
        {"block_size": "64KiB", "iodepth": 3, "uring": False, "paths": "direct"},
    ),
    "aiofiles": ({"block_size": "64KiB", "iodepth": 3},),
    "uring": (
        {"block_size": "64KiB", "iodepth": 4, "rings": 2},
        {"block_size": "1MiB", "fallocate": False},
        {"block_size": "64KiB", "direct": False},
    ),
}


_ONLY_FIRST = {*vars(check_torch), *vars(check_contract), *vars(check_durability)}


def _cases(
    settings: dict[str, tuple[dict[str, object], ...]], only_first: Collection[str] = ()
) -> list[object]:
    cases = []
    for name, several in settings.items():
        stores = registry.writer_class(name).stores
        for number, options in enumerate(several):
            shown = ",".join([name, *(f"{k}={v}" for k, v in options.items())])
            cases += [
                pytest.param(item, name, options, id=f"{shown}-{item}")
                for item in writer_checks(stores=stores)
                if number == 0 or item.name not in only_first
            ]
    return cases


def test_no_writer_is_forgotten() -> None:
    """Every registered writer has settings here, so the suite covers each of them."""
    assert set(_SETTINGS) == set(registry.names())


@pytest.mark.parametrize(("item", "name", "options"), _cases(_SETTINGS))
def test_here(item: Check, name: str, options: dict[str, object], tmp_path: Path) -> None:
    """Each claim holds on the file system of the temporary directory."""
    make = functools.partial(registry.make, name, **options)
    _require(make, tmp_path)
    item(make, tmp_path)


@pytest.mark.parametrize(("item", "name", "options"), _cases(_ELSEWHERE, _ONLY_FIRST))
def test_mounted(item: Check, name: str, options: dict[str, object], mounted: Path) -> None:
    """Each claim holds on every kind of file system that is available here."""
    make = functools.partial(registry.make, name, **options)
    _require(make, mounted)
    item(make, mounted)


def _require(make, directory: Path) -> None:
    answer = make().available(directory)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
