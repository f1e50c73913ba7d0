"""`iobench exec`: an unmodified script's checkpoints over a writer, in all its processes.

`launch` starts the script with `hook/` first in PYTHONPATH. Python imports the `sitecustomize` in
there when it starts, in child processes too; that calls `process.begin`, which watches imports
(`watch`) and replaces the stock functions as soon as their modules are there (`patches`). Each call
goes through a `Redirect` and is counted in the process's `CallCounts`; `launch` adds them up.
"""
