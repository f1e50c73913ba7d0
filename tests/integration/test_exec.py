"""`iobench exec`: unmodified scripts, compared with the same scripts without it."""

import errno
import fcntl
import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured import captured
from support.torchrun import require_own_name

from iobench.integrations.redirect import launch
from iobench.units import MIB

SCRIPTS = Path(__file__).with_name("scripts")
EXEC = (sys.executable, "-m", "iobench", "exec", "--config")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `iobench exec --config WRITER --report report.json -- COMMAND` in an empty directory."""
    (tmp_path / "here").mkdir()

    def call(
        *command: str | Path,
        writer: str | Path = "hybrid",
        ignored: Sequence[int] = (),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        return captured(
            [*EXEC, writer, "--report", tmp_path / "report.json", "--", *command],
            cwd=tmp_path / "here",
            env=os.environ | environment,
            timeout=200,
            preexec_fn=ignore,
        )

    return call


@pytest.fixture
def reported(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """The report of the last run."""
    return lambda: json.loads((tmp_path / "report.json").read_text())


def redirected(report: dict[str, Any]) -> dict[str, int]:
    """Calls that went over the writer, by function."""
    functions = report["functions"].items()
    return {n: e["redirected"]["calls"] for n, e in functions if e["redirected"]["calls"]}


def stock(report: dict[str, Any], function: str) -> dict[str, int]:
    """Calls that the stock function did, by reason."""
    entry = report["functions"][function]
    return {reason: count["calls"] for reason, count in entry["stock"].items()}


def files(directory: Path) -> list[Path]:
    """All files below, relative."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.relative_to(directory) for path in found)


def test_a_training_script_leaves_the_same_files(run, reported, tmp_path) -> None:
    """A stock Trainer that resumes, and a plain loop: equal files, permissions and losses."""
    plain = tmp_path / "plain"
    plain.mkdir()
    with subprocess.Popen(
        [sys.executable, SCRIPTS / "train.py"],
        cwd=plain,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as unredirected:
        done = run(sys.executable, SCRIPTS / "train.py")
        stdout, stderr = unredirected.communicate(timeout=200)
    assert unredirected.returncode == 0, stderr
    assert done.returncode == 0, done.stderr
    assert _losses(done.stdout) == _losses(stdout)
    here = tmp_path / "here"
    assert files(here) == files(plain)
    names = [path for path in files(plain) if path.name != "trainer_state.json"]
    assert len(names) >= 20
    same, other, errors = filecmp.cmpfiles(here, plain, names, shallow=False)
    assert (other, errors) == ([], [])
    assert len(same) == len(names)
    for name in names:
        assert (here / name).stat().st_mode == (plain / name).stat().st_mode
    report = reported()
    assert report["processes"] == 1
    assert redirected(report) == {
        "safetensors.torch.load_file": 2,
        "safetensors.torch.save_file": 4,
        "torch.load": 4,
        "torch.save": 15,
    }
    assert stock(report, "torch.save") == {"not a path but a file object": 1}
    assert report["functions"]["torch.save"]["redirected"]["bytes"] > MIB
    assert "iobench exec: redirected to hybrid" in done.stderr


def _losses(text: str) -> list[str]:
    """The lines without times and speeds."""
    lines = [line for line in text.splitlines() if "train_runtime" not in line]
    return [line for line in lines if re.match(r"[\[{\d-]", line) and "WARNING" not in line]


def test_children_are_redirected_too(run, reported, tmp_path) -> None:
    """Forked, spawned and started ones, and one that is killed; each leaves stock torch's file."""
    done = run(sys.executable, SCRIPTS / "children.py", writer="odirect", PYTHONPATH=str(SCRIPTS))
    assert done.returncode == 0, done.stderr
    report = reported()
    assert redirected(report) == {"torch.save": 5}
    assert report["processes"] == 5
    assert report["problems"] == []
    for name in ("before", "fork", "spawn", "program", "killed"):
        path = tmp_path / "here" / f"{name}.pt"
        (tmp_path / "stock").mkdir(exist_ok=True)
        torch.save({"name": name, "data": torch.arange(9.0)}, tmp_path / "stock" / path.name)
        assert path.read_bytes() == (tmp_path / "stock" / path.name).read_bytes()


def test_ranks_that_save_with_dcp(run, reported, tmp_path) -> None:
    """Under torchrun: both ranks' files go over the writer, and stock DCP reads them."""
    import torch.distributed.checkpoint as dcp

    require_own_name()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run(*torchrun, "--standalone", SCRIPTS / "ranks.py")
    assert done.returncode == 0, done.stderr
    name = "torch.distributed.checkpoint.FileSystemWriter"
    assert redirected(reported()) == {name: 6}  # of each save two ranks' files and the metadata
    for place in ("dcp", "dcp-async"):
        state = {"w": torch.zeros(64, 64), "step": 0}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(state, checkpoint_id=tmp_path / "here" / place)
        assert torch.equal(state["w"], torch.arange(4096.0).view(64, 64))
        assert state["step"] == 7
        listed = {path.name for path in (tmp_path / "here" / place).iterdir()}
        assert listed == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_what_fails(run, reported, new_filesystem, tmp_path) -> None:
    """Before a byte is written stock torch takes over, and a line says so; later it raises.

    So does an object that cannot be pickled, whatever the mode and the links of the old file are:
    stock torch would truncate it first.
    """
    full, sealed = new_filesystem("ext4", 48 * MIB), new_filesystem("tmpfs", MIB)
    subprocess.run(["mount", "-o", "remount,ro", sealed], check=True)
    done = run(sys.executable, SCRIPTS / "failing.py", full, sealed, writer="odirect")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "full OSError RuntimeError 28",
        "sealed RuntimeError None",
        *["pickle None", "{'a': 1}"] * 4,
        "before saved",
        "['lost+found'] []",
    ]
    assert torch.equal(torch.load(tmp_path / "here/before.1.pt")["a"], torch.ones(3))
    entry = reported()["functions"]["torch.save"]
    assert entry["failed"]["calls"] == 5
    assert entry["redirected"]["calls"] == 1
    assert sum(count["calls"] for count in entry["stock"].values()) == 2
    noted = [line for line in done.stderr.splitlines() if "done by the stock function" in line]
    assert any("before.1.pt" in line and "/no/such/directory" in line for line in noted)
    assert any("5 calls" in line and "FAILED" in line for line in done.stderr.splitlines())


