"""Peers and our writers: real libraries, small states, every byte back, all in one table."""

import json
import os
from pathlib import Path

import pytest
import torch

from iobench import peers
from iobench.peers.base import Peer, State
from iobench.peers.deepspeed_aio import is_built
from iobench.results import read

FILES = [name for name in peers.names() if "file" in peers.peer_class(name).schemes]
STORES = [name for name in peers.names() if "s3" in peers.peer_class(name).schemes]


def state() -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, among them a scalar, an empty and an odd one."""
    random = torch.Generator().manual_seed(1)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    made = {f"layer.{i}": torch.randn(99 + i, 257, generator=random).to(kinds[i]) for i in range(4)}
    made["optimizer/0/exp_avg"] = torch.randn(1000, 100, generator=random)
    made["bytes"] = torch.randint(0, 255, (12_345,), dtype=torch.uint8, generator=random)
    return made | {"step": torch.tensor(3.5), "none": torch.empty(0, 4)}


def described(given: State) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in given.items()}


def equal(found: State, expected: State) -> bool:
    return all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


def usable(name: str, target: str) -> Peer:
    """The peer, which must be installed: all of them are in the extra `dev`."""
    if name == "deepspeed-aio" and not is_built():
        pytest.skip(
            "DeepSpeed's async_io operator is not built yet, which takes minutes: once "
            "iobench run --writer peer:deepspeed-aio"
        )
    peer = peers.make(name)
    answer = peer.available(target)
    assert answer.ok, answer
    return peer


@pytest.mark.parametrize("name", FILES)
def test_files_come_back(tmp_path, name: str) -> None:
    """Every tensor of every type, all of them or some, and nothing of it is mapped afterwards."""
    peer, path, saved = usable(name, str(tmp_path)), str(tmp_path / "state"), state()
    (peer if peer.saves else peers.make("safetensors")).save(saved, path)
    assert equal(peer.restore(path, described(saved)), saved)
    some = {name: saved[name] for name in ("layer.1", "optimizer/0/exp_avg")}
    found = peer.restore(path, described(some))
    assert equal(found, some)
    assert path not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", FILES)
def test_a_state_that_is_not_there(tmp_path, name: str) -> None:
    """A restore of nothing raises, whatever the peer calls its error."""
    peer = usable(name, str(tmp_path))
    with pytest.raises(Exception):  # noqa: B017, PT011 -- each peer has its own
        peer.restore(str(tmp_path / "missing"), described(state()))


def test_a_lock_of_a_killed_build(tmp_path, monkeypatch) -> None:
    """torch would wait for ever for the end of that build."""
    pytest.importorskip("deepspeed")
    (tmp_path / "async_io").mkdir()
    lock = tmp_path / "async_io" / "lock"
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    answer = peers.make("deepspeed-aio").available(str(tmp_path))
    assert not answer.ok
    assert f"{lock} is left by a killed build; remove this file" in answer.reason
    assert lock.exists()


def test_one_table(iobench_inside, tiny_path, target, tmp_path) -> None:
    """Writers and peers in one run: all verified, the same bytes, stdout is one document."""
    names = ["buffered", "peer:torch-save", "peer:torch-save-mmap", "peer:safetensors", "peer:dcp"]
    done = iobench_inside(
        *("run", "-w", tiny_path, "--target", target, "--writer", ",".join(names)),
        *("--repeat", "1", "--size", "full", "--no-fio", "--format", "json"),
        *("-o", tmp_path / "run.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    found = {(one["writer"], one["operation"]): one for one in json.loads(done.stdout)["summaries"]}
    assert set(found) == {(name, operation) for name in names for operation in ("save", "restore")}
    assert {one["verdict"] for one in found.values()} == {"VALID"}
    record = read(tmp_path / "run.jsonl")
    assert {sample.bytes for sample in record.samples} == {record.run.workload.bytes}
    for sample in record.samples:
        if sample.operation == "restore":
            assert sample.verified.tensors > 8
            assert sample.cold is not None
    phases = {one: set(found[one, "save"]["phases_s"]) for one in names}
    assert phases["peer:torch-save"] == {"save", "sync", "commit"}
    assert phases["peer:dcp"] == {"save", "sync", "commit"}


@pytest.mark.parametrize("name", STORES)
def test_buckets(iobench, tiny_path, tmp_path, name, moto) -> None:
    """Peers for object stores save to a real server and restore every byte.

    That is moto's for those that do not work with rclone's; they say so before a run.
    """
    usable(name, "s3://bucket/prefix")
    writers, record = f"s3,peer:{name}", tmp_path / "run.jsonl"
    if name == "s3torchconnector":
        writers = writers.replace("s3,", "s3,checksum=none,", 1)
    arguments = (
        *("run", "-w", tiny_path, "--writer", writers, "--repeat", "1"),
        *("--size", "full", "--format", "json", "-o", record),
    )
    if peers.peer_class(name).refused_by:
        refused = iobench(*arguments, "--s3-local")
        if "not installed" in refused.stderr:
            pytest.skip(refused.stderr)
        assert refused.returncode == 3, refused.stderr
        assert peers.peer_class(name).refused_by["rclone"] in refused.stderr
        assert not record.exists()
        done = iobench(*arguments, "--target", f"{moto.target}/run")
    else:
        done = iobench(*arguments, "--s3-local")
        if done.returncode == 3 and "rclone" in done.stderr:
            pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    verdicts = {one["writer"]: one["verdict"] for one in json.loads(done.stdout)["summaries"]}
    assert verdicts == {"s3": "VALID", f"peer:{name}": "VALID"}
