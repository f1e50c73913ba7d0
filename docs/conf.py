"""The docs site: README.md, docs/ and the docstrings. `make docs` builds it with Sphinx.

Every page is plain Markdown, which GitHub shows too. What only the site has is added while a page
is read: the navigation, the docstrings of docs/api/, and the reports of the records.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import chdir
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

from iobench.errors import IobenchError
from iobench.report.kinds import document_of
from iobench.report.page.html import html

ROOT = Path(__file__).parents[1]
SECTIONS = {
    "Start": {
        "install": "",
        "limits": "",
        "which-api": "",
        "migrate": "",
        "troubleshooting": "",
        "glossary": "",
    },
    "Tutorials": {
        "tutorials/which-path": "",
        "tutorials/tune-and-use": "",
        "tutorials/what-does-it-cost": "",
        "tutorials/compare-storage": "",
        "tutorials/write-a-writer": "",
    },
    "Measure": {
        "doctor": "Check a machine",
        "workloads": "",
        "peers": "Other projects",
        "storage": "File systems",
        "filer": "",
        "reliability": "Reliability",
        "report": "",
        "statistics": "",
    },
    "Tune": {"autotune": ""},
    "Use in your trainer": {
        "checkpointer": "",
        "verify": "",
        "load": "",
        "export": "",
        "tiers": "",
        "offload": "",
        "integrations": "",
        "exec": "Unmodified scripts",
        "s3": "",
        "gds": "GPUs",
        "writers-in-your-framework": "",
    },
    "Many nodes": {
        "distributed": "Checkpoints of ranks",
        "replicas": "Replicas in memory",
        "run-over-ranks": "A run over ranks: torchrun, Slurm, MPI, Kubernetes, Ray",
    },
    "Plan": {"plan": "How often to save", "train": "What saves cost training"},
    "Reference": {
        "cli": "Command line",
        "api/README": "",
        "results": "",
        "writers": "Writers",
        "compatibility": "",
        "architecture": "",
    },
    "Figures": {
        "performance": "",
        "reference-runs": "",
        "reproductions": "Published claims",
        "publish": "Add your machine",
    },
    "Project": {
        "decisions/README": "",
        "../CHANGELOG": "",
        "../CONTRIBUTING": "",
        "../SECURITY": "",
    },
}
"""Pages below docs/ by job, with a short title where the page's own is long.

A page in docs/ that is not named here is in a last section, "More".
"""

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU

project = "iobench"
author = "The iobench developers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**"]
# Else Sphinx walks through the virtual environment, and follows the links to the package.
exclude_patterns = [one for one in os.listdir(ROOT) if one not in (*include_patterns, "docs")]
highlight_language = "sh"  # of indented blocks
myst_heading_anchors = 4  # the anchors that GitHub makes
autoclass_content = "both"  # the docstring of __init__ too
autodoc_mock_imports = [name for name in ("dlio_benchmark",) if not find_spec(name)]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
default_role = "literal"  # `name` in docstrings
smartquotes = False  # `--option` is not a dash
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
html_theme = "furo"
html_title = "iobench"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

_WRITERS = "iobench.writers"
_MODULE = re.compile(r"^#+ `(iobench[\w.]*)`\n(?:(?!#).*\n)*", re.MULTILINE)
_RECORD = re.compile(r"\]\((?:\.\./)*results/([\w.-]+)\.jsonl\)")
_PICTURE = re.compile(r'<picture>\n.*\n<img alt="([^"]*)" src="([^"]*)">\n</picture>')
_SPAN = re.compile(r"(`[^`]+`)(?=\w)|`[^`]+`|([^`]+)")
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Connect what the site adds to the pages."""
    app.connect("builder-inited", _add_reports)
    app.connect("source-read", _add)
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-skip-member", _report_undocumented)
    app.connect("build-finished", _add_index)


# The navigation.


