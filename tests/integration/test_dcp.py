"""torch.distributed.checkpoint through our writers: our and the stock classes read each other's
files."""

import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.pyuring_wheels import WHEELS_OF_PYURING
from support.torchrun import torchrun
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from iobench.errors import TransferError, UsageError
from iobench.formats import read_ahead
from iobench.integrations import dcp as ours
from iobench.integrations.dcp import StorageReader, StorageWriter
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import Bytes, FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

WRITERS = ("buffered", "odirect", *(("uring",) if WHEELS_OF_PYURING else ()), "hybrid")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore DCP's warnings about its use in one process, and about its own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_state(seed: int = 0) -> dict[str, Any]:
    """Tensors of several kinds and sizes, nested, and values that are not tensors."""
    torch.manual_seed(seed)
    wide = torch.randn(64, 300)
    return {
        "model": {
            "large": torch.randn(700, 1001),
            "view": wide[:, 10:20],
            "bf16": torch.randn(333).to(torch.bfloat16),
            "bool": torch.rand(77) > 0.5,
            "scalar": torch.tensor(3.5 + seed),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {"0": {"step": torch.tensor(seed), "exp_avg": torch.randn(1 << 16)}}
        },
        "epoch": 7 + seed,
        "note": "text",
    }


def blank(state: Any) -> Any:
    """The same structure to load into, with other values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.full_like(state.contiguous(), 1)
    return None


def assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def loaded(reader: Any, state: dict[str, Any]) -> dict[str, Any]:
    found = blank(state)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("single_file_per_rank", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_ours_is_read_by_stock(tmp_path, name: str, single_file_per_rank: bool) -> None:
    """Files of any writer can be loaded by the stock FileSystemReader, and by another of our
    writers."""
    state = make_state()
    writer = StorageWriter(
        tmp_path, name, single_file_per_rank=single_file_per_rank, thread_count=3
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_equal(loaded(FileSystemReader(tmp_path), state), state)
    assert_equal(loaded(StorageReader(tmp_path, "buffered"), state), state)
    assert all(transfer.durable and transfer.writer == name for transfer in writer.transfers)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(writer.transfers) == len(files)
    assert files[0] == ".metadata"
    if single_file_per_rank:
        assert files[1:] == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]


@pytest.mark.parametrize("name", WRITERS)
def test_stocks_is_read_by_us(tmp_path, name: str, monkeypatch) -> None:
    """Files of the stock FileSystemWriter can be loaded by every writer, also in pieces."""
    state = make_state()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    assert_equal(loaded(StorageReader(tmp_path, name), state), state)
    for at_once, writer in ((4096, name), (1 << 17, make("odirect"))):
        monkeypatch.setattr(ours, "_AT_ONCE", at_once)
        reader = StorageReader(tmp_path, writer)
        assert_equal(loaded(reader, state), state)
        assert len(reader.transfers) > 2


def test_two_pieces_of_memory_serve_all_runs(tmp_path, monkeypatch) -> None:
    """Memory is used again, over all files; a tensor larger than a run fits too."""
    state = {f"t{number}": torch.randn(1 << 12) for number in range(40)}
    state["large"] = torch.randn(1 << 18)
    dcp.save(state, storage_writer=StorageWriter(tmp_path, "odirect"), no_dist=True)
    made: list[int] = []

    def counted(size_bytes: int) -> Bytes:
        made.append(size_bytes)
        return pages_to_read_into(size_bytes)

    monkeypatch.setattr(ours, "pages_to_read_into", counted)
    monkeypatch.setattr(ours, "_AT_ONCE", 1 << 16)
    reader = StorageReader(tmp_path, "odirect")
    assert_equal(loaded(reader, state), state)
    assert len(reader.transfers) > 8
    assert len(made) == 2
    assert min(made) > 1 << 20


def test_a_part_of_a_checkpoint(tmp_path, monkeypatch) -> None:
    """A small part of a file is read without the rest."""
    monkeypatch.setattr(read_ahead, "GAP_BYTES", 4096)
    state = {f"t{number}": torch.randn(1 << 16) for number in range(40)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, "odirect"), no_dist=True)
    wanted = {"t3": state["t3"], "t30": state["t30"]}
    reader = StorageReader(tmp_path, "odirect")
    assert_equal(loaded(reader, wanted), wanted)
    assert sum(transfer.bytes for transfer in reader.transfers) < 4 * (1 << 18)


def test_the_same_writer_again(tmp_path) -> None:
    """`dcp.save` with another checkpoint_id uses that directory; the first checkpoint stays."""
    writer, reader = StorageWriter(tmp_path / "a", "buffered"), StorageReader(".", "buffered")
    for name, seed in (("a", 1), ("b", 2)):
        place = tmp_path / name
        dcp.save(make_state(seed), checkpoint_id=place, storage_writer=writer, no_dist=True)
    for name, seed in (("a", 1), ("b", 2)):
        found = blank(make_state(seed))
        dcp.load(found, checkpoint_id=tmp_path / name, storage_reader=reader, no_dist=True)
        assert_equal(found, make_state(seed))


def test_ids_of_saves_and_loads(tmp_path) -> None:
    """`save_id` and `load_id` are named, renewed and recorded like in torch's own classes."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    ids = []
    for writer, reader in (
        (FileSystemWriter(stock), FileSystemReader(stock)),
        (StorageWriter(ours, "buffered"), StorageReader(ours, "buffered")),
    ):
        place = writer.checkpoint_id
        ids += [writer.save_id, reader.load_id]
        for _ in range(2):
            dcp.save(make_state(), checkpoint_id=place, storage_writer=writer, no_dist=True)
            dcp.load(blank(make_state()), checkpoint_id=place, storage_reader=reader, no_dist=True)
            found = reader.read_metadata().storage_meta
            assert (found.save_id, found.load_id) == (writer.save_id, reader.load_id)
            assert found.checkpoint_id == place
            ids += [writer.save_id, reader.load_id]
    assert len(set(ids)) == len(ids)


