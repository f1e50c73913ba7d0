"""iobench export: the same tensors, from and to any format, as stock programs read them."""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.captured import captured
from support.s3_servers import put_tree
from support.torchrun import torchrun
from torch.distributed import checkpoint as dcp

import iobench
from iobench.errors import DataMismatchError, TargetError, UsageError
from tests.support import rank_states
from tests.support.rank_commands import job_number

SCRIPTS = Path(__file__).with_name("scripts")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch without a process group


def _model() -> dict[str, torch.Tensor]:
    """Tensors of all kinds: tied, also transposed, a part of another one, every second element."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=made)
    half = torch.randn(64, 64, generator=made).bfloat16()
    return {
        "embed.weight": weight,
        "half.weight": half,
        "head.weight": weight,
        "flipped": half.t(),
        "part": weight[:10],
        "turned": torch.randn(50, 30, generator=made).t(),
        "second": torch.arange(100.0)[::2],
        "count": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(4, dtype=torch.complex64, generator=made),
    }


_PLAIN = {"step": 7, "optimizer": {"state": [{"m": torch.arange(9.0)}], "lr": [0.1, 0.2]}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, of which the newest one has `_model`."""
    with iobench.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save({"model": {"other": torch.ones(2)}}, 3)
        checkpointer.save({"model": _model(), **_PLAIN}, 5)
    return tmp_path / "run"


def _same(found: dict[str, Any], expected: dict[str, torch.Tensor], ties: Any = ()) -> None:
    """All tensors are equal by bits, under their names or those that they are tied to."""
    assert found.keys() == expected.keys() - set(ties)
    for name, tensor in expected.items():
        one = found[dict(ties).get(name, name)]
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(one, tensor), name


def test_to_safetensors(run, tmp_path) -> None:
    """Of the newest step: stock safetensors reads it, tied tensors are stored once, and the source
    was compared with its checksums."""
    out = tmp_path / "out"
    report = iobench.export(run, out, key="model")
    assert [one.name for one in out.iterdir()] == ["model.safetensors"]
    assert report.ties == {"head.weight": "embed.weight"}
    _same(load_file(out / "model.safetensors"), _model(), report.ties)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert report.source == str(run / "step-5")
    assert 0 < report.proved_bytes == report.source_bytes
    assert report.verified_bytes == report.size_bytes
    assert iobench.export(run, tmp_path / "all").left_out == ("optimizer.lr", "step")


def test_shards(run, tmp_path) -> None:
    """As huggingface_hub splits them, with the index that transformers writes."""
    from huggingface_hub import split_torch_state_dict_into_shards

    out = tmp_path / "out"
    report = iobench.export(run, out, key="model", max_shard_size="100KB")
    model = {name: tensor for name, tensor in _model().items() if name not in report.ties}
    model = {name: tensor.contiguous().clone() for name, tensor in model.items()}
    stock = split_torch_state_dict_into_shards(model, max_shard_size="100KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: file.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for name, file in stock.tensor_to_filename.items()
    }
    assert index["metadata"]["total_size"] == stock.metadata["total_size"]
    assert sorted(index["weight_map"].values())[-1] == report.files[-1]
    found: dict[str, Any] = {}
    for file in report.files:
        found |= load_file(out / file)
    _same(found, _model(), report.ties)
    assert iobench.verify(out).ok


def test_to_torch(run, tmp_path) -> None:
    """The state as the trainer has saved it, with its plain values, in a whole zip."""
    report = iobench.export(run, tmp_path / "model.pt", format="torch")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    _same(state["model"], _model())
    tied = state["model"]["head.weight"]
    assert tied.data_ptr() == state["model"]["embed.weight"].data_ptr()
    assert (state["step"], state["optimizer"]["lr"]) == (7, [0.1, 0.2])
    assert torch.equal(state["optimizer"]["state"][0]["m"], torch.arange(9.0))
    assert (report.left_out, report.files) == ((), ("model.pt",))
    assert iobench.verify(tmp_path / "model.pt").findings == ()
    iobench.export(run, tmp_path / "part.pt", format="torch", key="optimizer")
    assert torch.load(tmp_path / "part.pt")["lr"] == [0.1, 0.2]


