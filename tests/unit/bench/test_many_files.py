"""A run of many small files: the memory that each file takes. A rank may have 100,000."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.axes import Axes
from iobench.bench.data import states
from iobench.bench.planning import make_plan
from iobench.bench.ranks.group import Executor
from iobench.bench.runner import header, own_job
from iobench.bench.targets.base import OpenTarget
from iobench.bench.trial import Trial
from iobench.checkpoint.manifest import MANIFEST
from iobench.writers import file_writer
from iobench.writers.local import posix

_WORKLOAD = """\
schema: iobench.workload/1
model:
  name: many
  family: gpt2
  arch: {{vocab_size: 32, hidden_size: 16, num_layers: {layers}, num_heads: 4, ffn_hidden_size: 16,
    max_positions: 16}}
layout: {{id: hf-export}}
"""


def _run(directory: Path, idle: Any, layers: int) -> tuple[int, dict[str, int]]:
    """Return the files of a whole run, and the most bytes that each part of it takes."""
    directory.mkdir(exist_ok=True)
    workload = directory / f"{layers}.yaml"
    workload.write_text(_WORKLOAD.format(layers=layers))
    target = directory / str(layers)
    target.mkdir(parents=True)
    taken: dict[str, int] = {}

    def measured(what: str, act: Callable[[], Any]) -> Any:
        tracemalloc.reset_peak()
        done = act()
        taken[what] = tracemalloc.get_traced_memory()[1]
        return done

    tracemalloc.start()
    try:
        plan = measured(
            "plan",
            partial(
                make_plan,
                workload=str(workload),
                writers="buffered",
                target=target,
                size="full",
                repeat=1,
                ceiling=False,
                axes=Axes.parse(granularity="tensor"),
            ),
        )
        executor = measured("job", lambda: Executor(own_job(plan)))
        measured("header", partial(header, plan, executor))
        (variant,) = plan.variants
        with OpenTarget.of(plan.targets[0]) as opened:
            trial = Trial(
                run_id="0" * 16,
                repetition=0,
                order=0,
                variant=variant,
                contender=0,
                shape=0,
                files=plan.files_of_jobs[0],
                executor=executor,
                target=opened,
            )
            saved = measured("save", trial.save)
            restored = measured("restore", trial.restore)
            manifest = next(target.rglob(MANIFEST)).read_text()
            measured("clear", trial.clear)
    finally:
        tracemalloc.stop()
    listed = json.loads(manifest)["files"]
    assert [(one["path"], one["bytes"]) for one in listed] == list(
        zip(
            (spec.path for spec in plan.files),
            (spec.size_bytes for spec in plan.files),
            strict=True,
        )
    )
    assert restored.verified.mismatches == 0
    assert saved.stored.problems == restored.stored.problems == ()
    assert saved.bytes == plan.size_bytes
    return len(plan.files), taken


@pytest.mark.slow
def test_memory_of_a_run_of_many_files(
    tmp_path: Path, idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan to the removal each more takes at most 900 bytes: 86 MiB for 100,000."""
    monkeypatch.setattr(states, "_AHEAD", 8)
    monkeypatch.setattr(posix, "TOGETHER", 8)
    monkeypatch.setattr(file_writer, "TOGETHER", 8)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of no interest here, and slow
    _run(tmp_path, idle, 1)  # imports modules
    grown: dict[str, float] = {"": 900}
    for attempt in range(3):  # other threads of the process may take memory meanwhile
        if max(grown.values()) < 900:
            break
        few, at_few = _run(tmp_path / f"{attempt}", idle, 2)
        many, at_many = _run(tmp_path / f"{attempt}", idle, 42)
        assert many == few + 40 * 12
        grown = {what: (at_many[what] - at_few[what]) / (many - few) for what in at_many}
    assert max(grown.values()) < 900, grown
