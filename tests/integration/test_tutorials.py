"""docs/tutorials/: every command and block runs, in the order of its page, with tiny sizes."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import iobench as package
from iobench.writers import registry

Command = Callable[..., "subprocess.CompletedProcess[str]"]

_DOCS = Path(__file__).parents[2] / "docs"
_STEP = re.compile(r"^    (\w[^\n]*)$|^```(python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`(\w+\.(?:py|toml))`[^`]*:$")  # the name of the file that a block shows
_SMALL = {
    "run": "--size full --no-fio --repeat 1",
    "train": "--size full --steps 4 --every 2 --model-params 100000 --repeat 1",
    "autotune": "--max-time 2h --max-bytes 60MiB --size 1536KiB",
}
"""The tests' sizes, at the end of a command: the last value of an option counts."""
_PRINTED = {
    "doctor": ("free space", "other I/O", "O_DIRECT"),
    "run": ("Save: ", "Restore: ", "CPU s/GiB"),
    "show": ("Save: ", "Restore: "),
    "train": ("stall", "step while persisting", "overhead", "same losses"),
    "plan": ("Save every", "ETTR", "GPU-hours saved/month"),
    "autotune": ("chosen", "baseline", "samples"),
    "exec": ("torch.save", "torch.load"),
    "compare": ("save", "restore"),
    "writers": ("dsync", "yes"),
}
"""What a page advises to look for."""


class Tutorial:
    """The steps of one page, run in a directory `here`."""

    def __init__(self, name: str, here: Path, names: dict[str, str]) -> None:
        self.page = (_DOCS / "tutorials" / f"{name}.md").read_text()
        self.here, self._names, self.commands = here, names, 0

    def run(self, inside: Command, outside: Command) -> None:
        """Run each command, write each file that has a name, execute each other block."""
        for found in _STEP.finditer(self.page):
            line, _, block = found.groups()
            above = self.page[: found.start()].rstrip().rpartition("\n\n")[2]
            file = _FILE.search(above)
            if line is not None:
                self._command(line, inside, outside)
            elif file is not None:
                (self.here / file[1]).write_text(block)
            else:
                exec(compile(block, self.page[:40], "exec"), {})

    def _command(self, line: str, inside: Command, outside: Command) -> None:
        for one, other in self._names.items():
            line = line.replace(one, other)
        program, verb, *words = shlex.split(line)
        if program != "iobench":
            return
        words += shlex.split(_SMALL.get(verb, ""))
        if verb == "autotune" and "--writer" not in words:
            words += ["--writer", "buffered,odirect"]
        if verb == "exec":
            words = ["--report", "exec.json", *words]
        # `exec` replaces the process.
        done = (outside if verb == "exec" else inside)(verb, *words, cwd=self.here)
        # What tiny runs on a busy machine measure may be a regression to `compare`: exit code 5.
        expected = (0, 5) if verb == "compare" else (0,)
        assert done.returncode in expected, (line, done.stderr)
        if "--dry-run" not in words:
            page = verb == "show" and "-o" in words
            for text in ("report: ",) if page else _PRINTED.get(verb, ()):
                assert text in done.stdout + done.stderr, (line, text)
        self.commands += 1


def test_what_to_look_for_exists() -> None:
    """The words at the head of a bullet are printed in these tests, or are in rare messages."""
    source = "".join(path.read_text() for path in (_DOCS.parent / "iobench").rglob("*.py"))
    pages = [path.read_text() for path in sorted((_DOCS / "tutorials").glob("*.md"))]
    words = {word for page in pages for word in re.findall(r"^- `([^`]+)`", page, re.MULTILINE)}
    assert len(words) >= 10
    printed = {text for texts in _PRINTED.values() for text in texts}
    assert not {word for word in words - printed if word not in source}


@pytest.fixture
def tutorial(here, target, tiny_path, monkeypatch) -> Callable[[str], Tutorial]:
    """Makes a Tutorial; the names on its page stand for what this machine has."""
    monkeypatch.chdir(here)
    places = {f"/mnt/{name}": str(target / name) for name in ("nvme", "lustre")}
    for name in (*places.values(), here / "before", here / "after"):
        Path(name).mkdir()
    names = {"llama7b": str(tiny_path), **places}
    if not registry.make("uring").available(places["/mnt/nvme"]).ok:
        names["uring,"] = ""
    return lambda name: Tutorial(name, here, names)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("which-path", {"nvme.jsonl", "nvme.html"}),
        ("what-does-it-cost", {"train.jsonl", "train.html", "nvme.jsonl"}),
        ("compare-storage", {"both.jsonl", "storage.html"}),
    ],
)
def test_commands(name, files, tutorial, iobench_inside, iobench) -> None:
    """Each command of the page succeeds, prints what to look for, and leaves its file."""
    made = tutorial(name)
    made.run(iobench_inside, iobench)
    assert made.commands >= 4
    assert {path.name for path in made.here.iterdir() if path.is_file()} == files


def test_tune_and_use(tutorial, iobench_inside, iobench) -> None:
    """The tuned writer serves an unmodified script, and a Checkpointer."""
    made = tutorial("tune-and-use")
    made.run(iobench_inside, iobench)
    assert made.commands == 4
    assert (made.here / "tune.html").exists()
    assert {path.name for path in (made.here / "runs" / "a").iterdir()} >= {"step-3", "step-6"}
    assert (made.here / "model.pt").stat().st_size > 2**20
    writer = package.load_writer("writer.toml")
    summary = json.loads((made.here / "exec.json").read_text())
    assert summary["writer"] == {"name": writer.name, "options": writer.options.to_dict()}
    for function in ("torch.save", "torch.load"):
        assert summary["functions"][function]["redirected"]["calls"] == 1


@pytest.fixture
def _registered(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `pip install -e .` does, with the module of the reference page."""
    page = (_DOCS / "tutorials" / "write-a-writer.md").read_text()
    (project,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ((name, value),) = tomllib.loads(project)["project"]["entry-points"][registry.GROUP].items()
    module = re.search(r"^```python\n(.*?)^```$", (_DOCS / "writers.md").read_text(), re.M | re.S)
    (here / "my_package").mkdir()
    (here / "my_package" / "dsync.py").write_text(module[1])
    monkeypatch.syspath_prepend(here)
    entry = EntryPoint(name=name, value=value, group=registry.GROUP)
    monkeypatch.setitem(registry._WRITERS.entries, name, entry)
    yield
    for one in ("my_package", "my_package.dsync"):
        sys.modules.pop(one, None)


@pytest.mark.usefixtures("_registered")
def test_write_a_writer(tutorial, iobench_inside, iobench, tmp_path) -> None:
    """It is listed, measured and tuned; the suite itself runs in test_documented.py of writers."""
    made = tutorial("write-a-writer")
    made.run(iobench_inside, iobench)
    assert made.commands == 3
    names: dict[str, Any] = {}
    exec((made.here / "test_dsync.py").read_text(), names)
    names["test_dsync"](package.testing.writer_checks()[0], tmp_path / "suite")
    assert package.load_writer("writer.toml").name in ("dsync", "buffered")
