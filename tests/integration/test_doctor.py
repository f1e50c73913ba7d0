"""`iobench doctor` on real directories: the one tests run in, and file systems made for it."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.cli import app
from typer.testing import CliRunner, Result

from iobench.environment import DeviceMonitor, describe_storage
from iobench.environment.advice import Advice
from iobench.units import MIB

_PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def run_doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def as_json(directory: Path) -> dict[str, Any]:
    result = run_doctor("--target", str(directory), "--format", "json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_table_of_this_directory(tmp_path) -> None:
    """Every section and every probe is printed, plain where stdout is no terminal."""
    result = run_doctor("--target", str(tmp_path))
    assert result.exit_code == 0, result.output
    for word in ("machine", "io_uring", "torch", "gpudirect", "storage", "free space", "kind"):
        assert word in result.stdout
    for word in ("O_DIRECT", "RWF_DONTCACHE", "fallocate", "page cache", "fsync"):
        assert word in result.stdout
    assert str(tmp_path) in result.stdout
    assert "\x1b" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_document_of_this_directory(tmp_path) -> None:
    """The JSON is one document with the fields that docs/doctor.md shows, and nothing else."""
    document = as_json(tmp_path)
    assert document["schema"] == "iobench.doctor/1"
    shown = re.search(r"^    (\{.*\n(?:    .*\n)*)", _PAGE.read_text(), re.MULTILINE)
    named = set(re.findall(r'"(\w+)"', re.sub(r'"note"\|"warn"\|"fail"', "", shown[1])))
    fields = {field.name for field in dataclasses.fields(Advice)}
    assert named == {*document, *document["probes"][0], *fields}
    assert document["storage"]["path"] == str(tmp_path.resolve())
    assert {probe["name"] for probe in document["probes"]} >= {"O_DIRECT", "eviction", "fsync"}
    failed = {f"probe.{probe['name']}" for probe in document["probes"] if not probe["ok"]}
    assert failed <= {item["subject"] for item in document["advice"]}


def test_names_that_are_not_text(tmp_path) -> None:
    """A directory whose name is not UTF-8 is looked at and printed all the same."""
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(odd)
    result = run_doctor("--target", os.fsdecode(odd))
    assert result.exit_code == 0, result.exception
    assert "\\udcff" in result.stdout
    assert as_json(Path(os.fsdecode(odd)))["storage"]["path"].endswith("\udcff\udcfe")


@pytest.mark.root
def test_tmpfs_is_no_storage(new_filesystem) -> None:
    """On tmpfs the kind, the lack of a device, durability and eviction are all reported."""
    place = new_filesystem("tmpfs", 16 * MIB)
    document = as_json(place)
    storage = document["storage"]
    assert (storage["kind"], storage["fs_type"], storage["device"]) == ("tmpfs", "tmpfs", None)
    assert storage["mount_point"] == str(place)
    levels = {item["subject"]: item["level"] for item in document["advice"]}
    assert levels["storage.kind"] == levels["probe.eviction"] == levels["probe.O_DIRECT"] == "fail"
    assert DeviceMonitor(place).read() is None


@pytest.mark.root
def test_overlay_names_its_upper_file_system(new_filesystem) -> None:
    """An overlay is reported as one, with the file system that receives the writes."""
    storage = describe_storage(new_filesystem("overlay"))
    assert (storage.kind, storage.device) == ("overlay", None)
    assert storage.upper is not None
    assert storage.upper.fs_type == "ext4"


@pytest.mark.root
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_loop_device_counts_the_bytes(new_filesystem, fs_type: str) -> None:
    """On a real file system the device is found and its counters see what fsync sent there."""
    place = new_filesystem(fs_type)
    device = describe_storage(place).device
    assert device is not None
    assert (device.type, Path(str(device.backing_file)).stem) == ("loop", place.name)
    monitor = DeviceMonitor(place)
    before = monitor.read()
    with (place / "file").open("wb") as file:
        file.write(os.urandom(2 * MIB))
        file.flush()
        os.fsync(file.fileno())
    assert (monitor.read() - before).write_bytes >= 2 * MIB


@pytest.mark.root
def test_a_read_only_mount_is_reported(new_filesystem) -> None:
    """Where nothing can be written doctor still answers, and says why."""
    place = new_filesystem("tmpfs", MIB)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    document = as_json(place)
    assert document["probes"][0]["name"] == "write"
    assert "EROFS" in document["probes"][0]["detail"]
    assert ("fail", "storage.options") in {(a["level"], a["subject"]) for a in document["advice"]}
