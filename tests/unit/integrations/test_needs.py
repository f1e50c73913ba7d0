"""The message of an integration whose framework is not installed."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from iobench.integrations.needs import needs

_CODE = """
import sys
for framework in ("accelerate", "deepspeed", "dlio_benchmark", "lightning", "transformers"):
    sys.modules[framework] = None
    try:
        __import__(f"iobench.integrations.{framework.removesuffix('_benchmark')}")
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_each_names_what_to_install() -> None:
    """One line with pip's command, for every framework."""
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line, framework in zip(
        lines,
        ("accelerate", "deepspeed", "dlio_benchmark", "lightning", "transformers"),
        strict=True,
    ):
        assert f"needs {framework}: pip install '{framework}" in line


def test_other_failures_are_themselves() -> None:
    """A module that is missing inside the framework is another error."""
    with (
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
        needs("lightning", "lightning"),
    ):
        importlib.import_module("no_such_module")
