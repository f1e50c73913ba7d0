"""`iobench tiers plan` from the command line; the simulation has tests of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Command = Callable[..., "CompletedProcess[str]"]

_PLAN = ("tiers", "plan", "--size", "1GiB", "--local", "256MiB/s", "--every", "2s", "--saves", "9")


def test_the_prediction_is_printed(iobench_inside: Command) -> None:
    """Where it fills, how long it stalls and what is lost."""
    found = iobench_inside(
        *_PLAN, "--memory", "2GiB@4GiB/s", "--slow-memory", "1GiB@1GiB/s", "--remote", "100MiB/s",
        "--every-save", "--step", "1s",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "workload      llama7b: 9 saves of 1.00 GiB, one every 2 s of training"
    assert "used from save 4 on" in lines[2]
    assert lines[3].strip().startswith("full at save ")
    assert lines[4].startswith("stall         250 ms a save, ")
    assert lines[-1].endswith("steps if the local tier fails")


def test_as_json(iobench_inside: Command) -> None:
    """Every save; without a remote tier none is durable there."""
    found = iobench_inside(*_PLAN, "--memory", "2GiB@4GiB/s", "--format", "json")
    document = json.loads(found.stdout)
    assert document["schema"] == "iobench.tiers-plan/1"
    assert document["plan"]["local_rate"] == 256 << 20
    assert [one["at_s"] for one in document["saves"]][:2] == [2.0, 4.25]
    assert {one["remote_s"] for one in document["saves"]} == {None}
    assert document["lost_local_s"] is None


def test_placement(iobench_inside: Command) -> None:
    """How many saves went to which tier, and how fast the link is when."""
    found = iobench_inside(
        *_PLAN, "--every", "10s", "--saves", "40", "--memory", "2GiB@4GiB/s", "--placement",
        "durable", "--remote", "1GiB/s,0@200s,1GiB/s@300s", "--keep-last", "2",
        "--remote-latency", "100ms", "--timeout", "5s",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "placement     goal durable: " in found.stdout
    assert "the tier changes 3 times" in found.stdout
    assert "down from 3 min 20 s on, 1.00 GiB/s (1.07 GB/s) from 5 min 0 s on" in found.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--slow-memory", "1GiB"), "give the rate"),
        (("--max-lag", "1s"), "there is no --remote"),
        (("--on-full", "stop"), "wait, skip or supersede"),
        (("--every", "0s"), "above 0"),
        (("--placement", "durable"), "there is no --remote"),
        (("--remote", "1GiB/s", "--placement", "soon"), "one of durable, bandwidth, capacity"),
        (("--remote", "1GiB/s,1MiB/s"), "with times that grow"),
        (("--remote", "1GiB/s,1MiB/s@9s,0@8s"), "with times that grow"),
        (("--remote", "0"), "above 0"),
        (("--remote", "1GiB/s", "--timeout", "0s"), "too short"),
    ],
)
def test_wrong_options(more: tuple[str, ...], message: str, iobench_inside: Command) -> None:
    """One line, exit code 2."""
    found = iobench_inside(*_PLAN, *more)
    assert (found.returncode, found.stdout) == (2, "")
    assert message in found.stderr