def _add(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to `page` what only the site has."""
    # Sphinx copies no images of raw HTML; pages of the site are light.
    source[0] = _PICTURE.sub(r"![\1](\2)", _with_reports(app, page, source[0]))
    if page == root_doc:
        source[0] += "".join(_navigation(app.env.found_docs))
    elif page.endswith("/README"):
        source[0] += _toctree("", ["*"])
    elif page.startswith("docs/api/"):
        source[0] = _MODULE.sub(lambda found: found[0] + _directives(found[1]), source[0])


def _navigation(found: Iterable[str]) -> Iterator[str]:
    named = set()
    for caption, titles in SECTIONS.items():
        pages = {os.path.normpath(f"docs/{name}"): title for name, title in titles.items()}
        named |= {*pages}
        yield _toctree(caption, [f"{pages[one]} <{one}>" if pages[one] else one for one in pages])
    others = (page for page in found if Path(page).parent.name == "docs" and page not in named)
    yield _toctree("More", sorted(others))


def _toctree(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    options = ":hidden:\n:glob:\n" + f":caption: {caption}\n" * bool(caption)
    return "\n".join(["", "```{toctree}", options, *pages, "```", ""])


# The reports.


def _add_reports(app: Sphinx) -> None:
    """Make a report of each published record in results/, where `iobench run` writes others."""
    directory = Path(app.outdir, "reports")
    directory.mkdir(parents=True, exist_ok=True)
    for record in sorted(Path(app.srcdir, "results").glob("reference-*.jsonl")):
        try:
            with chdir(app.srcdir):  # commands in the page name the record by its path
                page = html(document_of([record.relative_to(app.srcdir)]))
        except IobenchError as error:
            _log.warning("no report: %s", error)
        else:
            (directory / f"{record.stem}.html").write_text(page, encoding="utf-8")


def _with_reports(app: Sphinx, page: str, text: str) -> str:
    """Each link to a record that has a report is followed by a link to that."""

    def linked(found: re.Match[str]) -> str:
        path = f"reports/{found[1]}.html"
        if not Path(app.outdir, path).exists():
            return found[0]
        return f'{found[0]} (<a href="{"../" * page.count("/")}{path}">report</a>)'

    return _RECORD.sub(linked, text)


def _add_index(app: Sphinx, error: Exception | None) -> None:
    """A browser that opens the directory looks for index.html."""
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


# The docstrings. They are Markdown: `code`, lists, and indented blocks of code.


def _directives(name: str) -> str:
    """Document the module `name` and its public names.

    Sphinx looks for the comment of a constant only in the module that defines it.
    """
    with mock(autodoc_mock_imports):
        module = import_module(name)
        values = {one: getattr(module, one) for one in vars(module).get("__all__", ())}
    shared = [one for one in values if name != _WRITERS and one in import_module(_WRITERS).__all__]
    homes = {one: _home(one, value) for one, value in values.items() if not _is_object(value)}
    hidden = ", ".join([*shared, *homes])
    rst = [f".. automodule:: {name}", "   :members:", f"   :exclude-members: {hidden}", ""]
    rst += [f".. autodata:: {home}.{one}\n" for one, home in homes.items()]
    if shared:
        rst += [f"Documented in `{_WRITERS}`: "]
        rst += [", ".join(f":py:class:`~{_WRITERS}.{one}`" for one in shared) + "."]
    return "\n".join(["", "```{eval-rst}", *rst, "```", ""])


def _is_object(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)


def _home(name: str, value: Any) -> str:
    """The module that documents the constant `name`."""
    loaded = [one for one in sorted(sys.modules) if one.startswith("iobench")]
    having = [one for one in loaded if vars(sys.modules[one]).get(name) is value]
    for one in having:
        if ("", name) in ModuleAnalyzer.for_module(one).find_attr_docs():
            return one
    _log.warning("%s has no docstring", name)
    return having[0]


def _as_rst(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn the docstring `lines` into what autodoc parses."""
    if not any(lines):
        _log.warning("%s has no docstring", name)
    converted: list[str] = []
    text = code = 0  # the indents of the text above, and of a block of code
    for at, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line and at and not lines[at - 1] and not code and indent >= text + 4:
            converted += ["::", ""]
            code = indent
        if line and indent < code:
            code = 0
        if line and not code:
            text = indent
        converted.append(line if code else _SPAN.sub(_escaped, line))
    lines[:] = converted


def _escaped(found: re.Match[str]) -> str:
    """A span of code as it is, and separated from letters after it; other text escaped."""
    joined, text = found.groups()
    if joined:
        return f"{joined}\\ "
    if text is None:
        return found[0]
    return re.sub(r"([*|\\]|_(?!\w))", r"\\\1", text)


def _report_undocumented(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> None:
    """Autodoc leaves out what has no docstring: report classes, functions and properties."""
    public = _is_object(value) or isinstance(value, property | cached_property)
    if skip and public and not name.startswith("_") and not inspect.getdoc(value):
        _log.warning("%s has no docstring", getattr(value, "__qualname__", name))
