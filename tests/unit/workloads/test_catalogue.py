"""The shipped workloads."""

from __future__ import annotations

import pytest

from iobench import workloads
from iobench.errors import UnknownNameError

_REQUIRED = [
    *("llama7b", "llama7b-zero1", "llama7b-zero3", "llama7b-fsdp", "llama7b-fsdp-model"),
    *("llama7b-export", "llama2-7b", "llama2-7b-meta", "llama2-13b", "llama2-13b-meta"),
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


def test_an_unknown_name_suggests_the_nearest() -> None:
    """A typing error gets the nearest name as an answer."""
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama7b'\?$"):
        workloads.load("lama7b")
    with pytest.raises(UnknownNameError, match="unknown model"):
        workloads.load_model("lama-7b")
