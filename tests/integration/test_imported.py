"""A checkpoint on disk as a workload: its files, tensors and sizes, and none of its contents."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoint_corpus import GOOD, cut
from torch.distributed import checkpoint as dcp

from iobench.bench.data.replay import Replay
from iobench.errors import WorkloadFileError
from iobench.units import MIB
from iobench.verification.imported import document_of, load_workload
from iobench.workloads import Workload
from iobench.workloads.schema import write_yaml

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks that make the corpus


def _stored(at: Path) -> dict[str, int]:
    """The files of a checkpoint, without hidden directories: unfinished saves."""
    found = {str(one.relative_to(at)): one.stat().st_size for one in at.rglob("*") if one.is_file()}
    return {path: size for path, size in found.items() if "/." not in f"/{path.rpartition('/')[0]}"}


def _replayed(workload: Workload) -> dict[str, int]:
    replay = Replay(workload.files(), pool_bytes=MIB, seed=1)
    return dict(zip((one.path for one in replay.files), replay.file_bytes, strict=True))


def _written(at: Path, file: Path, *, anonymous: bool = False) -> Workload:
    file.write_text(write_yaml(document_of(str(at), anonymous=anonymous)), encoding="utf-8")
    return load_workload(str(file))


@pytest.mark.parametrize("name", GOOD)
def test_every_checkpoint(name: str, corpus, tmp_path) -> None:
    """It has the files and sizes of the directory, and so have the two files that it can be
    written to; the anonymous one has none of the names."""
    at = corpus(name)
    workload = load_workload(str(at))
    stored, replayed = _stored(at), _replayed(workload)
    assert (workload.name, replayed.keys()) == (name, stored.keys())
    for spec in workload.files():
        near = 0 if spec.format in ("raw", "dcp") else 100 if spec.format == "safetensors" else 2500
        assert abs(replayed[spec.path] - stored[spec.path]) <= near, spec.path
        if spec.format == "safetensors":
            found = load_file(at / spec.path)
            listed = {one.name: (one.dtype, one.shape) for one in spec.tensors}
            assert listed == {
                key: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
                for key, value in found.items()
            }
    plain = _written(at, tmp_path / "mine.yaml")
    assert plain.files() == workload.files()
    neutral = _written(at, tmp_path / "neutral.yaml", anonymous=True)
    assert plain.fingerprint == neutral.fingerprint == workload.fingerprint != ""
    assert [*_replayed(neutral).values()] == [*replayed.values()]
    text = (tmp_path / "neutral.yaml").read_text()
    words = {word for path in stored for word in re.split(r"[/.]", path)}
    names = {t.name for spec in workload.files() for t in spec.tensors if spec.format != "raw"}
    own = {"safetensors", "torch", "dcp", "distcp", "tensor", "tensors", "bin"}
    assert [one for one in {name, *words, *names} - own if len(one) > 2 and one in text] == []


def test_the_tensors_of_each_format(corpus) -> None:
    """They are known in torch files and DCP too, each once; a view takes no bytes."""
    for name in ("torch", "torch-object", "dcp", "dcp-files", "megatron", "torch-stream"):
        files = load_workload(str(corpus(name))).files()
        found = sorted((t.dtype, t.shape) for f in files if f.format != "raw" for t in f.tensors)
        assert found == [
            ("bfloat16", (96, 64)),
            ("float16", (100, 64)),
            ("float32", (64,)),
            ("float32", (96, 64)),
        ], name
    (views,) = load_workload(str(corpus("torch-views") / "views.pt")).files()
    assert [one.shape for one in views.tensors] == [(64, 64)]


def test_bytes_of_no_tensor(tmp_path) -> None:
    """What a file has besides tensors is replayed: metadata, values, the rest of a storage."""
    save_file({"x": torch.ones(8)}, tmp_path / "a.safetensors", metadata={"x": "y" * 50_000})
    torch.save({"x": torch.ones(100_000)[:8], "y": b"z" * 30_000}, tmp_path / "b.pt")
    replayed = _replayed(load_workload(str(tmp_path)))
    for path, size in _stored(tmp_path).items():
        assert abs(replayed[path] - size) < 500


def _read_bytes() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def test_only_headers_are_read(tmp_path) -> None:
    """Of 48 MiB in each format less than 2 MiB are read; what tensors and JSON hold does not
    matter."""
    state = {f"layers.{n}.weight": torch.rand(2048, 2048) for n in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "config.json").write_text("x" * 4 * MIB)
    (tmp_path / "data.txt").write_bytes(bytes(4 * MIB))
    before = document_of(str(tmp_path), anonymous=False)  # modules are loaded
    began = _read_bytes()
    assert document_of(str(tmp_path), anonymous=False) == before
    assert _read_bytes() - began < 4 * MIB
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 3
    for file_name in ("model.safetensors", "model.pt", "dcp/__0_0.distcp"):
        data = bytearray((tmp_path / file_name).read_bytes())
        for tensor in state.values():
            start = data.index(tensor.numpy().tobytes()[:64])
            data[start : start + tensor.nbytes] = b"\xff" * tensor.nbytes
        (tmp_path / file_name).write_bytes(data)
    assert document_of(str(tmp_path), anonymous=False) == before


def test_what_is_refused(corpus, iobench_inside, tmp_path) -> None:
    """Nothing, no checkpoint, a damaged one: exit code 2 and one line, which names it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "readme.txt").write_text("text")
    shutil.copytree(corpus("hf-shards"), tmp_path / "damaged")
    cut(tmp_path / "damaged" / "model-00002-of-00005.safetensors", 30_000)
    for name, words in (
        ("empty", "there are no files here"),
        ("text", "neither a workload (*.yaml) nor a checkpoint"),
        ("text/readme.txt", "neither a workload (*.yaml) nor a checkpoint"),
        ("damaged", "model-00002-of-00005.safetensors"),
        ("./missing", "does not exist"),
        ("missing.yaml", "cannot be read"),
    ):
        for verb in (["run"], ["workloads", "show"], ["autotune"]):
            done = iobench_inside(*verb, name, cwd=tmp_path)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith(f"iobench {verb[0]}: ")
            assert words in done.stderr
            assert Path(name).name in done.stderr
    with pytest.raises(WorkloadFileError, match="iobench verify"):
        load_workload(str(tmp_path / "damaged"))


