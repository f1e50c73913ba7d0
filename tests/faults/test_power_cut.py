"""A power cut right after a save: what was durable on return exists, complete and under its name.

The image of a file system is copied and mounted again. The copy has the content of the device:
pages that only the kernel's memory has are lost, like in a power cut.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.captured import captured
from support.filesystems import after_power_cut
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)

import iobench
import iobench.torch
from iobench.checkpoint.manifest import MANIFEST
from iobench.checkpoint.store import STAGING_SUFFIX
from iobench.exports.staged_directory import StagedDirectory
from iobench.formats import safetensors
from iobench.integrations.dcp import StorageWriter
from iobench.offload import AdamW
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.local.directory_lock import LOCK
from iobench.writers.local.new_file import write_text
from iobench.writers.removal import remove_file

pytestmark = pytest.mark.root

_DATA = [content(200_003, seed) for seed in range(3)]  # several blocks and a tail
_MINUTES = "remount,commit=600"  # ext4 commits its journal every 5 s otherwise

Disk = Callable[[str], Path]


def _run(*command: str | Path) -> str:
    return captured(command, check=True).stdout.strip()


@pytest.fixture
def disk(new_filesystem: Callable[..., Path]) -> Disk:
    """Make a file system that starts no write-back of its own for minutes."""

    def made(kind: str) -> Path:
        root = new_filesystem(kind, (48 if kind == "ext4" else 512) * MIB)
        if kind == "ext4":
            _run("mount", "-o", _MINUTES, root)
        return root

    return made


def _write(writer: Writer, root: Path, data: list[bytes]) -> None:
    writer.write(FileImage.of("a/file", [data[0]]), root)


def _write_many(writer: Writer, root: Path, data: list[bytes]) -> None:
    writer.write_many([FileImage.of(f"{n}/file", [one]) for n, one in enumerate(data)], root)


def _stream(writer: Writer, root: Path, data: list[bytes]) -> None:
    with writer.open(root / "a" / "file") as stream:
        stream.write(data[0])


def _files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_writers(make, disk, tmp_path) -> None:
    """New files in new directories, and then others that replace them."""
    root = disk("ext4")
    writer = make(root)
    for way in (_write, _write_many, _stream):
        home = root / way.__name__
        for data in (_DATA, _DATA[::-1]):
            way(writer, home, data)
            with after_power_cut(root, tmp_path) as after:
                assert _files(after) == _files(root)
                assert sorted(_files(after / home.name).values()) == sorted(
                    one.tobytes() for one in (data if way is _write_many else data[:1])
                )


def test_the_cut_loses_what_is_not_durable(disk, tmp_path) -> None:
    """The check itself can fail."""
    root = disk("ext4")
    iobench.load_writer("buffered").write(FileImage.of("file", _DATA), root, durable=False)
    assert _files(root)
    with after_power_cut(root, tmp_path) as after:
        assert not any(_files(after).values())


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_checkpointer(kind: str, disk, tmp_path) -> None:
    """Each committed step can be loaded, and retention removes none that a newer one needs."""
    root = disk(kind)
    runs = root / "runs" / "a"

    def expect(value: int, step: int, steps: list[int]) -> None:
        with after_power_cut(root, tmp_path) as after:
            found = after / "runs" / "a"
            assert iobench.load_checkpoint(found, step)["w"][-1] == value
            assert iobench.load_checkpoint(found)["step"] == step
            assert sorted(one.parent.name for one in found.glob(f"step-*/{MANIFEST}")) == [
                f"step-{one}" for one in steps
            ]

    def state(step: int, value: int) -> dict[str, object]:
        return {"w": torch.full((50_001,), value), "step": step}

    with iobench.Checkpointer(runs, writer="buffered", keep=iobench.KeepLast(2)) as ckpt:
        ckpt.save(state(1, 10), 1)
        expect(10, 1, [1])
        ckpt.save_async(state(2, 20), 2)
        ckpt.wait()
        expect(20, 2, [1, 2])
        ckpt.save(state(3, 30), 3)  # removes step 1
        expect(30, 3, [2, 3])
        ckpt.load(2)
        ckpt.save(state(3, 31), 3)  # replaces step 3
        expect(31, 3, [2, 3])
        ckpt.remove(3)
        with after_power_cut(root, tmp_path) as after:
            assert not (after / "runs" / "a" / "step-3").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_and_frameworks(disk, tmp_path) -> None:
    """torch files, safetensors, DCP, the directories of Accelerate and Transformers, configs."""
    root = disk("ext4")
    state = {"a": torch.arange(60_000), "b": torch.ones(3)}
    buffered = iobench.load_writer("buffered")

    def staged() -> None:
        directory = StagedDirectory(root / "last")
        directory.begin()
        directory.path.mkdir(exist_ok=True)
        (directory.path / "notes").write_bytes(b"x" * 100_000)
        directory.publish()

    for way in (
        lambda: iobench.torch.save(state, root / "model.pt", writer=buffered),
        lambda: safetensors.save(state, "model.safetensors", root / "shards", buffered),
        lambda: dcp.save(state, storage_writer=StorageWriter(root / "dcp", buffered), no_dist=True),
        staged,
        lambda: write_text(root / "writer.toml", "writer"),
    ):
        way()
        with after_power_cut(root, tmp_path) as after:
            found = _files(after)
            # The removal of a staging directory is not durable; the next save repeats it.
            left = {name for name in found if name.endswith(f"{STAGING_SUFFIX}/{LOCK}")}
            assert {name: found[name] for name in found.keys() - left} == _files(root)
    written = {"model.pt", "shards/model.safetensors", "dcp/.metadata", "last/notes", "writer.toml"}
    assert written <= {*_files(root)}
    remove_file(str(root / "dcp" / ".metadata"), buffered)  # DCP and Lightning remove by it
    with after_power_cut(root, tmp_path) as after:
        assert not (after / "dcp" / ".metadata").exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_offload(kind: str, disk, tmp_path) -> None:
    """Each durable step of an offloaded optimizer, and each pin, has all its bytes."""
    root = disk(kind)
    expected = stock_snapshots(4)

    def check(step: int | str, updates: int) -> None:
        with (
            after_power_cut(root, tmp_path) as after,
            AdamW.resume(make_parameters(1), after / "a" / "state", step=step, verify=True) as one,
        ):
            assert not one.restored.passed_over
            assert_equal(snapshot(one), expected[updates - 1])

    parameters = make_parameters()
    with AdamW(parameters, root / "a" / "state", **VALUES, **OPTIONS) as optimizer:
        for step in range(4):
            give_gradients(parameters, step)
            optimizer.step()
            optimizer.wait()
            check("latest", step + 1)
            if step == 1:
                optimizer.pin(2, {"seen": 2})
                optimizer.wait(2)
                check(2, 2)
        check(2, 2)
