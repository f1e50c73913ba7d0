"""What is imported must stay light until something heavy is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("torch", "boto3", "pandas", "plotly", "optuna")


@pytest.mark.parametrize(
    "module",
    ["iobench", "iobench.errors", "iobench.units", "iobench.writers", "iobench.writers.registry"],
)
def test_loads_nothing_heavy(module: str) -> None:
    """In a fresh interpreter the module brings in no torch, boto3, pandas, plotly or optuna."""
    code = f"import sys, {module}; print(*[m for m in {_HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_writers_are_light() -> None:
    """Naming, making and probing every writer needs nothing heavy either."""
    code = (
        "import sys; from iobench.writers import registry; "
        "[registry.make(name).available('.') for name in registry.names()]; "
        f"print(*[m for m in {_HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_testing_needs_no_pytest() -> None:
    """The conformance suite loads without any test framework."""
    code = "import sys, iobench.testing; print(*{'pytest', 'hypothesis'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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
