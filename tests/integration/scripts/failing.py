"""Saves where something goes wrong; says what became of each."""

import errno
import os
import sys
from unittest import mock

import torch


def attempt(name, *arguments):
    try:
        torch.save(*arguments)
    except Exception as error:
        is_a = [base.__name__ for base in (OSError, RuntimeError) if isinstance(error, base)]
        print(name, *is_a, getattr(error, "errno", None))
    else:
        print(name, "saved")


full, sealed = sys.argv[1:]
large = torch.ones(24 * 2**20)
attempt("full", large, f"{full}/large.pt")
attempt("sealed", {"a": 1}, f"{sealed}/m.pt")
torch.save({"a": 1}, "old.pt")
for mode in (0o600, 0o644, 0o400):
    os.chmod("old.pt", mode)
    attempt("pickle", {"a": lambda: 1}, "old.pt")
    print(torch.load("old.pt"))
os.link("old.pt", "other.pt")
attempt("pickle", {"a": lambda: 1}, "old.pt")
print(torch.load("old.pt"))
missing = FileNotFoundError(errno.ENOENT, "it is not there", "/no/such/directory")
with mock.patch("iobench.formats.torch_image._folder", side_effect=missing):
    attempt("before", {"a": torch.ones(3)}, "before.1.pt")
print(sorted(os.listdir(full)), sorted(os.listdir(sealed)))
