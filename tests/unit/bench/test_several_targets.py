"""A plan of several targets: which writers take part in which, and what is refused before a
write."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iobench.bench import choose, planning
from iobench.bench import plan as plan_module
from iobench.bench.axes import Axes
from iobench.bench.choose import split_targets
from iobench.bench.fio import JOBS
from iobench.bench.plan import Plan
from iobench.bench.planning import Rates, make_plan, plan_lines
from iobench.errors import TargetError, UnavailableError, UsageError
from iobench.units import GIB
from iobench.writers.base import Availability
from iobench.writers.buffered import BufferedWriter
from iobench.writers.odirect import ODirectWriter
from iobench.writers.s3 import S3Writer

BUCKET = "s3://bucket/run"


@pytest.fixture(autouse=True)
def _fio_and_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "fio_version", lambda: "3.33")
    monkeypatch.setattr(S3Writer, "require", lambda *_: None)


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "a"), str(tmp_path / "b")


def plan_of(*targets: str, **asked: Any) -> Plan:
    given = {"workload": "llama7b", "writers": "buffered", "size": "64MiB", "target": targets}
    return make_plan(**given | asked)


def test_each_writer_takes_part_in_each_target(places: tuple[str, str]) -> None:
    """Labels and record name the target; the others are compared with the first one."""
    first, second = places
    plan = plan_of(first, second, writers="buffered,uncached", repeat=3, aa=True)
    twins = [f"buffered target={first}", f"buffered target={second}"]
    labels = [one.label for one in plan.variants_with_twins]
    others = [f"uncached target={first}", f"uncached target={second}"]
    assert labels == [*twins, *others, *twins]
    assert plan.written_bytes == 3 * plan.size_bytes * (4 + 2 + 2 * len(JOBS))
    record = plan.to_dict()
    assert (record["target"], record["targets"]) == (f"{first},{second}", [first, second])
    assert record["baseline"] == {"target": first, "label": first}
    assert record["no_ceiling"] is None
    lines = list(plan_lines(plan))
    assert sum(line.startswith("target    ") for line in lines) == 2
    assert f"uncached target={second}" in next(one for one in lines if one.startswith("variants"))


def test_a_baseline_may_be_one_writer_in_one_target(places: tuple[str, str]) -> None:
    """By the label that the plan prints, also if the name of a target contains a space."""
    spaced = f"{places[1]} c"
    os.mkdir(spaced)
    for place in (places[1], spaced):
        plan = plan_of(places[0], place, baseline=f"buffered target={place}")
        assert plan.to_dict()["baseline"]["target"] == place


def test_one_target_is_recorded_as_before(places: tuple[str, str]) -> None:
    """The plan of one target has no key for several targets."""
    record = plan_of(places[0], baseline="buffered").to_dict()
    assert "targets" not in record
    assert "target" not in record["baseline"]
    assert (record["target"], record["no_ceiling"]) == (places[0], None)


def test_writers_take_part_where_they_can(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket and two directories, one without direct I/O: the plan names what is left out."""
    first, second = places

    def available(_: ODirectWriter, target: str) -> Availability:
        return Availability(ok=str(target) != second, reason="No O_DIRECT here.")

    monkeypatch.setattr(ODirectWriter, "available", available)
    plan = plan_of(first, second, BUCKET, writers="odirect,s3,buffered")
    assert [one.label for one in plan.variants] == [
        f"odirect target={first}",
        f"s3 target={BUCKET}",
        f"buffered target={first}",
        f"buffered target={second}",
    ]
    left_out = [line for line in plan_lines(plan) if line.startswith("left out")]
    assert len(left_out) == 5
    assert any(second in line and "No O_DIRECT here." in line for line in left_out)
    assert sum(f"{BUCKET}: writer" in line for line in left_out) == 2
    assert plan.ceiling_targets == (first, second)
    assert plan.to_dict()["no_ceiling"] == {BUCKET: "fio does not measure S3"}
    monkeypatch.setattr(choose.registry, "names", lambda: ["buffered", "odirect", "s3"])
    monkeypatch.setattr(choose.peers, "names", list)
    everyone = plan_of(second, BUCKET, writers="all")
    assert [one.contender.name for one in everyone.variants] == ["buffered", "s3"]
    assert any("No O_DIRECT here." in line for line in everyone.left_out)


