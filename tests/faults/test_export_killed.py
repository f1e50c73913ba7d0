"""iobench export: killed anywhere, nothing half visible; and bounded memory."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captured import captured
from support.control_groups import control_group
from support.preloaded import Preloaded, run_preloaded
from support.rank_commands import job_number
from support.torchrun import torchrun

import iobench
from iobench.units import MIB

_EXPORT = """
import sys
from support import kill_points
import iobench, iobench.exports.export
source, out, format, point = sys.argv[1:]
kill_points.arm(point)
iobench.export(source, out, format=format, max_shard_size=200_000, replace=True)
"""
_POINTS = (
    "iobench.exports.staged_directory.StagedDirectory.begin:after",
    "iobench.writers.stream.BlockStream.write:after:2",
    "iobench.exports.export.Export._write_file:after:1",
    "iobench.exports.export.Export._write_file:before:2",
    "iobench.exports.export.Export._read_again:before",
    "iobench.exports.export.Export._publish:before",
    "iobench.exports.export.index_of:after",
    "iobench.exports.staged_directory._sync_tree:after",
    "iobench.exports.staged_directory.StagedDirectory._give_name:before",
)
_PUBLISHED = "iobench.exports.staged_directory.StagedDirectory._give_name:after"


def _tensors(seed: int = 0, count: int = 5) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.weight": torch.randn(200, 100, generator=made) for n in range(count)}


def _export(source: Path, out: Path, point: str, kind: str = "safetensors") -> int:
    return int(run_preloaded(["-c", _EXPORT, source, out, kind, point]).returncode)


def _found(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize(
    ("point", "action"),
    [
        *((point, "kill") for point in (*_POINTS, _PUBLISHED)),
        *((point, "full") for point in _POINTS[1:8:2]),
    ],
)
def test_nothing_half_visible(point: str, action: str, tmp_path) -> None:
    """First without an older export, then over one: it has the old tensors or the new ones, all of
    them. The next export removes what was left; an error, such as a full disk, leaves nothing."""
    out = tmp_path / "out"
    save_file(_tensors(), tmp_path / "old.safetensors")
    save_file(_tensors(1), tmp_path / "new.safetensors")
    due = point if point.split(":")[2:] else f"{point}:1"
    for number, older in enumerate((None, _tensors())):
        if older is not None:
            iobench.export(tmp_path / "old.safetensors", out, max_shard_size=200_000, replace=True)
        code = _export(tmp_path / "new.safetensors", out, f"{due}:{action}")
        assert code == -signal.SIGKILL if action == "kill" else code == 1
        new = point == _PUBLISHED
        if older is None and not new:
            assert not out.exists()
        else:
            assert _equal(_found(out), _tensors(1) if new else _tensors())
            assert iobench.verify(out).ok
        left = list(tmp_path.glob(".*"))
        assert (len(left) == 1) == (action == "kill"), (left, number)
    iobench.export(tmp_path / "new.safetensors", out, replace=True)
    assert _equal(_found(out), _tensors(1))
    assert not list(tmp_path.glob(".*"))


def test_a_torch_file_too(tmp_path) -> None:
    """It is not there before it is whole."""
    save_file(_tensors(), tmp_path / "old.safetensors")
    point = "iobench.exports.export.Export._read_again:before:1"
    assert _export(tmp_path / "old.safetensors", tmp_path / "m.pt", point, "torch") == -9
    assert not (tmp_path / "m.pt").exists()
    iobench.export(tmp_path / "old.safetensors", tmp_path / "m.pt", format="torch")
    assert _equal(torch.load(tmp_path / "m.pt"), _tensors())
    assert not list(tmp_path.glob(".*"))


_COMMAND = """
from support import kill_points
import iobench.cli.main
kill_points.arm("iobench.cli.main.app_of:after:1:note")
iobench.cli.main.run()
"""


def _timed(source: Path, out: Path, after_s: float, number: int) -> tuple[int, str, float]:
    """Run `iobench export`, with a signal after `after_s`. Return its exit code, what it has
    written to stderr, and its seconds up to then."""
    words = ["export", source, "-o", out, "--max-shard-size", "200KB", "--replace"]
    process = Preloaded(["-c", _COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "app_of" in process.stdout.readline()  # from now on, signals interrupt
    began_s = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    elapsed_s = time.monotonic() - began_s
    process.send_signal(number)  # nothing, if it has ended
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, elapsed_s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ended_at_any_moment(number: int, tmp_path) -> None:
    """There is the older export or the new one. Ctrl-C leaves nothing else, a kill only what the
    next export removes."""
    out, sources = tmp_path / "out", [tmp_path / f"{n}.safetensors" for n in (0, 1)]
    for seed, source in enumerate(sources):
        save_file(_tensors(seed, 60), source)
    iobench.export(sources[0], out)
    code, _, whole_s = _timed(sources[0], out, 60, number)
    assert code == 0
    made, before, ended = random.Random(), 0, 0
    while ended < 8:
        new, after_s = 1 - before, made.uniform(0, whole_s)
        code, stderr, elapsed_s = _timed(sources[new], out, after_s, number)
        assert code in (0, 130, -signal.SIGKILL), (code, stderr)
        assert stderr in ("", "iobench: interrupted; temporary files are removed\n"), stderr
        if code:
            ended += 1
        else:
            whole_s = min(whole_s, elapsed_s)
        if code == 0 or not _equal(_found(out), _tensors(before, 60)):
            assert _equal(_found(out), _tensors(new, 60)), (after_s, code)
            before = new
        assert iobench.verify(out).ok
        left = [one.name for one in tmp_path.glob(".*")]
        assert len(left) <= (code == -signal.SIGKILL), (after_s, left)
    iobench.export(sources[1], out, replace=True)
    assert not list(tmp_path.glob(".*"))


_RANK = """
import os, sys
from support import kill_points
import iobench, iobench.exports.export
if os.environ["RANK"] == "1":
    kill_points.arm(sys.argv[3])
