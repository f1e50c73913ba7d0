"""Every registered writer, with several settings, passes the conformance suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support.check_groups import GROUPS, check_groups, run_checks

from iobench.testing import Check
from iobench.writers import registry
from iobench.writers.base import Writer

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
# `test_here` runs them with every setting. The machine's own device runs all with the first one.
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


_OF_OTHERS = ("bytes", "memory", "reads", "streams", "failures")


def _cases(
    settings: dict[str, tuple[dict[str, object], ...]], of_others: Iterable[str] = GROUPS
) -> list[object]:
    """Each group of checks with the first setting of each writer; `of_others` with the others."""
    cases = []
    for name, several in settings.items():
        stores = registry.writer_class(name).stores
        for number, options in enumerate(several):
            shown = ",".join([name, *(f"{k}={v}" for k, v in options.items())])
            groups = check_groups(stores=stores, groups=of_others if number else GROUPS)
            cases += [
                pytest.param(checks, name, options, id=f"{shown}-{group}")
                for group, checks in groups.items()
            ]
    return cases


def test_no_writer_is_forgotten() -> None:
    """Every registered writer has settings here, so the suite covers each of them."""
    assert set(_SETTINGS) == set(registry.names())


@pytest.mark.parametrize(("checks", "name", "options"), _cases(_SETTINGS))
def test_here(
    checks: tuple[Check, ...], name: str, options: dict[str, object], directory: Path
) -> None:
    """Each claim holds: by default on the temporary directory's device, else on a quick ext4."""
    _run(checks, functools.partial(registry.make, name, **options), directory)


@pytest.fixture
def directory(options: dict[str, object], request: pytest.FixtureRequest) -> Path:
    """A directory on the machine's own device for default options; others need not wait for it."""
    found: Path = request.getfixturevalue("on_ext4" if options else "tmp_path")
    return found


@pytest.mark.parametrize(("checks", "name", "options"), _cases(_ELSEWHERE, _OF_OTHERS))
def test_mounted(
    checks: tuple[Check, ...], name: str, options: dict[str, object], mounted: Path
) -> None:
    """Each claim holds on every kind of file system that is available here."""
    _run(checks, functools.partial(registry.make, name, **options), mounted)


def _run(checks: tuple[Check, ...], make: Callable[[], Writer], directory: Path) -> None:
    answer = make().available(directory)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    run_checks(checks, make, lambda _: directory)
