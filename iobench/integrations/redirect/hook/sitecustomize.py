"""Python imports this module when it starts, because `iobench exec` puts it first in PYTHONPATH.

It starts the redirect and then imports the sitecustomize that it hides. It must work in any
Python 3, also in one without iobench, and must never prevent a script from running.
"""

import importlib.machinery
import os
import sys


def _begin() -> None:
    session = os.environ.get("IOBENCH_EXEC")
    if not session or not os.path.isdir(session):
        return  # not under `iobench exec`, or in a process that outlives it

    def problem(text: str) -> None:
        """Record a problem for the summary of `iobench exec`, if that is still running."""
        if not os.path.isdir(session):
            return
        import json  # imported here: it is slow to load

        try:
            with open(os.path.join(session, "calls.jsonl"), "a") as file:
                file.write(json.dumps({"problem": text}) + "\n")
        except OSError as unwritten:
            sys.stderr.write(f"iobench exec: {text}; {unwritten}\n")

    try:
        from iobench.integrations.redirect import process

        process.begin(session, problem)
    except Exception as error:  # noqa: BLE001 -- the script continues after any error
        reason = f"{type(error).__name__}: {error}"
        problem(f"{sys.executable} cannot load iobench, nothing is redirected in it ({reason})")


def _import_hidden() -> None:
    """Take this directory off sys.path and import the sitecustomize that it hides, if any."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec  # imported here: it is slow to load

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_begin()
_import_hidden()