def test_to_dcp(run, tmp_path) -> None:
    """Stock `dcp.load` reads it, also the plain values; and it is whole."""
    out = tmp_path / "out"
    report = iobench.export(run, out, format="dcp", max_shard_size="100KB")
    assert report.files == ("__0_0.distcp", "__1_0.distcp")
    state = {
        "model": {name: torch.empty_like(tensor) for name, tensor in _model().items()},
        "step": 0,
        "optimizer": {"state": [{"m": torch.empty(9)}], "lr": [0.0, 0.0]},
    }
    dcp.load(state, checkpoint_id=str(out))
    _same(state["model"], _model())
    assert (state["step"], state["optimizer"]["lr"]) == (7, [0.1, 0.2])
    assert iobench.verify(out).findings == ()


@pytest.mark.parametrize("kind", ["dcp", "torch", "shards", "file"])
def test_from_others(kind: str, run, tmp_path) -> None:
    """DCP and torch files that stock torch has written, a Hugging Face directory, one file."""
    source, key = tmp_path / kind, "model"
    if kind == "dcp":
        dcp.save({"model": _model(), "step": 7}, checkpoint_id=str(source))
    elif kind == "torch":
        source = tmp_path / "stock.pt"
        torch.save({"model": _model(), "step": 7}, source)
    elif kind == "shards":
        iobench.export(run, source, key="model", max_shard_size="100KB")
        key = ""
    else:
        source, key = tmp_path / "one.safetensors", ""
        save_file({n: t.contiguous().clone() for n, t in _model().items()}, source)
    report = iobench.export(source, tmp_path / "out", key=key, memory="128MiB")
    expected = _model()
    if kind == "shards":
        expected.pop("head.weight")  # safetensors has no ties
    _same(load_file(tmp_path / "out/model.safetensors"), expected, report.ties)
    assert bool(report.ties) == (kind == "torch")


@pytest.mark.parametrize("layout", ["rows", "columns", "mixed"])
def test_from_three_ranks(ranks, tmp_path, layout: str) -> None:
    """Shards of all ranks become whole tensors, in each format; so do tied ones."""
    ranks.call(rank_states.save, str(tmp_path / "run"), 1, layout, world=3)
    expected = rank_states.full()
    report = iobench.export(tmp_path / "run", tmp_path / "out", key="model")
    _same(
        load_file(tmp_path / "out/model.safetensors"),
        {**expected, "tied": expected["w0"]},
        report.ties,
    )
    assert report.proved_bytes == report.source_bytes
    iobench.export(tmp_path / "run", tmp_path / "out.pt", format="torch")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    _same(state["model"], {**expected, "tied": expected["w0"]})
    assert state["epoch"] == 5
    assert state["optimizer"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]
    assert [state["rng"][f"rank{rank}"]["python"] for rank in range(3)] == [
        (rank, [1, 2]) for rank in range(3)
    ]
    iobench.export(tmp_path / "run", tmp_path / "dcp", format="dcp")
    assert iobench.verify(tmp_path / "dcp").findings == ()
    empty = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load({"model": empty}, checkpoint_id=str(tmp_path / "dcp"))
    _same(empty, expected)


