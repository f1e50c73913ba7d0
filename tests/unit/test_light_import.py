"""What is imported must stay light until something heavy is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.slow
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