ORDERS = {
    "import torch": "import torch; found = [torch.save, torch.load]",
    "from torch": "from torch import load, save; found = [save, load]",
    "from serialization": "from torch.serialization import save as s, load; found = [s, load]",
    "submodule first": "import torch.serialization as s, torch; found = [s.save, torch.load]",
    "late, in a thread": (
        "import threading; found = []\n"
        "def late():\n"
        "    from torch import save; found.append(save)\n"
        "thread = threading.Thread(target=late); thread.start(); thread.join()"
    ),
    "safetensors first": (
        "from safetensors.torch import load_file, save_file; import torch\n"
        "found = [load_file, save_file, torch.save]"
    ),
    "torch before safetensors": (
        "from torch import save; import safetensors.torch as st\n"
        "found = [save, st.save_file, st.load_file]"
    ),
    "dcp": (
        "from torch.distributed.checkpoint.filesystem import FileSystem as F; import torch\n"
        "found = [torch.save, F.create_stream, F.mkdir, F.rename]"
    ),
    "by name": (
        "import importlib; m = importlib.import_module\n"
        "found = [m('safetensors.torch').save_file, m('torch').load, m('safetensors').safe_open]"
    ),
    "a class": (
        "from safetensors import safe_open; from safetensors.torch import safe_open as other\n"
        "found = [safe_open, other]; assert isinstance(safe_open | None, object)"
    ),
    "after a failed import": (
        "import os, sys; os.rename('torch/part.py', 'torch/away.py')\n"
        "try:\n    import torch\nexcept ImportError:\n    pass\n"
        "os.rename('torch/away.py', 'torch/part.py'); from torch import save; found = [save]"
    ),
}
"""Programs that leave functions in `found`; each is the replacement, which has the stock one."""