def _header(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.read_text().splitlines()[0])
    return found


def test_the_page(corpus, iobench_inside, tmp_path) -> None:
    """Every command of the page works. The runs of a checkpoint and of the files written from it
    have the same sizes; their records have its name and no path, and scrub removes the name."""
    shutil.copytree(corpus("hf"), tmp_path / "secret" / "checkpoint-1000")
    here = tmp_path / "secret"
    (tmp_path / "target").mkdir()
    page = (Path(__file__).parents[2] / "docs/workloads.md").read_text()
    section = page.split("## A checkpoint of your own")[1].split("\n## ")[0]
    lines = re.findall(r"^    iobench (.*)$", section, re.MULTILINE)
    assert len(lines) == 5
    records = []
    for line in [*lines, "run mine.yaml --writer buffered"]:
        words = line.split()
        if words[0] == "run":
            records.append(tmp_path / f"{len(records)}.jsonl")
            words += ["--repeat", "2", "--no-fio", "-q", "--target", str(tmp_path / "target")]
            words += ["-o", str(records[-1])]
        done = iobench_inside(*words, cwd=here)
        assert done.returncode == 0, (words, done.stderr)
    headers = [_header(one) for one in records]
    assert [one["workload"]["name"] for one in headers] == ["checkpoint-1000", "anonymous", "mine"]
    assert len({one["workload"]["fingerprint"] for one in headers}) == 1
    sizes = [[file["bytes"] for file in one["plan"]["files"]] for one in headers]
    assert sizes[0] == sizes[1] == sizes[2] == [*map(int, sizes[0])]
    assert sorted(sizes[0]) == sorted(_stored(here / "checkpoint-1000").values())
    assert "secret" not in str({**headers[0], "command": "", "environment": ""})
    done = iobench_inside("results", "scrub", records[0], "-o", tmp_path / "copy.jsonl")
    assert done.returncode == 0, done.stderr
    copy = (tmp_path / "copy.jsonl").read_text()
    assert "checkpoint-1000" not in copy
    assert "tokenizer" not in copy
    assert _header(tmp_path / "copy.jsonl")["workload"]["name"] == "workload"


def test_part_of_it_and_ranks(corpus, iobench_inside, tmp_path) -> None:
    """--size drops tensors; processes each save all files; --serializer writes another format."""
    shutil.copytree(corpus("hf-bf16"), tmp_path / "mine")
    more = {"fp8": torch.ones(64).to(torch.float8_e4m3fn), "large": torch.ones(MIB)}
    save_file(more, tmp_path / "mine" / "more.safetensors")
    options = ["--writer", "buffered", "--repeat", "2", "--no-fio", "-o", tmp_path / "record.jsonl"]
    done = iobench_inside(
        *["run", "mine", "--size", "150KiB", "--numjobs", "1,2", "--serializer", "same,dcp,torch"],
        *options,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    facts = _header(tmp_path / "record.jsonl")["workload"]
    assert facts["scale"].endswith("of 41 tensors")
    assert facts["bytes"] <= 150 * 1024 < facts["full_bytes"]
    small = ["--model-params", "100000", "--steps", "4", "--every", "2", "--repeat", "1"]
    train = [*small, "--size", "full", "--mode", "sync"]
    done = iobench_inside("train", "mine", *train, *options[:2], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    planned = ["plan", "mine", "--results", tmp_path / "record.jsonl", "--nodes", "1"]
    done = iobench_inside(*planned, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_in_a_bucket(server, corpus) -> None:
    """A checkpoint in a bucket has the name and the files of its prefix."""
    import iobench

    with server.active():
        writer = iobench.load_writer("s3")
        for file in sorted(corpus("hf-shards").iterdir()):
            image = iobench.FileImage.of(file.name, [file.read_bytes()])
            writer.write(image, f"{server.target}/run/hf-shards")
        found = load_workload(f"{server.target}/run/hf-shards")
    assert (found.name, found.files()) == (
        "hf-shards",
        load_workload(str(corpus("hf-shards"))).files(),
    )
