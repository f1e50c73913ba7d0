"""Python imports this when it starts, because `iobench exec` has put it first in PYTHONPATH.

It begins the redirect and makes way for the sitecustomize that would have been imported. It must
work in any Python 3, also one without iobench, and never keep a script from running.
"""

import importlib.machinery
import os
import sys


def _begin() -> None:
    session = os.environ.get("IOBENCH_EXEC")
    if not session or not os.path.isdir(session):
        return  # a process that has outlived its `iobench exec`

    def problem(text: str) -> None:
        """Note for the summary of `iobench exec`, if that is still there, what went wrong."""
        if not os.path.isdir(session):
            return
        try:
            name = f"{os.getpid()}-{os.urandom(4).hex()}.problem"
            with open(os.path.join(session, name), "w") as file:
                file.write(text)
        except OSError as unwritten:
            sys.stderr.write(f"iobench exec: {text}; {unwritten}\n")

    try:
        from iobench.integrations.redirect import process

        process.begin(session, problem)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the script goes on
        reason = f"{type(error).__name__}: {error}"
        problem(f"{sys.executable} cannot load iobench, nothing is redirected in it ({reason})")


def _make_way() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec  # only here: it takes long to load

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_begin()
_make_way()
