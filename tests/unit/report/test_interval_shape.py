"""All documents write an interval alike: a field with `ci95` in its name, null or [low, high]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from iobench.cli.verbs import app_of

_RECORDS = "results/reference-"


@pytest.mark.parametrize(
    ("command", "schema", "names"),
    [
        (f"show {_RECORDS}llama7b.jsonl", "report/1", {"ci95_bytes_per_s", "ratio_ci95"}),
        (
            f"compare --force {_RECORDS}aa-llama7b.jsonl {_RECORDS}llama7b.jsonl",
            "compare/3",
            {"ci95"},
        ),
        (f"show {_RECORDS}train-gpt5b-nemo.jsonl", "train/2", {"stall_s_ci95", "overhead_ci95"}),
        (f"show {_RECORDS}autotune-llama7b.jsonl", "tuning/1", {"loss_ci95", "ratio_ci95"}),
        (
            f"reproduce async --results {_RECORDS}async-gpt5b-nemo.jsonl",
            "findings/4",
            {"ci95"},
        ),
        (
            f"plan llama3.1-405b --results {_RECORDS}llama7b.jsonl --nodes 64",
            "plan/2",
            {"interval_s_ci95", "ettr_ci95", "wall_s_ci95", "gpu_hours_ci95"},
        ),
    ],
)
def test_every_document_has_one_shape(command: str, schema: str, names: set[str]) -> None:
    words = command.split()
    answer = CliRunner().invoke(app_of(words[0]), [*words, "--format", "json"])
    assert answer.exception is None, answer.output
    document = json.loads(answer.stdout)
    assert document["schema"] == f"iobench.{schema}"
    found = dict(_intervals(document))
    assert found.keys() == names
    assert all(found.values()), "no interval of a name"


def _intervals(value: Any) -> Iterator[tuple[str, bool]]:
    """Yield each field of an interval, and whether one was seen; AssertionError for a pair of
    named ends."""
    seen: dict[str, bool] = {}
    objects = [value]
    while objects:
        one = objects.pop()
        if isinstance(one, list):
            objects += one
        if not isinstance(one, dict):
            continue
        assert not one.keys() & {"low", "high"}
        for name, part in one.items():
            if "ci95" in name and part is not None:
                low, high = part
                assert low <= high
            if "ci95" in name:
                seen[name] = seen.get(name, False) or part is not None
            objects.append(part)
    yield from seen.items()