iobench.export(sys.argv[1], sys.argv[2], max_shard_size=200_000)
"""


@pytest.mark.parametrize("action", ["kill", "full"])
def test_one_of_two_ranks(action: str, tmp_path) -> None:
    """It is killed, or its disk is full, while it writes: there is nothing, whatever the other rank
    has written; and the next export removes what is left."""
    script, out = tmp_path / "rank.py", tmp_path / "out"
    script.write_text(_RANK)
    save_file(_tensors(), tmp_path / "one.safetensors")
    start = ["--nnodes", "1", "--nproc-per-node", "2", "--master-port", job_number(), script]
    point = f"iobench.exports.export.Export._write_file:after:1:{action}"
    words = [*start, tmp_path / "one.safetensors", out, point]
    done = torchrun(words, timeout=120)
    assert done.returncode != 0
    assert ("No space left" in done.stderr) == (action == "full"), done.stderr
    assert not out.exists()
    iobench.export(tmp_path / "one.safetensors", out, max_shard_size=200_000)
    assert _equal(_found(out), _tensors())
    assert not list(tmp_path.glob(".out*"))


_PEAK = """
import resource, sys
import torch, iobench, iobench.exports.export
from pathlib import Path
if sys.argv[4]:
    import os
    Path(sys.argv[4], "cgroup.procs").write_text(str(os.getpid()))
torch.set_num_threads(1)
if sys.argv[3] == "resident":
    from safetensors.torch import load_file, save_file
    save_file({k: v.clone() for k, v in load_file(sys.argv[1]).items()}, sys.argv[2])
    sys.exit()
small = Path(sys.argv[2] + ".small.safetensors")
from safetensors.torch import save_file
save_file({"x": torch.ones(1000)}, small)
def export(source, to, **options):
    for kind in sys.argv[3].split():
        iobench.export(source, f"{to}-{kind}", memory="128MiB", format=kind, **options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = export(small, sys.argv[2] + ".small")
print(export(sys.argv[1], sys.argv[2], dtype="bf16") - before)
"""

pytestmark = pytest.mark.usefixtures("importing")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """320 MiB of tensors, one of them of 256 MiB."""
    at = tmp_path_factory.mktemp("large") / "large.safetensors"
    save_file({"a": torch.ones(64 * MIB), "b": torch.ones(16 * MIB)}, at)
    return at


def _peak(
    source: Path, out: Path, kinds: str, group: object = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PEAK, source, out, kinds, str(group)]
    return captured(list(map(str, command)))


def test_memory_is_bounded(large, tmp_path) -> None:
    """The peak grows by less than `memory` over that of a small export, in each format."""
    done = _peak(large, tmp_path / "out", "safetensors torch dcp")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 128 * MIB


@pytest.mark.root
def test_in_a_control_group(large, tmp_path) -> None:
    """With a limit in which the same tensors do not fit."""
    with control_group(256 * MIB) as group:
        assert _peak(large, tmp_path / "resident", "resident", group.path).returncode == -9
        done = _peak(large, tmp_path / "out", "safetensors", group.path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out-safetensors/model.safetensors")
    assert bool((found["a"] == 1).all())
    assert found["a"].dtype == torch.bfloat16
