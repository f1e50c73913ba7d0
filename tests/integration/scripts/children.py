"""Saves in processes of all kinds, and by names that were bound before and after."""

import multiprocessing
import os
import subprocess
import sys

import torch
from torch import save


def child(name):
    torch.save({"name": name, "data": torch.arange(9.0)}, f"{name}.pt")


if __name__ == "__main__":
    save({"name": "before", "data": torch.arange(9.0)}, "before.pt")
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", "import children; children.child('program')"], check=True)
    if os.fork() == 0:
        child("killed")
        os.kill(os.getpid(), 9)
    os.wait()