def test_every_order_of_imports(run, reported, tmp_path) -> None:
    """No name is bound to a stock function, whenever and however its module is imported.

    The packages are small ones with the structure of the real ones, which take seconds to import.
    """
    here = tmp_path / "here"
    for package in ("torch/distributed/checkpoint", "safetensors"):
        (here / package).mkdir(parents=True)
    sources = {
        "torch/__init__": "from torch.serialization import load, save\nimport torch.part",
        "torch/part": "from torch.serialization import save",
        "torch/serialization": "def save(obj, f): ...\ndef load(f): ...",
        "torch/distributed/__init__": "",
        "torch/distributed/checkpoint/__init__": "from .filesystem import FileSystem",
        "torch/distributed/checkpoint/filesystem": (
            "import torch\nclass FileSystem:\n"
            "    def create_stream(self, path, mode): ...\n"
            "    def mkdir(self, path): ...\n"
            "    def rename(self, path, new_path): ..."
        ),
        "safetensors/__init__": "class safe_open: ...",
        "safetensors/torch": (
            "import torch\nfrom safetensors import safe_open\n"
            "def save_file(tensors, filename): ...\ndef load_file(filename): ..."
        ),
    }
    for name, source in sources.items():
        (here / f"{name}.py").write_text(source + "\n")
    check = "\nassert found and all(hasattr(one, '__wrapped__') for one in found), found\n"
    # Each order has a process without these packages, forked from one that has all others.
    driver = (
        "import os, sys, traceback, iobench.integrations.redirect.patches\n"
        "for name, code in eval(sys.argv[1]).items():\n"
        "    if not os.fork():\n"
        "        assert not {'torch', 'safetensors'} & {*sys.modules}\n"
        "        try:\n            exec(code, {})\n"
        "        except BaseException:\n            traceback.print_exc(); os._exit(1)\n"
        "        os._exit(0)\n"
        "    if os.wait()[1]:\n        print(name, flush=True)"
    )
    programs = {name: code + check for name, code in ORDERS.items()}
    done = run(sys.executable, "-c", driver, repr(programs))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    report = reported()
    assert (report["processes"], report["problems"]) == (len(ORDERS), [])


def test_a_process_that_outlives_it(run, tmp_path) -> None:
    """The file of its writer is gone by the first save: `hybrid` saves, and a line says so."""
    program = (
        "import os, sys, time, torch\n"
        "session = os.environ['IOBENCH_EXEC']\n"
        "if os.fork() == 0:\n"
        "    while os.path.exists(session): time.sleep(0.01)\n"
        "    torch.save(torch.ones(3), 'late.pt')\n"
    )
    done = run(sys.executable, "-c", program)  # until the last process has closed stderr
    assert "nothing was redirected" in done.stderr
    assert "hybrid is used: iobench exec has ended" in done.stderr
    assert torch.equal(torch.load(tmp_path / "here/late.pt"), torch.ones(3))


# The script's own affairs.


def test_what_is_the_scripts_own(run, tmp_path) -> None:
    """Its output, exit code, arguments (also those that iobench has), path and sitecustomize; a
    script that needs none gets no torch, and nothing that takes longer to load than Python to
    start. A drop-in that it calls has exec's writer.

    Also where SIGCHLD was ignored by who started it: the kernel keeps no exit codes then.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import builtins; builtins.mark = __file__")
    program = (
        "import sys, builtins, sitecustomize; loaded = [*sys.modules]\n"
        "import json\n"
        "from iobench.integrations.default_writer import chosen_writer\n"
        "hooks = [p for p in sys.path if 'hook' in p]\n"
        "once = sitecustomize.__file__ == builtins.mark\n"
        "print(json.dumps([loaded, sys.argv[1:], hooks, once, repr(chosen_writer())]))\n"
        "sys.exit(7)"
    )
    own = ["--config", "x", "--help", "--", "-o"]
    done = run(
        *(sys.executable, "-c", program, *own),
        writer="odirect,threads=3",
        ignored=[signal.SIGCHLD],
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("iobench exec: nothing was redirected")
    loaded, *found, writer = json.loads(done.stdout)
    assert found == [own, [], True]
    assert writer.startswith("ODirectWriter(")
    assert "threads=3" in writer
    assert "iobench.integrations.redirect.process" in loaded
    heavy = {"iobench.integrations.redirect.call_counts", "torch", "numpy", "dataclasses", "json"}
    assert not heavy & {*loaded}


def test_saves_inside_a_save(run, reported, tmp_path) -> None:
    """Of an object that is pickled, and of a signal handler: complete, by stock, and counted."""
    program = (
        "import io, os, signal, torch\n"
        "signal.signal(signal.SIGUSR1, lambda *_: torch.save(torch.full((9,), 7.0), 'signal.pt'))\n"
        "class Nested:\n"
        "    def __getstate__(self):\n"
        "        buffer = io.BytesIO()\n"
        "        torch.save(torch.full((9,), 5.0), buffer)\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        return {'saved': buffer.getvalue()}\n"
        "torch.save({'a': torch.arange(99), 'nested': Nested()}, 'state.pt')\n"
        "state = torch.load('state.pt', weights_only=False)\n"
        "print(torch.load(io.BytesIO(state['nested'].saved)).sum().item(), state['a'].sum().item())"
    )
    done = run(sys.executable, "-c", program)
    assert done.stdout.split() == ["45.0", "4851"], done.stderr
    assert torch.load(tmp_path / "here/signal.pt").tolist() == [7.0] * 9
    assert redirected(reported()) == {"torch.save": 1, "torch.load": 1}
    (reason,) = stock(reported(), "torch.save")
    assert "while another call was under way" in reason
    assert stock(reported(), "torch.save")[reason] == 2


_WAITING = """
import signal
known = {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, known)
print("ready", flush=True)
got = 0
while got != signal.SIGUSR1:
    got = signal.sigwait(known)
    print(int(got), flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, known)