def test_dtype_and_prefix(tmp_path) -> None:
    """Floats are converted as torch does it; integers, float8 and other names stay."""
    made = torch.Generator().manual_seed(1)
    tensors = {
        "module.a": torch.randn(100, 33, generator=made),
        "module.b": torch.randn(7, generator=made).double(),
        "c": torch.arange(5),
        "d": torch.ones(4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "one.safetensors")
    for short, kind in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float32", torch.float32),
    ):
        out = tmp_path / short
        iobench.export(tmp_path / "one.safetensors", out, dtype=short, strip_prefix="module.")
        expected = {"a": tensors["module.a"].to(kind), "b": tensors["module.b"].to(kind)}
        found = load_file(out / "model.safetensors")
        rest = {"c": tensors["c"], "d": tensors["d"].view(torch.uint8)}
        found["d"] = found["d"].view(torch.uint8)
        _same(found, {**expected, **rest})
    save_file({"x": torch.tensor([1.0, 1e5])}, tmp_path / "large.safetensors")
    with pytest.raises(UsageError, match="x: has values too large for fp16"):
        iobench.export(tmp_path / "large.safetensors", tmp_path / "no", dtype="fp16")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_it(tmp_path, tied: bool) -> None:
    """The model that a trainer has saved answers as before, after from_pretrained."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with iobench.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save({"model": model.state_dict(), "step": 1}, 1)
    out = tmp_path / "out"
    report = iobench.export(tmp_path / "run", out, key="model", max_shard_size="150KB")
    assert len(report.files) > 2
    assert report.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    config.save_pretrained(out)
    found, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading[one] for one in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(20).reshape(1, 20)
    assert torch.equal(found.eval()(tokens).logits, model(tokens).logits)
    assert iobench.verify(out).ok


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        name: [
            str(one.dtype),
            list(one.shape),
            hashlib.sha256(one.contiguous().view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, one in tensors.items()
    }


def test_vllm_reads_it(tmp_path) -> None:
    """vLLM's default loader yields the tensors of all shards, bit for bit; under `iobench exec`
    by the writer."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: its wheels need another torch (docs/export.md)")
    made = torch.Generator().manual_seed(2)
    model = {
        f"model.layers.{number}.{name}.weight": torch.randn(64, 48, generator=made).to(dtype)
        for number in range(6)
        for name, dtype in (("q_proj", torch.bfloat16), ("norm", torch.float32))
    }
    with iobench.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save({"model": model | {"tied": model["model.layers.0.norm.weight"]}}, 1)
    out = tmp_path / "out"
    report = iobench.export(tmp_path / "run", out, key="model", max_shard_size="20KB")
    assert len(report.files) > 2
    program = [sys.executable, SCRIPTS / "vllm_weights.py", out]
    told = tmp_path / "told.json"
    exec_ = [*("-m", "iobench", "exec", "--config", "odirect", "--report", told, "--")]
    for command in (program, [sys.executable, *exec_, *program]):
        done = captured(command, timeout=200, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        (line,) = re.findall(r"^weights (.*)$", done.stdout, re.MULTILINE)
        assert json.loads(line) == _digests(model)
    counts = json.loads(told.read_text())["functions"]["safetensors.safe_open"]
    assert counts["redirected"]["calls"] == len(report.files)
    assert counts["redirected"]["bytes"] >= sum(one.nbytes for one in model.values())
    assert counts["stock"] == {}


# What is refused, and what stays.


def test_an_older_export_is_replaced(run, tmp_path) -> None:
    """Only with `replace`; config.json stays, old shards do not. Nothing else is replaced."""
    out = tmp_path / "out"
    iobench.export(run, out, key="model", max_shard_size="100KB")
    (out / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="exists"):
        iobench.export(run, out, key="model")
    iobench.export(run, out, key="model", replace=True)
    assert sorted(one.name for one in out.iterdir()) == ["config.json", "model.safetensors"]
    (out / "more").mkdir()
    for other in (out, tmp_path, run, run / "step-5"):
        with pytest.raises(TargetError, match="is not a directory of an export alone"):
            iobench.export(run, other, key="model", replace=True)
    (tmp_path / "empty").mkdir()
    iobench.export(run, tmp_path / "empty", key="model")
    (tmp_path / "file.pt").write_bytes(b"old")
    iobench.export(run, tmp_path / "file.pt", format="torch", replace=True)
    assert iobench.verify(tmp_path / "file.pt").ok
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_appears_meanwhile_is_not_replaced(kind: Any, run, tmp_path) -> None:
    """Another program takes the name while the tensors are written: its file stays."""
    out = tmp_path / "out.pt"

    def taken(_done: int, _total: int) -> None:
        if kind == "dcp":
            out.mkdir(exist_ok=True)
        (out / "theirs" if kind == "dcp" else out).write_text("theirs")

    with pytest.raises(TargetError, match="exists"):
        iobench.export(run, out, key="model", format=kind, progress=taken)
    assert (out / "theirs" if kind == "dcp" else out).read_text() == "theirs"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.pt", "run"]


def test_damage_is_not_exported(run, tmp_path) -> None:
    """A flipped bit of the source is found by its checksum; what was written is removed."""
    file = run / "step-5/tensors.safetensors"
    data = bytearray(file.read_bytes())
    at = data.index(_model()["half.weight"].view(torch.uint8).numpy().tobytes()[:32])
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataMismatchError, match=r"the checksum of model\.half\.weight differs"):
        iobench.export(run, tmp_path / "out", key="model")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


