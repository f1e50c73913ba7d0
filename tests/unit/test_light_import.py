"""What is imported must stay light until something heavy is needed."""

from __future__ import annotations

import builtins
import importlib
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from iobench.cli.exec import load_when_used

_HEAVY = "torch boto3 pandas altair"
_STEPS = (
    ("import iobench, iobench.errors, iobench.units", f"{_HEAVY} numpy"),
    ("from iobench import workloads; workloads.names()", f"{_HEAVY} numpy pydantic yaml"),
    (
        "from iobench import environment; environment.describe_machine()",
        f"{_HEAVY} numpy rich typer",
    ),
    ("import iobench.results", f"{_HEAVY} numpy rich typer"),
    ("import iobench.cli.show", f"{_HEAVY} numpy"),
    (
        "import iobench.cli.main, iobench.report.render, iobench.report.run",
        "altair jinja2 vl_convert",
    ),
    (
        "from iobench.writers import registry\n"
        "for name in registry.names(): registry.make(name).available('.')",
        _HEAVY,
    ),
    ("import iobench.writers.device.staging", _HEAVY),
    ("import iobench.testing", "pytest hypothesis"),  # the suite needs no test framework
)
"""Each step, and the packages that it and all before it must not load."""


def test_loads_nothing_heavy() -> None:
    """In one fresh interpreter, step after step."""
    code = f"""
import sys
for step, heavy in {_STEPS}:
    exec(step)
    print(step.splitlines()[0], [name for name in heavy.split() if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{step.splitlines()[0]} []" for step, _ in _STEPS]


def test_exec_makes_every_writer_without_numpy() -> None:
    """`iobench exec` defers numpy: a script would start 0.1 s later."""
    code = (
        "import sys; from iobench.cli.exec import load_when_used; load_when_used('numpy'); "
        "from iobench.integrations.default_writer import chosen_writer; "
        "from iobench.integrations.redirect import launch; "
        "from iobench.writers import registry; "
        "made = [registry.make(name) for name in registry.names()]; "
        "before = 'numpy.version' in sys.modules; "
        "import numpy, numpy.typing; "
        "print(len(made), before, numpy.zeros(3).nbytes, sys.modules['numpy'].__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, before, size_bytes, version = done.stdout.split()
    assert (int(count) >= 9, before, size_bytes) == (True, "False", "24")
    assert version == numpy.__version__


def test_a_deferred_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports do not load it, an attribute does, once; then every name of it has all attributes."""
    package = tmp_path / "iobench_deferred"
    package.mkdir()
    (package / "__init__.py").write_text("import builtins\nbuiltins.loaded.append(1)\nvalue = 7\n")
    (package / "part.py").write_text("from iobench_deferred import value\n")
    loaded: list[int] = []
    monkeypatch.setattr(builtins, "loaded", loaded, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        load_when_used("iobench_deferred")
        first, second = (importlib.import_module("iobench_deferred") for _ in range(2))
        assert (loaded, first is second) == ([], True)
        part = importlib.import_module("iobench_deferred.part")
        assert (loaded, part.value, first.value) == ([1], 7, 7)
        load_when_used("iobench_deferred")  # loaded already
        assert importlib.import_module("iobench_deferred").part is first.part is part
        with pytest.raises(AttributeError, match="nothing"):
            _ = first.nothing
        load_when_used("iobench_missing")
        with pytest.raises(ModuleNotFoundError):
            _ = importlib.import_module("iobench_missing").value
    finally:
        for name in [name for name in sys.modules if name.startswith("iobench_deferred")]:
            del sys.modules[name]


@pytest.mark.slow
def test_everything_by_attribute() -> None:
    """After `import iobench` alone all that is public resolves, and dir() lists it."""
    code = """
import iobench
assert {*iobench.__all__} <= {*dir(iobench)}
for name in dir(iobench):
    getattr(iobench, name)
iobench.results.load, iobench.testing.check_writer
for part in (iobench.formats, iobench.integrations):
    assert {*part.__all__} <= {*dir(part)}
iobench.formats.safetensors.save, iobench.integrations.dcp.StorageWriter
for part in (iobench, iobench.formats, iobench.integrations):
    assert not hasattr(part, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
