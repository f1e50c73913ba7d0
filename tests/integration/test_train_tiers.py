"""`iobench train --tiers FILE`: when each tier had a save, and what was lost at most."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from iobench import Memory, Paced, Remote
from iobench.errors import OptionError, TargetError
from iobench.results import read
from iobench.tiers.file import TiersFile
from iobench.train.tiered_saver import most_lost

Command = Callable[..., "CompletedProcess[str]"]

_FILE = """
on_full = "wait"

[[memory]]
size = "64MiB"

[[memory]]
size = "64MiB"
path = "/dev/shm"
rate = "2GiB"

[local]
rate = "1GiB"

[remote]
location = "{remote}"
every_save = true
"""


def test_time_to_durable_in_each_tier(tmp_path: Path, iobench_inside: Command) -> None:
    """Of each save, for our writers alone; nothing stays in the remote tier."""
    (tmp_path / "tiers.toml").write_text(_FILE.format(remote=tmp_path / "remote"))
    record = tmp_path / "run.jsonl"
    done = iobench_inside(
        "train", "--tiers", tmp_path / "tiers.toml", "--target", tmp_path, "-o", record,
        "--size", "16MiB", "--model-params", "100000", "--steps", "4", "--every", "2",
        "--repeat", "1", "--writer", "hybrid,peer:torch-save", "--mode", "async",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    blocks = {block.writer: block for block in read(record).training}
    ours, stock = blocks["hybrid"], blocks["peer:torch-save"]
    assert len(ours.saves) == 2
    assert all(one.remote_s > one.durable_s > 0 for one in ours.saves)  # type: ignore[operator]  # None fails
    assert set(ours.lost_s) == {"local", "remote"}
    assert ours.resumed_equal is True
    assert not any(save.remote_s for save in stock.saves)
    assert not stock.lost_s
    assert "hybrid async: 2 of 2 saves durable in the remote tier" in done.stdout
    assert "lost with the node" in done.stdout
    assert list((tmp_path / "remote").iterdir()) == []
    json.loads(record.read_text().splitlines()[0])


def test_the_file(tmp_path: Path) -> None:
    """Tiers with their options; paced ones with rate or latency."""
    path = tmp_path / "tiers.toml"
    path.write_text(_FILE.format(remote="s3://bucket/run") + '[placement]\ngoal = "bandwidth"\n')
    found = TiersFile.read(path)
    assert found.memories == (
        Memory("64MiB"),
        Paced(Memory("64MiB", path="/dev/shm"), "2GiB"),
    )
    assert found.memory_bytes == 128 << 20
    assert found.remote == Remote("s3://bucket/run", every_save=True)
    assert found.placement is not None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[remote]\nlocation = 's3://b/r'\nmax = 3", "has max; known are location"),
        ("memory = 3", "several"),
        ("local = 3", "must be a table"),
        ("on_full = 'stop'", "on_full"),
        ("x = 1", "the file has x"),
        ("[[memory]]", "size"),
        ("[[memory]\n", "not a TOML file"),
    ],
)
def test_a_wrong_file(text: str, match: str, tmp_path: Path) -> None:
    """The message names the file and the key."""
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=match) as caught:
        TiersFile.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(TargetError):
        TiersFile.read(tmp_path / "none.toml")


def test_the_most_that_is_lost() -> None:
    """From the begin of the newest durable save to the moment at which a newer one is durable."""
    assert most_lost([]) is None
    assert most_lost([(0.0, 1.0)]) is None
    assert most_lost([(0.0, 1.0), (10.0, 2.0), (20.0, 5.0)]) == 15.0
    assert most_lost([(0.0, 1.0), (20.0, 5.0), (10.0, 30.0)]) == 25.0  # one that comes too late


def test_the_file_of_the_page(tmp_path: Path) -> None:
    """docs/tiers.md shows a file that is read."""
    page = (Path(__file__).parents[2] / "docs/tiers.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "tiers.toml"
    path.write_text(block)
    found = TiersFile.read(path)
    assert found.memory_bytes == 40 << 30
    assert found.remote == Remote("s3://bucket/measured", every_save=True)


def test_a_run_to_tiers(tmp_path: Path, iobench_inside: Command) -> None:
    """`iobench run --tiers`: each save, and nothing stays."""
    (tmp_path / "tiers.toml").write_text(_FILE.format(remote=tmp_path / "remote"))
    command = ("run", "--tiers", tmp_path / "tiers.toml", "--target", tmp_path, "--size", "16MiB")
    found = json.loads(iobench_inside(*command, "--repeat", "2", "--format", "json").stdout)
    assert found["schema"] == "iobench.run-tiers/1"
    assert [one["status"] for one in found["saves"]] == ["committed", "committed"]
    assert all(one["remote_s"] > one["durable_s"] > 0 for one in found["saves"])
    assert set(found["lost_s"]) == {"local", "remote"}
    shown = iobench_inside(*command, "--repeat", "3")
    assert shown.returncode == 0, shown.stderr
    assert "llama7b: 3 saves of " in shown.stdout
    assert sum(line.endswith("committed") for line in shown.stdout.splitlines()) == 3
    assert list((tmp_path / "remote").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"here", "remote", "tiers.toml"}
    for wrong in (("--repeat", "1"), ("--aa",), ("--format", "md")):
        assert iobench_inside(*command, *wrong).returncode == 2