def test_overwriting(tmp_path) -> None:
    """A second save replaces the first, or is refused on request."""
    dcp.save(make_state(1), storage_writer=StorageWriter(tmp_path, "buffered"), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="a checkpoint already"):
        dcp.save(
            make_state(2),
            storage_writer=StorageWriter(tmp_path, "buffered", overwrite=False),
            no_dist=True,
        )
    assert_equal(loaded(StorageReader(tmp_path, "buffered"), make_state(1)), make_state(1))
    dcp.save(make_state(2), storage_writer=StorageWriter(tmp_path, "odirect"), no_dist=True)
    assert_equal(loaded(StorageReader(tmp_path, "odirect"), make_state(2)), make_state(2))


class Failing(BufferedWriter):
    """Fails to write the second file."""

    written = 0

    def write(self, image: FileImage, target: Any, **options: Any) -> Transfer:
        type(self).written += 1
        if type(self).written == 2:
            raise TransferError(28, "No space left on device", str(target))
        return super().write(image, target, **options)


def test_a_file_that_fails(tmp_path, monkeypatch) -> None:
    """The failure of one thread fails the save: no metadata, the old checkpoint removed, never a
    mixture."""
    dcp.save(make_state(1), storage_writer=StorageWriter(tmp_path, "buffered"), no_dist=True)
    monkeypatch.setattr(Failing, "written", 0)
    writer = StorageWriter(tmp_path, Failing(), thread_count=3)
    with pytest.raises(dcp.api.CheckpointException, match="No space left"):
        dcp.save(make_state(2), storage_writer=writer, no_dist=True)
    assert not (tmp_path / ".metadata").exists()
    with pytest.raises(dcp.api.CheckpointException, match="No such file"):
        loaded(StorageReader(tmp_path, "buffered"), make_state())
    assert not list(tmp_path.glob("*iobench-part"))