def test_what_is_written_is_read_again(run, tmp_path, monkeypatch) -> None:
    """A byte that the file system has changed."""
    from iobench.exports.export import Export

    original = Export._read_again

    def flipped(self: Export, path: str, ranges: Any) -> None:
        with open(path, "r+b") as file:
            file.seek(-5, 2)
            (byte,) = file.read(1)
            file.seek(-5, 2)
            file.write(bytes([byte ^ 1]))
        original(self, path, ranges)

    monkeypatch.setattr(Export, "_read_again", flipped)
    with pytest.raises(DataMismatchError, match="was not stored as written"):
        iobench.export(run, tmp_path / "out", key="model")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]
    iobench.export(run, tmp_path / "out", key="model", verify=False)


def test_the_command(run, tmp_path, iobench_inside) -> None:
    """What it prints, JSON, and one line with exit code 2 or 4 for each error."""
    done = iobench_inside("export", run, "-o", tmp_path / "out", "--key", "model")
    assert (done.returncode, done.stderr) == (0, "")
    assert "9 tensors in 1 file" in done.stdout
    assert "tied     head.weight is stored as embed.weight" in done.stdout
    done = iobench_inside("export", run, "-o", tmp_path / "b.pt", "--format", "torch")
    assert done.stdout.startswith(f"{tmp_path / 'b.pt'}: ")
    (tmp_path / "text").write_text("text")
    for words, message in {
        (run, "--key", "modle"): "there are no tensors below it; there is model, optimizer",
        (run, "--key", "model", "--strip-prefix", "x."): "no name begins with it",
        (run, "--dtype", "int8"): "choose bf16, fp16 or fp32",
        (run, "--memory", "1MiB"): "128MiB or more",
        (run, "--writer", "null"): "stores nothing",
        (run, "--writer", "nope"): "nope",
        (tmp_path / "missing",): "does not exist",
        (tmp_path / "text",): "no tensors here",
    }.items():
        done = iobench_inside("export", *words, "-o", tmp_path / "new")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "new").exists()
    for target, message in ((tmp_path / "out", "exists"), ("s3://bucket/x", "copy it")):
        done = iobench_inside("export", run, "-o", target)
        assert (done.returncode, message in done.stderr) == (2, True)
    (run / "step-5/tensors.safetensors").unlink()
    done = iobench_inside("export", run, "-o", tmp_path / "new")
    assert (done.returncode, "is missing" in done.stderr) == (4, True)


