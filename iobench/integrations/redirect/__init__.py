"""`iobench exec`: checkpoints of an unmodified script through a writer, in all its processes.

`launch` starts the script with `hook/` first in PYTHONPATH. Python imports the `sitecustomize` of
this directory when it starts, in child processes too. That module calls `process.begin`, which
watches imports (`Watch`) and replaces the stock functions after their modules are loaded
(`patches`). Each call goes through a `Redirect` and is counted in the `CallCounts` of its process.
`launch` adds these up, and `summary` prints them.
"""
