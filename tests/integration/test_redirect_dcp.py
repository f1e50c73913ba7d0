"""The redirect of DCP in this process: the order in which a save becomes durable."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from iobench.integrations.default_writer import set_default_writer
from iobench.integrations.redirect import patches
from iobench.integrations.redirect.call_counts import CallCounts

STATE = {"w": torch.arange(4096.0)}


@pytest.fixture(autouse=True)
def _redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DCP's files go through `buffered`; its own functions are restored afterwards."""
    for name in ("create_stream", "rename", "mkdir"):
        monkeypatch.setattr(filesystem.FileSystem, name, getattr(filesystem.FileSystem, name))
    set_default_writer("buffered")
    patches.dcp(filesystem, CallCounts(tmp_path / "session"))
    yield
    set_default_writer(None)


def _save(path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(STATE, checkpoint_id=path)


def test_the_commit_is_durable_when_the_save_returns(tmp_path, monkeypatch) -> None:
    """The last call syncs the directory of .metadata."""
    done = _watch(monkeypatch)
    _save(tmp_path / "checkpoint")
    assert done[-2:] == [
        ("rename", str(tmp_path / "checkpoint/.metadata")),
        ("fsync", str(tmp_path / "checkpoint")),
    ]


def test_the_directory_that_a_save_makes_is_durable_too(tmp_path, monkeypatch) -> None:
    """New parent directories are synced before the commit; later saves make none."""
    monkeypatch.chdir(tmp_path)
    done = _watch(monkeypatch)
    _save(Path("new/run/checkpoint"))
    commit = done.index(("rename", "new/run/checkpoint/.metadata"))
    for gained in (".", "new", "new/run"):
        assert ("fsync", str((tmp_path / gained).resolve())) in done[:commit]
    done.clear()
    _save(Path("new/run/next"))
    synced = {path for kind, path in done if kind == "fsync"}
    assert str(tmp_path / "new/run") in synced
    assert not synced & {str(tmp_path), str(tmp_path / "new")}


def _watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record each sync and rename from now on, in order."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def syncing(fd: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renaming(source: Any, target: Any, **how: Any) -> None:
        rename(source, target, **how)
        done.append(("rename", os.fspath(target)))

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    return done
