"""Commands and replies between ranks: plain JSON that comes back equal, and nothing else."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.counters.monitor import Counted, Usage
from iobench.bench.processes.job import CheckpointRef, CheckpointSizes, Done, Job
from iobench.bench.ranks.steps import command_of, message_of, reply_of
from iobench.errors import JobError
from iobench.results.codec import to_plain
from iobench.results.records import DeviceCounts, Interference, Verified
from iobench.writers.transfer import Fallback, PathCount, Transfer

REF = CheckpointRef(contender=1, shape=0, directory=Path("/shared/step"))
TRANSFER = Transfer(
    writer="odirect",
    operation="write",
    files=2,
    bytes=10,
    elapsed_s=0.5,
    durable=True,
    phases_s={"write": 0.25},
    paths={"direct": PathCount(operations=1, bytes=10)},
    fallbacks=(Fallback(wanted="a", used="b", reason="c"),),
    completed={123456: 10},
)


class Recorder:
    """Receives commands in place of a Job."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **given: self.calls.append((name, given))


@pytest.mark.parametrize(
    ("what", "given"),
    [
        (
            partial(Job.save, ref=REF),
            {"ref": CheckpointRef(contender=1, shape=0, directory="/shared/step")},  # as text
        ),
        (partial(Job.scrub, shape=2, tp=None), {"shape": 2, "tp": None}),
        (partial(Job.scrub, shape=2, tp=4), {"shape": 2, "tp": 4}),
        (partial(Job.sizes, shape=0, tp=(None, 8)), {"shape": 0, "tp": [None, 8]}),
        (
            partial(Job.warm_up, directories=[Path("/a"), "s3://b/c"]),
            {"directories": ["/a", "s3://b/c"]},
        ),
    ],
)
def test_a_command_arrives_with_its_arguments(what: Any, given: dict[str, Any]) -> None:
    """Through JSON text, as it is sent."""
    job: Any = Recorder()
    command_of(json.loads(json.dumps(message_of(what))))(job)
    assert job.calls == [(what.func.__name__, given)]


@pytest.mark.parametrize(
    "reply",
    [
        Done(
            transfer=TRANSFER,
            at_s=1.5,
            notes=("n",),
            file_bytes=(4, 6),
            usage=Usage(cpu_s=0.1, io={"rchar": 1}),
            late_s=0.25,
        ),
        Done(transfer=TRANSFER, at_s=1.5, notes=()),
    ],
)
def test_the_result_of_a_save_comes_back(reply: Done) -> None:
    """Every field, also that of an array and the numbers that are keys."""
    sent = json.loads(json.dumps(to_plain(reply)))
    assert to_plain(reply_of(partial(Job.save, ref=REF), sent, "rank 1")) == to_plain(reply)


def test_other_replies_come_back() -> None:
    """Sizes, verifications, nothing at all; an array is a list on the way."""
    sizes = CheckpointSizes(saved=5, restored=(5, 2))
    assert reply_of(partial(Job.sizes, shape=0, tp=()), to_plain(sizes), "") == sizes
    verified = Verified(tensors=1, bytes=2, mismatches=0)
    assert reply_of(partial(Job.verify, ref=REF), to_plain(verified), "") == verified
    nothing: Any = reply_of(partial(Job.prepare, shape=0, checkpoint=(0, 0)), None, "")
    assert nothing is None
    assert to_plain(array("q", [1, 2])) == [1, 2]
    counts = Counted(
        began_s=1.0,
        elapsed_s=2.0,
        cpu_s=0.5,
        system_cpu_s=1.0,
        device=DeviceCounts(
            read_bytes=1, write_bytes=2, process_read_bytes=3, process_write_bytes=None
        ),
        interference=Interference(
            steal_s=0.0, memory_stall_s=None, foreign_read_bytes=0, foreign_write_bytes=0
        ),
        flushed=True,
    )
    assert reply_of(Job.counted, to_plain(counts), "") == counts
    assert reply_of(Job.counted, None, "") is None


@pytest.mark.parametrize("reply", [3, {"transfer": 1}, None, {"at_s": float("nan")}])
def test_a_reply_of_another_form_names_its_rank(reply: Any) -> None:
    """A wrong reply is an error of that rank, not of the run's own code."""
    with pytest.raises(JobError, match="rank 7: its reply to save is not valid"):
        reply_of(partial(Job.save, ref=REF), reply, "rank 7")


@pytest.mark.parametrize(
    "message",
    [
        {"do": "__init__", "with": {}},
        {"do": "_own", "with": {"directory": "/"}},
        {"do": "nothing", "with": {}},
        {"do": "save", "with": {"self": 1, "other": 2}},
        {"do": "save", "with": {"ref": {"contender": "0", "shape": 0, "directory": "/"}}},
    ],
)
def test_only_methods_of_a_job_are_commands(message: Any) -> None:
    """With their own arguments, of their own types."""
    with pytest.raises(ValueError, match=r"command|argument|Expected `int`"):
        command_of(message)


@pytest.mark.parametrize("what", [len, lambda job: job, partial(Job.prepare, None, 0)])
def test_nothing_else_has_a_message(what: Any) -> None:
    """Code is never sent."""
    with pytest.raises(ValueError, match="not a method of Job"):
        message_of(what)
