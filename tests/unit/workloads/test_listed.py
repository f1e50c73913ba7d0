"""Workloads whose files are listed: the YAML, its one-line errors, and scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import workloads
from iobench.errors import UsageError, WorkloadFileError
from iobench.units import KIB, MIB
from iobench.verification.imported import is_path, load_workload
from iobench.workloads.listed import ListedWorkload, line_of
from iobench.workloads.schema import write_yaml
from iobench.workloads.specs import TensorSpec

_FILE = "schema: iobench.workload/1\nfiles:\n"
_TENSORS = "- {path: a/m.pt, format: torch, tensors: float32 8x4 x}\n"


def test_a_list_of_files(write: Callable[[str], Path]) -> None:
    """Each format has its size: raw and DCP to the byte, safetensors with its header."""
    workload = workloads.load(
        write(
            f"{_FILE}- {{path: config.json, size_bytes: 5}}\n{_TENSORS}"
            "- path: d.distcp\n  format: dcp\n  size_bytes: 3000\n  tensors: bfloat16 2x3 w\n"
            "- path: m.safetensors\n  format: safetensors\n"
            '  tensors: |\n    int64 - "a b "\n    float8_e4m3fn 16 c d\n'
        )
    )
    raw, torch, dcp, safetensors = workload.files()
    assert (raw.size_bytes, raw.exact, dcp.size_bytes, dcp.payload_bytes) == (5, True, 3000, 12)
    assert torch.tensors == (TensorSpec(name="x", dtype="float32", shape=(8, 4)),)
    assert [(one.name, one.shape) for one in safetensors.tensors] == [("a b ", ()), ("c d", (16,))]
    assert safetensors.size_bytes % 8 == 0
    assert workload.world_size == 1
    with pytest.raises(UsageError, match="no rank 1"):
        workload.files(1)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("- {path: /etc/passwd, size_bytes: 1}", "must be below the checkpoint"),
        ("- {path: a/../../b, size_bytes: 1}", "must be below the checkpoint"),
        ("- {path: manifest.json, size_bytes: 1}", "not manifest.json"),
        (f"{_TENSORS}- {{path: a/m.pt, size_bytes: 1}}", "of another file"),
        (f"{_TENSORS}- {{path: a, size_bytes: 1}}", "directory with files"),
        (f"{_TENSORS}- {{path: a/m.pt/b, size_bytes: 1}}", "of another file"),
        ("- {path: a}", "'size_bytes' is that of a raw"),
        ("- {path: a, size_bytes: -1}", "must be greater than or equal to 0"),
        ("- {path: a, size_bytes: 9, tensors: int8 1 x}", "a raw file has none"),
        ("- {path: a, format: torch}", "has a line for each"),
        ("- {path: a, format: torch, size_bytes: 9, tensors: int8 1 x}", "others have none"),
        ("- {path: a, format: dcp, size_bytes: 9, tensors: int8 99 x}", "less than the tensors"),
        ("- {path: a, format: torch, tensors: int8 1}", "must be DTYPE SHAPE NAME"),
        ("- {path: a, format: torch, tensors: int9 1 x}", "dtype 'int9' is unknown"),
        ('- {path: a, format: torch, tensors: "int8 1 x\\nint8 1 x"}', "the same name"),
        ('- {path: a, format: torch, tensors: "int8 1 x\\nint8 1 x/y"}', "nested dicts"),
        ("- {path: a, format: torch, tensors: int8 1 x/007}", "nested dicts"),
        ("- {path: a, format: torch, tensors: int8 1 x/²}", "nested dicts"),
        (f"- {{path: a, format: torch, tensors: int8 {'9' * 15}x{'9' * 15} x}}", "bytes"),
        ("- {path: a, format: safetensors, tensors: complex128 1 x}", "cannot hold"),
        ("- {path: a, format: nope}", "must be 'safetensors', 'torch', 'dcp' or 'raw'"),
        ("- {path: a, sizes: 3}", "known here: path, format, size_bytes, tensors"),
        (" []", "should have at least 1 item"),
        (f"{_TENSORS}model: llama-7b", "field 'model': leave it out"),
    ],
)
def test_a_wrong_list_is_answered_in_one_line(
    files: str, words: str, write: Callable[[str], Path]
) -> None:
    with pytest.raises(WorkloadFileError) as caught:
        workloads.load(write(_FILE + files))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_layout(write: Callable[[str], Path]) -> None:
    for field, text in (("layout", "model: llama-7b"), ("model", "layout: {id: hf-export}")):
        with pytest.raises(WorkloadFileError, match=f"field '{field}' is missing"):
            workloads.load(write(f"schema: iobench.workload/1\n{text}"))


@given(st.text(min_size=1))
def test_any_name_of_a_tensor(name: str) -> None:
    """It survives the file, whatever its characters are."""
    from iobench.workloads.catalogue import built
    from iobench.workloads.schema import _Loader, yaml

    line = line_of(TensorSpec(name=name, dtype="int8", shape=(3,)))
    files = [{"path": "a", "format": "dcp", "size_bytes": 3, "tensors": line}]
    text = write_yaml({"schema": "iobench.workload/1", "files": files})
    again = built(yaml.load(text, Loader=_Loader), Path("x.yaml"), "x")
    assert [one.name for one in again.files()[0].tensors] == [name]


def _large() -> ListedWorkload:
    sizes = [MIB, 300 * KIB, 64] * 40
    tensors = tuple(
        TensorSpec(name=f"layers.{n}", dtype="uint8", shape=(size,)) for n, size in enumerate(sizes)
    )
    from iobench.workloads.listed import file_of

    return ListedWorkload.of(
        [
            file_of("config.json", "raw", (), 700),
            file_of("model.safetensors", "safetensors", tensors, 0),
            file_of("optimizer.pt", "torch", tensors, 0),
            file_of("d.distcp", "dcp", tensors, sum(sizes) + 120 * 1577),
        ],
        name="large",
        description="",
    )


@given(st.integers(1 * MIB, 150 * MIB))
def test_scaling_keeps_whole_tensors(limit: int) -> None:
    """Within the limit and near it; small raw files stay, and tensors come from every file."""
    full = _large()
    scaled = full.scaled(limit)
    assert limit >= scaled.size_bytes() >= 0.75 * min(limit, full.size_bytes())
    assert scaled.fingerprint == full.fingerprint
    assert scaled.files()[0].path == "config.json"
    of_path = {spec.path: {t.name for t in spec.tensors} for spec in full.files()}
    for spec in scaled.files():
        assert {t.name for t in spec.tensors} <= of_path[spec.path]
    kept = sum(len(spec.tensors) for spec in scaled.files()) - 1
    if scaled is not full:
        assert scaled.scale is not None
        assert scaled.scale.text == f"{kept} of 360 tensors"
    if limit > 8 * MIB:
        assert len(scaled.files()) == 4


def test_nothing_fits() -> None:
    with pytest.raises(UsageError, match="the smallest is"):
        _large().scaled(700)


def test_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path has a slash, ends in .yaml or exists; a name of the catalogue stays a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama7b", "mine"):
        (tmp_path / name).mkdir()
    assert [is_path(one) for one in ("./llama7b", "a.yaml", "mine", "x/y")] == [True] * 4
    assert [is_path(one) for one in ("llama7b", "nope")] == [False] * 2
    assert load_workload("llama7b").files() == workloads.load("llama7b").files()
    with pytest.raises(UsageError, match="mine: there are no files here"):
        load_workload("mine")
