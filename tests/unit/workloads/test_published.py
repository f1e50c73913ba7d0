"""The shipped workloads, and their figures against those in print: published.yaml says which and
from where."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from iobench import workloads
from iobench.units import GIB, parse_size
from iobench.workloads.catalogue import model_names

PUBLISHED = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
_NO_FIGURES = {"gpt-5b", "mlperf-storage-llama3-70b", "mlperf-storage-llama3-405b"}


@pytest.mark.parametrize("name", PUBLISHED["models"])
def test_parameters_tensors_and_largest_tensor_are_exact(name: str) -> None:
    """Every architecture has exactly the parameters and tensors that were published."""
    expected = PUBLISHED["models"][name]
    model = workloads.load_model(name)
    if "vocab_multiple" in expected:
        model = model.padded(expected["vocab_multiple"])
    tensors = list(model.parameters())
    assert model.num_parameters == expected["parameters"]
    assert sum(tensor.elements for tensor in tensors) == expected["parameters"]
    assert len(tensors) == model.num_tensors == expected["tensors"]
    assert max(tensor.elements for tensor in tensors) == expected["largest"]


def test_no_model_is_left_unchecked() -> None:
    """Every architecture that ships is in the table, or known to have no figures in it."""
    assert set(model_names()) == set(PUBLISHED["models"]) | _NO_FIGURES


@pytest.mark.parametrize("entry", PUBLISHED["layouts"], ids=lambda entry: entry["name"])
def test_layouts_reproduce_published_sizes(entry: dict[str, Any]) -> None:
    """Files, counts and bytes are those published: exactly where the format is exact."""
    workload = workloads.load(entry["workload"])
    fields = dict(entry.get("layout", {}))
    if "max_shard_size" in fields:
        fields["max_shard_size"] = parse_size(fields["max_shard_size"])
    workload = replace(workload, layout=replace(workload.layout, **fields))
    if "model" in entry:
        workload = replace(workload, model=workloads.load_model(entry["model"]))
    if "total" in entry:
        assert workload.total_size_bytes() == _within(entry["total"])
    if "files" not in entry:
        return
    classes = workload.layout.rank_classes(workload.layout.prepare(workload.model))
    ranks = (
        range(workload.world_size) if workload.world_size < 64 else [rank for rank, _ in classes]
    )
    counts = dict(classes) if workload.world_size >= 64 else dict.fromkeys(ranks, 1)
    files = [(file, counts[rank]) for rank in ranks for file in workload.files(rank)]
    for expected in entry["files"]:
        found = [(f, n) for f, n in files if re.fullmatch(expected["path"], f.path)]
        count = sum(n for _, n in found)
        assert count == expected["count"], expected["path"]
        assert sum(f.size_bytes * n for f, n in found) / count == _within(expected)


def test_sizes_in_print() -> None:
    """All fsdp-dcp files of llama7b together: rank 0's published size on 8 ranks, and 291 steps.
    782 GiB for 70B at 12 bytes (NVIDIA nvCOMP blog) and 13.8 x 1024 GB for 1T (2104.04473). DLIO's
    code of today gives 15427 GiB for the 1T model, whatever Table 2 of the guidelines prints."""
    workload = workloads.load("llama7b-fsdp")
    files = [file for rank in range(8) for file in workload.files(rank) if file.format == "dcp"]
    assert sum(file.size_bytes for file in files) == 8 * 10109000145 + 291 * 1577
    seventy = workloads.load("llama2-70b")
    per_nominal = seventy.total_size_bytes() / seventy.parameters * 70e9
    assert per_nominal / GIB == pytest.approx(782, rel=0.001)
    one_t = workloads.load("synthetic-1t")
    assert one_t.total_size_bytes() / 1024e9 == pytest.approx(13.8, rel=0.005)
    dlio = workloads.load("mlperf-1t")
    payload = sum(
        count * sum(file.payload_bytes for file in dlio.files(rank))
        for rank, count in dlio.layout.rank_classes(dlio.model)
    )
    assert payload / 2**30 == pytest.approx(15426.589264, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "published_gb"),
    [("bloom-3b", 45), ("llama-2-7b", 83), ("llama-2-13b", 166), ("llama-2-70b", 1065)],
)
def test_datastates_totals_are_of_the_same_order(name: str, published_gb: int) -> None:
    """DeepSpeed checkpoints of 3 to 70B: within 16% of DataStates-LLM's figure 3, in GiB."""
    workload = replace(workloads.load("llama7b-zero1"), model=workloads.load_model(name))
    assert workload.total_size_bytes() / GIB == pytest.approx(published_gb, rel=0.16)


@pytest.mark.parametrize("name", PUBLISHED["step_times"])
def test_step_times_are_those_published(name: str) -> None:
    """Step times and their GPUs are copied right, and say where they come from."""
    step_time = workloads.load(name).step_time
    assert step_time is not None
    expected = PUBLISHED["step_times"][name]
    assert (step_time.seconds, step_time.gpus) == (expected["seconds"], expected["gpus"])
    assert "NeMo 24.07" in step_time.source


def _within(expected: dict[str, Any]) -> Any:
    return pytest.approx(expected["bytes"], rel=expected["tolerance"], abs=0)


_REQUIRED = [
    *("llama7b", "llama7b-zero1", "llama7b-zero3", "llama7b-fsdp", "llama7b-fsdp-model"),
    *("llama7b-export", "llama2-7b", "llama2-13b"),
    *("llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-405b", "mixtral-8x7b"),
    *("mixtral-8x7b-megatron", "qwen3-30b-a3b", "deepseek-v3", "gpt2-xl", "bloom-3b"),
    *("gpt5b-nemo", "gpt5b-nemo-dist", "gpt5b-hf", "gpt3-175b"),
    *("synthetic-1t", "synthetic-1t-dist", "mlperf-8b", "mlperf-70b", "mlperf-405b", "mlperf-1t"),
]


def test_the_workloads_that_ship() -> None:
    """All promised workloads load under their names, with a description, and no others are
    shipped."""
    assert workloads.names() == sorted(_REQUIRED)
    loaded = [workloads.load(name) for name in workloads.names()]
    assert [workload.name for workload in loaded] == workloads.names()
    assert all(workload.description for workload in loaded)
