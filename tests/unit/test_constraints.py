"""constraints.txt holds for every supported Python, from its first release on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")


def _pins() -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in _CONSTRAINTS.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): pin for pin in pins}


@functools.cache
def _installed() -> dict[str, Distribution]:
    return {canonicalize_name(one.metadata["Name"]): one for one in distributions()}


def _conflicts(installed: Iterable[Distribution], python: str) -> list[str]:
    """What keeps pip from installing these versions together for a release of Python. The metadata
    of a version are those of all its wheels, so that one Python answers for the others."""
    named = {canonicalize_name(one.metadata["Name"]): one for one in installed}
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    found = []
    for name, one in named.items():
        pythons = one.metadata.get("Requires-Python", "")
        if not SpecifierSet(pythons).contains(python):
            found.append(f"{name} {one.version} needs Python {pythons}")
        extras = one.metadata.get_all("Provides-Extra") or [] if name == "iobench" else []
        for needed in map(Requirement, one.requires or ()):
            other = named.get(canonicalize_name(needed.name))
            markers = needed.marker is None or any(
                needed.marker.evaluate(environment | {"extra": extra}) for extra in ["", *extras]
            )
            if other and markers and not needed.specifier.contains(other.version, prereleases=True):
                found.append(f"{name} {one.version} needs {needed}, not {other.version}")
    return found


@pytest.mark.parametrize("python", _PYTHONS)
def test_the_pins_can_be_installed(python: str) -> None:
    """Debian 12 has Python 3.11.2: a package that needs 3.11.5 would end `make test` there."""
    pins = _pins()
    installed = _installed()
    others = [
        f"{pin} (installed: {installed[name].version})"
        for name, pin in pins.items()
        if name in installed and not pin.specifier.contains(installed[name].version)
    ]
    if others:
        pytest.skip(f"not the versions of constraints.txt: {', '.join(others)}; run make setup")
    judged = [one for name, one in installed.items() if name in pins or name == "iobench"]
    assert len(judged) > 100
    assert _conflicts(judged, python) == []


def _distribution(site: Path, name: str, *metadata: str) -> Distribution:
    info = site / f"{name}-2.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 2.0", *metadata, ""]
    (info / "METADATA").write_text("\n".join(lines))
    return Distribution.at(info)


def test_conflicts_are_found(tmp_path: Path) -> None:
    """The first releases of a Python count, and requirements for it alone."""
    both = [
        _distribution(tmp_path, "soup", "Requires-Python: >=3.11.5"),
        _distribution(tmp_path, "page", 'Requires-Dist: soup<2; python_version >= "3.14"'),
    ]
    assert _conflicts(both, "3.11.0") == ["soup 2.0 needs Python >=3.11.5"]
    assert _conflicts(both, "3.12.0") == []
    (found,) = _conflicts(both, "3.14.0")
    assert re.fullmatch(r"page 2\.0 needs soup<2; .*, not 2\.0", found)


def test_every_supported_python_is_named() -> None:
    """In the package's classifiers, and in the workflow that runs the tests."""
    project, workflow = _text("pyproject.toml"), _text(".github/workflows/ci.yml")
    pythons = [python.rpartition(".")[0] for python in _PYTHONS]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == pythons
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r'"([^"]+)"', matrix) == pythons


def test_a_commit_is_checked_as_by_make() -> None:
    """The hooks of pre-commit are the commands of `make check`."""
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", _text("Makefile"), re.MULTILINE)
    hooks = re.findall(r"entry: \.venv/bin/(.*)", _text(".pre-commit-config.yaml"))
    assert hooks == [line.strip().removeprefix("$(bin)/") for line in recipe.splitlines()]


def _text(name: str) -> str:
    return (_CONSTRAINTS.parent / name).read_text()