def test_a_writer_that_works_nowhere(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with the error of one target, and the more specific one of two kinds."""
    nowhere = Availability(ok=False, reason="Not today.")
    monkeypatch.setattr(ODirectWriter, "available", lambda *_: nowhere)
    with pytest.raises(UnavailableError, match="Not today"):
        plan_of(*places, writers="odirect,buffered")
    with pytest.raises(UnavailableError, match="Not today"):
        plan_of(BUCKET, places[0], writers="odirect,s3,buffered")
    with pytest.raises(UsageError, match="writer 's3' needs a target s3://bucket/prefix"):
        plan_of(*places, writers="buffered,s3")


def test_a_target_that_no_writer_works_in(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"{BUCKET}: .* needs a directory"):
        plan_of(places[0], BUCKET)
    monkeypatch.setattr(
        BufferedWriter,
        "available",
        lambda _, target: Availability(ok=str(target) == places[0], reason="Not there."),
    )
    with pytest.raises(UnavailableError, match="Not there"):
        plan_of(*places)


def test_targets_that_are_refused(places: tuple[str, str], tmp_path: Path) -> None:
    """The same target twice under any name, a missing one, or a file: nothing is written."""
    first, second = places
    os.symlink(first, tmp_path / "link")
    (tmp_path / "file").touch()
    for name in (first, f"{second}/../a", str(tmp_path / "link")):
        with pytest.raises(UsageError, match=f"{first} is given twice"):
            plan_of(first, second, name, size=None)
    with pytest.raises(TargetError, match="missing: no such directory; make it first"):
        plan_of(first, str(tmp_path / "missing"), size=None)
    with pytest.raises(TargetError, match="file: is not a directory"):
        plan_of(first, str(tmp_path / "file"), size=None)
    assert os.listdir(first) == os.listdir(second) == []


def test_the_value_of_the_option(tmp_path: Path) -> None:
    """Commas separate targets, unless they are part of the name of one directory."""
    assert split_targets("/mnt/a, s3://b/c,.") == ("/mnt/a", "s3://b/c", ".")
    comma = tmp_path / "a,b"
    comma.mkdir()
    assert split_targets(str(comma)) == (str(comma),)
    for text in ("/mnt/a,", ",", "a,,b"):
        with pytest.raises(UsageError, match="a target is missing between the commas"):
            split_targets(text)
    assert split_targets("a,s3://b/c,s3://b/d,../e") == ("a", "s3://b/c", "s3://b/d", "../e")
    with pytest.raises(UsageError, match=r"'d' after s3://b/c begins neither .* as \./d, and"):
        split_targets("s3://b/c,d")


def _spaces(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    """The free bytes of directories, by their last name."""

    def statvfs(path: Any) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free[Path(path).name] // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_every_target_needs_room_for_one_checkpoint(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one checkpoint exists at a time, so targets that share a file system need no more."""
    size = plan_of(*places).size_bytes
    enough = int((size + GIB / 4) / 0.95) + 8192
    _spaces(monkeypatch, a=enough, b=enough)
    plan_of(*places)
    _spaces(monkeypatch, a=enough, b=enough - 16384)
    with pytest.raises(TargetError, match=r"b: a checkpoint of .* does not fit"):
        plan_of(*places)
    _spaces(monkeypatch, a=enough, b=1)
    with pytest.raises(TargetError, match=r"b: no space is left"):
        plan_of(*places, size=None)
    assert [os.listdir(place) for place in places] == [[], []]


def test_the_default_size_fits_the_smallest_target(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Rates(steps=4, s_per_byte=4 / GIB, saved=2, save_bytes_per_s=GIB)
    monkeypatch.setattr("iobench.bench.planning.measure_rates", lambda _: fast)
    _spaces(monkeypatch, a=1000 * GIB, b=2 * GIB)
    assert plan_of(*places, size=None, repeat=1).size_bytes < 2 * GIB


def test_fio_takes_as_long_as_each_target_needs(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow target slows down its own fio jobs only."""
    plan = plan_of(*places)
    probed = {
        one.path.name: (speed, speed / 2)
        for one, speed in zip(plan.targets, (4.0, 0.5), strict=True)
    }
    monkeypatch.setattr(
        planning, "_probe", lambda some, target: [probed[target.path.name] for _ in some]
    )
    monkeypatch.setattr("iobench.bench.plan.fio_version", lambda: "3.33")
    without, with_fio = (
        planning.measure_rates(replace(plan, ceiling=ceiling)) for ceiling in (False, True)
    )
    fio_s = with_fio.s_per_byte - without.s_per_byte
    assert fio_s == pytest.approx(len(JOBS) * (1 / 4 + 1 / 2 + 2 + 4))
    assert with_fio.steps - without.steps == 4 * len(JOBS)


def test_axes_of_several_targets_are_not_alone(places: tuple[str, str]) -> None:
    """Each other axis is combined with the targets."""
    plan = plan_of(*places, axes=Axes.parse(numjobs="1,2"))
    assert len({one.label for one in plan.variants}) == 4