signal.pause()
"""
"""Prints each signal up to a SIGUSR1; the next one ends it."""


def test_signals_reach_the_script(tmp_path) -> None:
    """It handles them. If it dies of one so does iobench, after its summary: whoever waits sees
    the same."""
    with subprocess.Popen(
        [*EXEC, "hybrid", "--", sys.executable, "-c", _WAITING],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            process.send_signal(number)
            assert process.stdout.readline() == f"{number}\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "nothing was redirected" in stderr


def test_ctrl_c_is_not_given_twice(tmp_path) -> None:
    """A terminal interrupts all of its processes: iobench adds no second interrupt."""
    master, slave = os.openpty()
    with subprocess.Popen(
        [*EXEC, "hybrid", "--", sys.executable, "-c", _WAITING],
        cwd=tmp_path,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(slave)
        seen = b""

        def until(shown: bytes) -> None:
            nonlocal seen
            while shown not in seen:
                seen += os.read(master, 4096)

        until(b"ready")
        os.write(master, b"\x03")
        until(b"2\r\n")
        # It is passed on after a second interrupt would have been.
        process.send_signal(signal.SIGUSR1)
        until(b"10\r\n")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    os.close(master)
    assert re.findall(rb"\d+\r\n", seen) == [b"2\r\n", b"10\r\n"]


def test_a_torch_that_cannot_be_redirected(run, reported, tmp_path) -> None:
    """It is reported at once and in the report, and the script goes on."""
    package = tmp_path / "here/torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import serialization\n")
    (package / "serialization.py").write_text("")
    code = "import sys, torch; print(1, file=sys.stderr); sys.exit(4)"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 4
    noted = "torch.serialization is not redirected: AttributeError"
    assert f"iobench exec: {noted}" in done.stderr.partition("\n1\n")[0]
    (problem,) = reported()["problems"]
    assert problem.startswith(noted)
    assert reported()["processes"] == 1


def test_a_python_without_iobench(run, reported) -> None:
    """The script runs, and a line says that nothing is redirected in it."""
    other = Path(sys.executable).resolve()
    known = subprocess.run([other, "-c", "import iobench"], cwd="/", stderr=-1, check=False)
    if known.returncode == 0:
        pytest.skip("the interpreter under this environment has iobench too")
    done = run(other, "-c", "import sys; sys.exit(3)")
    assert done.returncode == 3
    (problem,) = reported()["problems"]
    assert "cannot load iobench, nothing is redirected" in problem
    assert problem in done.stderr


def test_a_report_that_cannot_be_written(iobench_inside, tmp_path, monkeypatch) -> None:
    """The disk is full once the script has ended: the error names the option and the file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launch, "write_report", full)
    report = tmp_path / "report.json"
    done = iobench_inside("exec", "--config", "buffered", "--report", report, "--", "true")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "writing --report: No space left on device" in last
    assert str(report) in last


def test_a_script_that_is_missing(run) -> None:
    """Python says so, and its exit code is ours."""
    done = run(sys.executable, "no-such-script.py")
    assert done.returncode == 2
    assert "no-such-script.py" in done.stderr
