"""The workloads that ship, and that finding them costs little."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from iobench import workloads
from iobench.errors import UnknownNameError

_REQUIRED = [
    "llama7b",
    "llama7b-zero1",
    "llama7b-zero3",
    "llama7b-fsdp",
    "llama7b-fsdp-model",
    "llama7b-export",
    "llama2-7b",
    "llama2-7b-meta",
    "llama2-13b",
    "llama2-13b-meta",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-405b",
    "mixtral-8x7b",
    "mixtral-8x7b-megatron",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt2-xl",
    "bloom-3b",
    "gpt5b-nemo",
    "gpt5b-nemo-dist",
    "gpt5b-hf",
    "gpt3-175b",
    "synthetic-1t",
    "synthetic-1t-dist",
    "mlperf-8b",
    "mlperf-70b",
    "mlperf-405b",
    "mlperf-1t",
]


def test_the_workloads_that_ship() -> None:
    """All promised workloads load under their names, with a description, and nothing else ships."""
    assert workloads.names() == sorted(_REQUIRED)
    assert [workload.name for workload in workloads.catalogue()] == workloads.names()
    assert all(workload.description for workload in workloads.catalogue())


def test_descriptions_are_json() -> None:
    """`describe` of a scaled workload is plain JSON and says what the workload is made of."""
    described = workloads.load("gpt5b-nemo").scaled(2**33).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["model"]["arch"]["hidden_size"] == 4096  # type: ignore[index]
    assert described["layout"]["data_parallel"] == 8  # type: ignore[index]
    assert described["scale"] == "3 of 24 layers, no embedding"


def test_an_unknown_name_lists_the_known_and_suggests_the_nearest() -> None:
    """A slip of the pen is answered with the name that was meant."""
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama7b'.*synthetic-1t-dist"):
        workloads.load("lama7b")
    with pytest.raises(UnknownNameError, match="unknown model"):
        workloads.load_model("lama-7b")


def test_importing_loads_neither_torch_nor_pydantic() -> None:
    """`import iobench.workloads` and listing names leave the heavy packages alone."""
    code = (
        "import sys, iobench.workloads as w; w.names();"
        "print([m for m in ('torch', 'pydantic', 'yaml', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
