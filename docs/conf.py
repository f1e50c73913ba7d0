"""The docs site: README.md and docs/. `make docs` builds it with Sphinx.

Every page is plain Markdown, which GitHub shows too. What only the site has is added while a page
is read: the navigation and the reports of the records.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path

from sphinx.application import Sphinx
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

project = "iobench"
author = "The iobench developers"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**"]
# Else Sphinx walks through the virtual environment, and follows the links to the package.
exclude_patterns = [one for one in os.listdir(ROOT) if one not in (*include_patterns, "docs")]
highlight_language = "sh"  # of indented blocks
myst_heading_anchors = 4  # the anchors that GitHub makes
smartquotes = False  # `--option` is not a dash
html_theme = "furo"
html_title = "iobench"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

_RECORD = re.compile(r"\]\((?:\.\./)*results/([\w.-]+)\.jsonl\)")
_PICTURE = re.compile(r'<picture>\n.*\n<img alt="([^"]*)" src="([^"]*)">\n</picture>')
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Connect what the site adds to the pages."""
    app.connect("builder-inited", _add_reports)
    app.connect("source-read", _add)
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