def test_two_ranks(run, tmp_path, iobench_inside) -> None:
    """Under torchrun each writes some files; the result is that of one process, byte by byte."""
    options = ["--key", "model", "--max-shard-size", "100KB"]
    alone = iobench_inside("export", run, "-o", tmp_path / "alone", *options)
    assert alone.returncode == 0, alone.stderr
    start = ["--nnodes", "1", "--nproc-per-node", "2", "--master-port", job_number()]
    done = torchrun(
        [*start, "-m", "iobench", "export", run, "-o", tmp_path / "both", *options], timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("9 tensors in 2 files") == 1
    names = [[one.name for one in sorted((tmp_path / n).iterdir())] for n in ("alone", "both")]
    assert names[0] == names[1]
    for name in names[0]:
        both = [(tmp_path / one / name).read_bytes() for one in ("alone", "both")]
        assert both[0] == both[1]
    assert not list(tmp_path.glob(".*"))
    done = torchrun(
        [*start, "-m", "iobench", "export", run, "-o", tmp_path / "both", *options], timeout=120
    )
    assert done.returncode != 0
    assert "exists" in done.stderr


def test_from_a_bucket(server, run, tmp_path) -> None:
    """The newest step of a run in a bucket, also one that was saved again under another prefix."""
    with server.active():
        put_tree(run, f"{server.target}/run")
        report = iobench.export(f"{server.target}/run", tmp_path / "out", key="model")
        assert report.source.endswith("run/step-5")
        _same(load_file(tmp_path / "out/model.safetensors"), _model(), report.ties)
        with iobench.Checkpointer(f"{server.target}/run", writer="s3") as checkpointer:
            checkpointer.load(3)  # the trainer goes back, and saves step 5 again
            checkpointer.save({"w": torch.ones(3)}, 5)
        report = iobench.export(f"{server.target}/run", tmp_path / "again")
        assert report.source.endswith("run/step-5.1")
        assert load_file(tmp_path / "again/model.safetensors").keys() == {"w"}


# In the background of a trainer.


def test_a_checkpointer_exports(tmp_path) -> None:
    """After the save is committed; retention keeps the step until it is exported."""
    out = tmp_path / "out"
    with iobench.Checkpointer(tmp_path / "run", keep=iobench.KeepLast(1)) as checkpointer:
        checkpointer.save_async({"model": _model()}, 1)
        checkpointer.export(1, out / "1", key="model")
        checkpointer.save({"model": _model()}, 2)
        checkpointer.export(2, out / "2.pt", format="torch")
    _same(load_file(out / "1/model.safetensors"), _model(), {"head.weight": "embed.weight"})
    _same(torch.load(out / "2.pt")["model"], _model())


def test_retention_waits(tmp_path) -> None:
    """A step that is being exported is not removed; the save after that removes it."""
    with iobench.Checkpointer(tmp_path, keep=iobench.KeepLast(1)) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, 1)
        ledger = checkpointer._saving.ledger
        ledger.hold(1)
        checkpointer.save({"w": torch.ones(3)}, 2)
        assert checkpointer.steps() == [1, 2]
        ledger.release(1)
        checkpointer.save({"w": torch.ones(3)}, 3)
        assert checkpointer.steps() == [3]


def test_an_export_that_fails(tmp_path) -> None:
    """The trainer gets the error in a later call, and goes on to save."""
    checkpointer = iobench.Checkpointer(tmp_path / "run")
    checkpointer.save({"w": torch.ones(3)}, 1)
    checkpointer.export(1, tmp_path / "out", key="nope")
    checkpointer._exports.finish()
    with pytest.raises(UsageError, match="nope") as failed:
        checkpointer.save({"w": torch.ones(3)}, 2)
    assert "while step 1 was exported" in failed.value.__notes__[-1]
    checkpointer.save({"w": torch.ones(3)}, 2)
    checkpointer.export(9, tmp_path / "out")
    with pytest.raises(TargetError, match="step-9: does not exist"):
        checkpointer.close()
    assert not (tmp_path / "out").exists()


def test_the_page(run, tmp_path, iobench_inside, server) -> None:
    """Every command and every block of docs/export.md works, on checkpoints of these names."""
    here = tmp_path / "here"
    shutil.copytree(run, here / "runs/a")
    dcp.save({"model": _model(), "step": 7}, checkpoint_id=str(here / "checkpoints/dcp"))
    iobench.export(run, here / "Llama-3.1-8B", key="model")
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    lines = re.findall(r"^    ((?:iobench|torchrun) .*)", page, re.MULTILINE)
    assert len(lines) >= 6
    with server.active(), contextlib.chdir(here):
        put_tree(run, f"{server.target}/runs/a")
        for line in lines:
            program, *words = line.split("#")[0].replace("s3://bucket", server.target).split()
            if program == "torchrun":
                done = torchrun(["--master-port", job_number(), *words], timeout=120)
            else:
                done = iobench_inside(*words, cwd=here)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        model = torch.nn.Linear(4, 4)
        with contextlib.chdir(here):
            exec(block, {"model": model, "iobench": iobench})
