"""A user's YAML, of a model and a layout or of listed files: its valid content, the one-line error
of an invalid file, and the scaling of a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench import workloads
from iobench.errors import UsageError, WorkloadFileError
from iobench.units import KIB, MIB
from iobench.verification.imported import is_path, load_workload
from iobench.workloads.layouts import LAYOUTS
from iobench.workloads.listed import ListedWorkload, line_of
from iobench.workloads.schema import write_yaml
from iobench.workloads.specs import TensorSpec

_GOOD = """\
schema: iobench.workload/1
model: llama-7b
layout: {id: fsdp-dcp, world_size: 8}
"""
_INLINE = """\
schema: iobench.workload/1
description: A model of my own
model:
  name: tiny
  family: llama
  arch: {vocab_size: 1000, hidden_size: 64, num_layers: 2, num_heads: 4, ffn_hidden_size: 96}
layout: {id: hf-export, max_shard_size: 1MiB}
step_time: {seconds: 0.5, gpus: 1, hardware: A100, precision: BF16, source: measured by me}
"""


def test_a_file_of_ones_own(write: Callable[[str], Path]) -> None:
    """A model described in the file works with any layout; the workload is named after the file. A
    file that names a shipped model and layout equals the shipped workload."""
    workload = workloads.load(write(_INLINE))
    assert workload.name == "mine"
    assert workload.parameters == 2 * 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 96 * 64 + 2 * 64) + 64
    assert workload.layout.max_shard_size == 2**20
    assert workload.step_time is not None
    assert workload.step_time.seconds == 0.5
    assert workloads.load(write(_GOOD)).files() == workloads.load("llama7b-fsdp").files()


def test_the_guide_is_right(write: Callable[[str], Path]) -> None:
    """The example in docs/workloads.md loads, and the guide names every layout and its fields."""
    guide = (Path(__file__).parents[3] / "docs" / "workloads.md").read_text()
    examples = guide.split("```yaml\n")
    assert workloads.load(write(examples[2].split("```")[0])).files()[1].size_bytes == 638
    example = examples[1].split("```")[0]
    assert workloads.load(write(example)).world_size == 16
    words = {word.strip("`,.()") for word in guide.split()}
    for layout in LAYOUTS.values():
        assert layout.id in words or layout.id.replace("deepspeed", "") in words
        assert {field.name for field in fields(layout)} <= words


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("iobench.workload/1", "iobench.workload/9", "'schema' is 'iobench.workload/9': must be"),
        ("model: llama-7b", "model: llama-9b", "'model' is 'llama-9b': must be one of bloom-3b"),
        ("model: llama-7b", "model: 7", "'model' is 7: must be one of bloom-3b"),
        ("model: llama-7b\n", "", "field 'model' is missing"),
        ("layout: {id: fsdp-dcp, world_size: 8}", "", "field 'layout' is missing"),
        ("model: llama-7b", "modle: llama-7b", "'modle' is 'llama-7b': there is no such field"),
        ("fsdp-dcp", "fsdp", "'layout.id' is 'fsdp': must be one of hf-trainer"),
        ("world_size: 8", "world_size: 0", "'layout.world_size' is 0: must be int >= 1"),
        ("world_size: 8", "ranks: 8", "'layout.ranks' is 8: there is no such field; known here: w"),
        ("world_size: 8", "8: 8", "'layout.8' is 8: there is no such field"),
        ("{id: fsdp-dcp, world_size: 8}", "fsdp-dcp", "'layout' is 'fsdp-dcp': must be a mapping"),
        ("fsdp-dcp, world_size: 8", "hf-export, max_shard_size: 5XB", "'5XB' is not a size"),
        ("fsdp-dcp, world_size: 8", "mlperf", "cannot hold a model of family 'llama'; it holds"),
        ("layout:", "step_time: 3\nlayout:", "'step_time' is 3: must be a mapping"),
        ("world_size: 8}", "world_size: 8", "is not YAML"),
        ("model: llama-7b", "model: llama-7b\nmodel: llama-13b", "line 3, column 1: is not YAML"),
        ("model: llama-7b", "model: !!python/name:os.system", "is not YAML"),
        ("num_layers: 2", "num_layers: -2", "'model.arch.num_layers' is -2: must be int >= 1"),
        ("num_layers: 2, ", "", "field 'model.arch.num_layers' is missing"),
        ("num_layers: 2", "layers: 2", "'model.arch.layers' is 2: there is no such field; known"),
        ("num_heads: 4", "num_heads: 5", "'model.arch.num_heads' is 5: must divide hidden_size 64"),
        (
            "num_heads: 4",
            "num_heads: 4, num_kv_heads: 3",
            "'model.arch.num_kv_heads' is 3: must div",
        ),
        ("num_heads: 4", "num_heads: 4, max_positions: 3", "does not use it; remove it"),
        ("family: llama", "family: gpt2", "'model.arch.max_positions' is missing: family 'gpt2'"),
        ("family: llama", "family: opt", "'model.family' is 'opt': must be one of llama"),
        ("seconds: 0.5", "seconds: .inf", "'step_time.seconds' is inf: must be float <= 1"),
    ],
)  # fmt: skip
def test_a_broken_file_is_answered_in_one_line(
    write: Callable[[str], Path], old: str, new: str, says: str
) -> None:
    """Each mistake names the file, the field, the value and what is allowed."""
    _refused(write((_GOOD if old in _GOOD else _INLINE).replace(old, new)), says)


def test_what_is_no_mapping_is_refused(write: Callable[[str], Path], tmp_path: Path) -> None:
    """The error says what the file should hold, or that it is not YAML; a missing file, a
    directory, and bytes that are not text."""
    for text in ("", "[1, 2]", "hello", "\t", "\x00"):
        _refused(write(text), "must be a mapping with the fields schema|is not YAML")
    _refused(tmp_path / "none.yaml", "cannot be read: No such file")
    _refused(tmp_path, "cannot be read: Is a directory")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    _refused(tmp_path / "binary.yaml", "is not UTF-8 text")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_GOOD.replace("llama-7b", "&a [*a]"), "line 2, column 12: is not YAML: an alias"),
        (_GOOD + "m: &m {x: 1}\nn: {<<: *m}\n", "an alias: write the value itself"),
        (_GOOD.replace("llama-7b", "!!bool x"), "does not fit its tag"),
        (_GOOD + 'description: "\\e[2J"', "control characters"),
        (_GOOD + 'description: "\\ud800"', "control characters"),
    ],
    ids=["recursive", "merged", "tag", "escape", "surrogate"],
)
def test_a_hostile_file_is_answered_in_one_line(
    write: Callable[[str], Path], text: str, says: str
) -> None:
    """Aliases, of which a few expand to billions of values, and text with control characters."""
    _refused(write(text), says)


_WORDS = st.sampled_from(
    [
        *("model: ", "llama-7b\n", "layout: ", "{id: fsdp-dcp, ", "world_size: ", "8", "}", "\n"),
        *("[", "]", "{", ", ", ": ", "&a ", "*a", "<<: ", "- ", "  ", "? ", "|\n", "'", '"', "-"),
        *("!!int ", "!!bool ", "!!timestamp ", "!!set ", "!!omap ", "!!binary ", "%TAG ! x\n"),
        *("1e400", "0x", "_", "2001-02-30", "~", "\\e", "9" * 30, "é", "\x1b"),
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(_WORDS, max_size=8), at=st.integers(0, len(_GOOD)), cut=st.integers(0, 5))
def test_any_text(words: list[str], at: int, cut: int, write: Callable[[str], Path]) -> None:
    """It is a workload, or is refused in one line."""
    path = write(_GOOD[:at] + "".join(words) + _GOOD[at + cut :])
    try:
        workloads.load(path)
    except WorkloadFileError as error:
        message = str(error)
    else:
        return
    assert message.startswith(str(path))
    assert "\n" not in message


def test_parallelism_must_divide_the_model(write: Callable[[str], Path]) -> None:
    """Sizes that do not divide the model, or leave a stage without a layer, name both numbers. The
    product of parallel sizes is bounded too."""
    for model, layers, layout, says in (
        ("nemo-gpt-5b", 24, "megatron-legacy", "must divide num_layers"),
        ("mlperf-storage-llama3-8b", 32, "mlperf", "must be at most num_layers"),
    ):
        placed = f"{layout}, pipeline_parallel: 99"
        text = _GOOD.replace("llama-7b", model).replace("fsdp-dcp, world_size: 8", placed)
        _refused(write(text), f"pipeline_parallel is 99: {says} of {model}, which is {layers}")
    layout = "mlperf, tensor_parallel: 8, pipeline_parallel: 8, data_parallel: 100000"
    text = _GOOD.replace("fsdp-dcp, world_size: 8", layout)
    _refused(write(text), "'layout' is 6400000: at most 131072 ranks")


def _refused(path: Path, says: str) -> None:
    with pytest.raises(WorkloadFileError) as caught:
        workloads.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert any(part in message for part in says.split("|")), message
    assert "\n" not in message


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
        ("- {path: manifest.json, size_bytes: 1}", "not manifest.json"),
        (f"{_TENSORS}- {{path: a/m.pt, size_bytes: 1}}", "of another file"),
        (f"{_TENSORS}- {{path: a, size_bytes: 1}}", "directory with files"),
        (f"{_TENSORS}- {{path: a/m.pt/b, size_bytes: 1}}", "of another file"),
        ("- {path: a}", "'size_bytes' is that of a raw"),
        ("- {path: a, size_bytes: -1}", "must be int >= 0"),
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
        ("- {path: a, sizes: 3}", "known here: path, format, size_bytes, tensors"),
        (" []", "must be array of length >= 1"),
        (f"{_TENSORS}model: llama-7b", "field 'model': leave it out"),
    ],
)
def test_a_wrong_list_is_answered_in_one_line(
    files: str, words: str, write: Callable[[str], Path]
) -> None:
    _refused(write(_FILE + files), words)


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
