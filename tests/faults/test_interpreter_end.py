"""The interpreter ends during a save: the file is complete, or the exit code is not 0."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.captured import captured

from iobench import load_checkpoint
from iobench.writers.registry import make

_SCRIPT = Path(__file__).with_name("scripts") / "ends.py"
_LOST = 120
_SAVES = (
    *("lightning", "deepspeed", "checkpointer", "checkpointer_lazily", "checkpointer_aiofiles"),
    *("dcp", "dcp_aiofiles"),
)
_STREAMS = ("buffered", "odirect", "uring", "hybrid", "aiofiles")

End = Callable[[str, str], tuple[int, str]]


@pytest.fixture(scope="module")
def script() -> Iterator[subprocess.Popen[str]]:
    """A process that imports torch once for all cases."""
    with subprocess.Popen(
        [sys.executable, _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        yield started
        started.stdin.close()
        assert started.wait() == 0


@pytest.fixture
def run(script: subprocess.Popen[str], tmp_path: Path) -> End:
    """Begin a save and end. Return the exit code and stderr."""

    def run(save: str, end: str) -> tuple[int, str]:
        assert script.stdin is not None
        print(save, end, tmp_path, file=script.stdin, flush=True)
        code = int(script.stdout.readline())
        stderr = tmp_path / "stderr"
        return code, stderr.read_text() if stderr.exists() else ""

    return run


def _whole(save: str, directory: Path) -> bool:
    """Whether the complete save exists; an incomplete one is an error."""
    found = {path.name for path in directory.iterdir()} - {"stderr", ".iobench-lock"}
    if not found:
        return False
    if save.startswith("dcp"):
        if ".metadata" not in found:
            return False
        state = {"w": torch.zeros(4_000_000)}
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    elif save.startswith("checkpointer"):
        state = load_checkpoint(directory)
    elif save == "deepspeed":
        if "latest" not in found:
            return False
        state = torch.load(directory / (directory / "latest").read_text() / "file")
    else:
        assert found == {"file"}
        state = torch.load(directory / "file")
    return bool((state["w"] == 1).all())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", _SAVES)
def test_a_save_on_its_way_is_finished(save: str, run, tmp_path) -> None:
    """It needs nothing that an ending interpreter refuses."""
    code, stderr = run(save, "returns")
    assert (code, _whole(save, tmp_path)) == (0, True), stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", ["checkpointer", "dcp"])
@pytest.mark.parametrize(
    ("end", "code"), [("exit", 0), ("raises", 1), ("sigterm", 0), ("sigterm-later", 0)]
)
def test_however_it_ends(save: str, end: str, code: int, run, tmp_path) -> None:
    """sys.exit, an exception, SystemExit of a signal handler: now or in the wait at the end."""
    ended, stderr = run(save, end)
    assert (ended, _whole(save, tmp_path)) == (code, True), stderr


def test_killed(run) -> None:
    """SIGTERM without a handler: no save can be finished, and the exit code says so."""
    assert run("checkpointer", "killed")[0] == -signal.SIGTERM


@pytest.mark.parametrize(
    ("save", "end"),
    [*((save, "fails") for save in _SAVES), ("checkpointer", "failed"), ("dcp", "failed")],
)
def test_a_failure_is_reported(save: str, end: str, run, tmp_path) -> None:
    """A save that fails after the script, or earlier without a later call: exit code 120."""
    code, stderr = run(save, end)
    assert (code, _whole(save, tmp_path)) == (_LOST, False), stderr
    assert "a save was lost" in stderr
    assert "File too large" in stderr


@pytest.mark.parametrize("save", ["lightning", "checkpointer"])
def test_a_failure_of_what_was_dropped(save: str, run) -> None:
    """When it fails, no variable refers to it, long before the end."""
    code, stderr = run(save, "dropped")
    assert code == _LOST, stderr
    assert "RuntimeWarning" in stderr
    assert "a save was lost" in stderr


@pytest.mark.parametrize(
    ("writer", "end"),
    [
        *((writer, end) for writer in _STREAMS for end in ("saved", "flushed")),
        *((writer, "late") for writer in ("odirect", "aiofiles")),
    ],
)
def test_a_stream_that_is_never_closed(writer, end: str, run, tmp_path) -> None:
    """A complete file of torch is published; otherwise there is no file, and a message, flushed or
    not. The process always ends. Also for a stream that is made after iobench's own function of
    atexit."""
    answer = make(writer).available(tmp_path)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    code, stderr = run(f"stream-{writer}", end)
    assert code == (_LOST if end == "flushed" else 0)
    if end != "late":
        assert _whole("stream", tmp_path) == (end == "saved")
    assert ("the interpreter ended before close()" in stderr) == (end == "flushed")


_OBJECT = """
import concurrent.futures.thread, faulthandler, sys, threading, time
import numpy as np
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer

def save_at_the_end():
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.001)
    writer.write(FileImage.of("model", [DATA]), "s3://bucket/run")

faulthandler.dump_traceback_later(60, exit=True)
url, how = sys.argv[1:]
DATA = np.ones(11 << 20, dtype=np.uint8)  # three parts
writer = S3Writer(endpoint_url=url, addressing_style="path", part_size="5MiB", threads=2)
if how == "write":
    threading.Thread(target=save_at_the_end).start()
else:
    stream = writer.open("s3://bucket/run/model")
    stream.write(DATA)
    stream.flush()
"""


@pytest.mark.parametrize("how", ["write", "flushed"])
def test_an_object(how: str, server) -> None:
    """An upload is completed, or aborted with a message."""
    ended = captured([sys.executable, "-c", _OBJECT, server.endpoint_url, how])
    assert ended.returncode == (_LOST if how == "flushed" else 0), ended.stderr
    assert ("the interpreter ended before close()" in ended.stderr) == (how == "flushed")
    assert server.objects == ({} if how == "flushed" else {"run/model": bytes([1]) * (11 << 20)})
    assert not server.uploads


_OVERLAPPING = """
import faulthandler, sys, threading
import torch
import torch.distributed.checkpoint as dcp
from iobench.integrations.dcp import StorageWriter

class Late(StorageWriter):
    def write_data(self, plan, planner):
        begun.set()
        assert may_go.wait(30)
        return super().write_data(plan, planner)

faulthandler.dump_traceback_later(60, exit=True)
directory, how = sys.argv[1:]
begun, may_go = threading.Event(), threading.Event()
STATE = {"w": torch.ones(1000)}
first = dcp.async_save(STATE, storage_writer=Late("/dev/null/first", "buffered"), no_dist=True)
assert begun.wait(30)
second = dcp.async_save(STATE, storage_writer=StorageWriter(directory, "buffered"), no_dist=True)
second.result()
may_go.set()
if how == "later":
    assert first.exception()
    third = dcp.async_save(STATE, storage_writer=StorageWriter(directory, "buffered"), no_dist=True)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("now", _LOST), pytest.param("later", 0, marks=pytest.mark.exhaustive)]
)
def test_saves_that_overlap(how: str, code: int, tmp_path) -> None:
    """A failure after a later save began is reported; a save that begins afterwards clears it."""
    ended = captured([sys.executable, "-c", _OVERLAPPING, tmp_path, how])
    assert ended.returncode == code, ended.stderr
    assert ("async_save to /dev/null/first failed" in ended.stderr) == (code == _LOST)
    assert (tmp_path / ".metadata").exists()