@pytest.mark.parametrize("damage", ["short", "flipped", "no metadata", "other object"])
def test_damage(tmp_path, damage: str) -> None:
    """A file that does not match the metadata is refused."""
    state = {"weight": torch.randn(100_000)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, "buffered"), no_dist=True)
    data, metadata = tmp_path / "__0_0.distcp", tmp_path / ".metadata"
    if damage == "short":
        os.truncate(data, 1000)
    elif damage == "flipped":
        data.write_bytes(b"\xff" * data.stat().st_size)
    elif damage == "no metadata":
        metadata.write_bytes(metadata.read_bytes()[:100])
    else:
        metadata.write_bytes(pickle.dumps({"a": 1}))
    about_metadata = damage in ("no metadata", "other object")
    word = "not metadata of DCP" if about_metadata else "DataMismatchError"
    with pytest.raises(dcp.api.CheckpointException, match=word):
        loaded(StorageReader(tmp_path, "buffered"), state)


def test_bad_arguments(tmp_path) -> None:
    """A path that is not the writer's, and zero threads, are refused at once."""
    with pytest.raises(UsageError, match="s3"):
        StorageWriter("s3://bucket/step", "odirect")
    with pytest.raises(UsageError, match="thread_count=0"):
        StorageWriter(tmp_path, "odirect", thread_count=0)
    assert not StorageWriter.validate_checkpoint_id(tmp_path)


def test_a_bucket(server) -> None:
    """A checkpoint is saved to, loaded from and replaced in an object store."""
    with server.active():
        place = f"s3://{server.bucket}/step-1"
        for seed in (1, 2):
            writer = StorageWriter(place, make("s3"))
            dcp.save(make_state(seed), storage_writer=writer, no_dist=True)
            found = loaded(StorageReader(place, make("s3")), make_state(seed))
            assert_equal(found, make_state(seed))


JOB = """
import os
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from iobench.integrations.dcp import StorageReader, StorageWriter

def state(mesh, placement, fill=None):
    torch.manual_seed(0)
    full = torch.randn(96, 1031), torch.randn(50_000)
    if fill is not None:
        full = tuple(torch.full_like(one, fill) for one in full)
    return {
        "sharded": distribute_tensor(full[0], mesh, [placement]),
        "replicated": full[1],
        "step": 5 if fill is None else None,
    }

def main(path):
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    for how in ("sync", "thread", "process"):
        print(how, file=sys.stderr, flush=True)
        save_and_load(mesh, f"{path}/{how}", how)
    dist.barrier()
    dist.destroy_process_group()

def save_and_load(mesh, path, how):
    saved = state(mesh, Shard(0))
    if how == "sync":
        dcp.save(saved, storage_writer=StorageWriter(path, "odirect"))
    else:
        kind = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
        writer = StorageWriter(path, "odirect")
        future = dcp.async_save(saved, storage_writer=writer, async_checkpointer_type=kind[how])
        saved["replicated"].fill_(9)  # after the staging, before the save
        future.result()
    for reader in (StorageReader(path, "odirect"), dcp.FileSystemReader(path)):
        for placement in (Shard(1), Replicate()):
            found, wanted = state(mesh, placement, fill=1.0), state(mesh, placement)
            dcp.load(found, storage_reader=reader)
            assert found["step"] == 5
            assert torch.equal(found["replicated"], wanted["replicated"])
            assert torch.equal(found["sharded"].full_tensor(), wanted["sharded"].full_tensor())

if __name__ == "__main__":
    main(*sys.argv[1:])
    # gloo's threads may hold tensors that they let go after the interpreter: "terminate called
    # without an active exception" (pytorch/pytorch#179291, #190489).
    os._exit(0)
"""


def test_two_ranks(tmp_path) -> None:
    """Sharded tensors of two ranks are saved, also asynchronously, and loaded with other shards."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ended = torchrun(
        ["--standalone", "--nproc-per-node=2", script, tmp_path / "checkpoint"], timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    for how in ("sync", "thread", "process"):
        names = sorted(path.name for path in (tmp_path / "checkpoint" / how).iterdir())
        assert names[0] == ".metadata"
        assert {name[:4] for name in names[1:]} == {"__0_", "__1_"}
