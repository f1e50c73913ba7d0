"""`iobench doctor` on real directories: the one tests run in, and file systems made for it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import app
from typer.testing import CliRunner, Result

from iobench.environment import DeviceMonitor, describe_storage
from iobench.environment.advice import Advice
from iobench.units import MIB

_PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"

Mounter = Callable[..., Path]


def run_doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def as_json(directory: Path) -> dict[str, Any]:
    result = run_doctor("--target", str(directory), "--format", "json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_table_of_this_directory(tmp_path: Path) -> None:
    """Every section and every probe is printed, plain where stdout is no terminal."""
    result = run_doctor("--target", str(tmp_path))
    assert result.exit_code == 0, result.output
    for word in ("machine", "io_uring", "torch", "gpudirect", "storage", "free space", "kind"):
        assert word in result.stdout
    for word in ("O_DIRECT", "RWF_DONTCACHE", "fallocate", "cachestat", "drop_caches", "fsync"):
        assert word in result.stdout
    assert str(tmp_path) in result.stdout
    assert "\x1b" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_document_of_this_directory(tmp_path: Path) -> None:
    """The JSON is one document with the fields that docs/doctor.md shows, and nothing else."""
    document = as_json(tmp_path)
    assert document["schema"] == "iobench.doctor/1"
    shown = re.search(r"^    (\{.*\n(?:    .*\n)*)", _PAGE.read_text(), re.MULTILINE)
    assert shown is not None
    named = set(re.findall(r'"(\w+)"', re.sub(r'"note"\|"warn"\|"fail"', "", shown[1])))
    fields = {field.name for field in dataclasses.fields(Advice)}
    assert named == {*document, *document["probes"][0], *fields}
    assert document["storage"]["path"] == str(tmp_path.resolve())
    assert {probe["name"] for probe in document["probes"]} >= {"O_DIRECT", "eviction", "fsync"}
    failed = {f"probe.{probe['name']}" for probe in document["probes"] if not probe["ok"]}
    assert failed <= {item["subject"] for item in document["advice"]}


def test_names_that_are_not_text(tmp_path: Path) -> None:
    """A directory whose name is not UTF-8 is looked at and printed all the same."""
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(odd)
    result = run_doctor("--target", os.fsdecode(odd))
    assert result.exit_code == 0, result.exception
    assert "\\udcff" in result.stdout
    assert as_json(Path(os.fsdecode(odd)))["storage"]["path"].endswith("\udcff\udcfe")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounter]:
    """Mounts with the given words of mount(8), skips where that is not allowed, unmounts after."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    places: list[Path] = []

    def mount(name: str, *words: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        answer = subprocess.run(["mount", *words, place], capture_output=True, text=True)
        if answer.returncode:
            pytest.skip(f"mount is not allowed here: {answer.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_tmpfs_is_no_storage(mounted: Mounter) -> None:
    """On tmpfs the kind, the lack of a device, durability and eviction are all reported."""
    place = mounted("a place", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    document = as_json(place)
    storage = document["storage"]
    assert (storage["kind"], storage["fs_type"], storage["device"]) == ("tmpfs", "tmpfs", None)
    assert storage["mount_point"] == str(place)
    levels = {item["subject"]: item["level"] for item in document["advice"]}
    assert levels["storage.kind"] == levels["probe.eviction"] == levels["probe.O_DIRECT"] == "fail"
    assert DeviceMonitor(place).read() is None


@pytest.mark.root
def test_overlay_names_its_upper_file_system(mounted: Mounter) -> None:
    """An overlay is reported as one, with the file system that receives the writes."""
    base = mounted("base", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    storage = describe_storage(mounted("over", "-t", "overlay", "-o", layers, "overlay"))
    assert (storage.kind, storage.device) == ("overlay", None)
    assert storage.upper is not None
    assert storage.upper.mount_point == str(base)


@pytest.mark.root
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_loop_device_counts_the_bytes(tmp_path: Path, mounted: Mounter, fs_type: str) -> None:
    """On a real file system the device is found and its counters see what fsync sent there."""
    maker = shutil.which(f"mkfs.{fs_type}")
    if maker is None:
        pytest.skip(f"mkfs.{fs_type} is not installed")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(320 * MIB)  # xfs makes none below 300 MiB
    subprocess.run([maker, "-q", image], check=True, capture_output=True)
    place = mounted("disk", "-o", "loop", str(image))
    device = describe_storage(place).device
    assert device is not None
    assert (device.type, device.backing_file) == ("loop", str(image))
    monitor = DeviceMonitor(place)
    before = monitor.read()
    with (place / "file").open("wb") as file:
        file.write(os.urandom(2 * MIB))
        file.flush()
        os.fsync(file.fileno())
    after = monitor.read()
    assert before is not None
    assert after is not None
    assert (after - before).write_bytes >= 2 * MIB


@pytest.mark.root
def test_a_read_only_mount_is_reported(mounted: Mounter) -> None:
    """Where nothing can be written doctor still answers, and says why."""
    place = mounted("readonly", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs")
    document = as_json(place)
    assert document["probes"][0]["name"] == "write"
    assert "EROFS" in document["probes"][0]["detail"]
    assert ("fail", "storage.options") in {(a["level"], a["subject"]) for a in document["advice"]}
