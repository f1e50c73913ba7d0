"""Begins saves and lets the interpreter end: each line of stdin in a forked child of its own.

A line is "SAVE END DIRECTORY". The answer is the child's exit code. A child leaves the loop and
runs off the end of this file, as any script does: what it saves in the background goes on when the
interpreter refuses executors, and not before.
"""

import atexit
import concurrent.futures.thread
import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
import types

late = []
atexit.register(lambda: [call() for call in late])  # called after all of iobench's

# Before torch, which has weakref register its function of atexit: that one is then called first.
import iobench.writers.blocks.interpreter_end  # noqa: F401, I001 -- its order is the test
import torch
import torch.distributed.checkpoint as dcp

_NOTHING = {
    "lightning.fabric.plugins": ("CheckpointIO",),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": ("CheckpointCommitInfo",),
}
for module, names in _NOTHING.items():  # their base classes: importing these takes seconds
    while module:
        sys.modules.setdefault(module, types.ModuleType(module))
        for name in names:
            setattr(sys.modules[module], name, type(name, (), {}))
        module = module.rpartition(".")[0]


class _StockEngine:
    def __init__(self, config_params: object) -> None:
        pass


sys.modules["deepspeed.runtime.checkpoint_engine.checkpoint_engine"].CheckpointEngine = _StockEngine

from iobench import Checkpointer, linux
from iobench.integrations.dcp import StorageWriter
from iobench.integrations.deepspeed import DecoupledCheckpointEngine
from iobench.integrations.lightning import AsyncCheckpointIO
from iobench.writers.registry import make

torch.set_num_threads(1)  # no pool of OpenMP, which a forked child has not
STATE = {"w": torch.ones(4_000_000)}  # 16 MB: enough for threads
handled = []


def until_the_end() -> None:
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.001)
    if end == "sigterm-later":
        for _ in range(3):
            # Again and again: one that comes just before a wait for a lock does not end the wait.
            before = len(handled)
            while len(handled) == before:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                time.sleep(0.01)
    if end == "fails":
        too_large()


def too_large() -> None:
    """Every file is, from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def save_lightning() -> None:
    global kept
    kept = AsyncCheckpointIO("odirect")
    kept.save_checkpoint(STATE, f"{directory}/file")


def save_checkpointer(writer: str = "odirect", **options: object) -> None:
    global kept
    kept = Checkpointer(directory, writer=writer, **options)
    kept.save_async(STATE, 1)


def save_checkpointer_aiofiles() -> None:
    save_checkpointer("aiofiles")


def save_checkpointer_lazily() -> None:
    save_checkpointer("hybrid", lazy=True)


def save_dcp(writer: str = "odirect") -> None:
    global kept
    kept = dcp.async_save(STATE, storage_writer=StorageWriter(directory, writer), no_dist=True)


def save_dcp_aiofiles() -> None:
    save_dcp("aiofiles")


def save_deepspeed() -> None:
    global kept
    kept = DecoupledCheckpointEngine("odirect")
    kept.create(types.SimpleNamespace(tag="t", save_dir=directory, save_latest=True))
    kept.save(STATE, f"{directory}/t/file")


def save_stream(writer: str) -> None:
    global kept
    kept = make(writer).open(f"{directory}/file")
    torch.save(STATE, kept)
    if end == "flushed":
        kept.write(b"and more")
        kept.flush()


def raise_system_exit(number: int, frame: object) -> None:
    handled.append(number)
    raise SystemExit(0)


gc.freeze()  # the end of an interpreter looks at all that it imported: 1 s with torch
for line in sys.stdin:
    save, end, directory = line.split()
    child = os.fork()
    if not child:
        break
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.stdout.flush()
else:
    sys.exit()

faulthandler.dump_traceback_later(60, exit=True)  # a child that hangs prints its stacks
sys.stdin.close()
os.dup2(os.open(f"{directory}/stderr", os.O_WRONLY | os.O_CREAT), 2)
set_up = StorageWriter.set_up_storage_writer
if end.startswith("sigterm"):
    signal.signal(signal.SIGTERM, raise_system_exit)
begin = too_large if end in ("failed", "dropped") else until_the_end
linux.yield_to_others = lambda _: begin()  # what a thread that saves does first
StorageWriter.set_up_storage_writer = lambda *given, **options: (set_up(*given, **options), begin())

if end == "late":
    late.append(lambda: save_stream(save.removeprefix("stream-")))
elif save.startswith("stream-"):
    save_stream(save.removeprefix("stream-"))
else:
    globals()[f"save_{save}"]()

if end == "failed":
    for thread in threading.enumerate():
        if thread.name.startswith(("iobench-persister", "AsyncCheckpoint")):
            thread.join()
elif end == "dropped":
    del kept
elif end == "exit":
    sys.exit()
elif end == "raises":
    raise ValueError("of the script")
elif end == "killed":
    os.kill(os.getpid(), signal.SIGTERM)
elif end == "sigterm":
    signal.raise_signal(signal.SIGTERM)
