"""Programs that run to their end, with what they print."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any


def captured(
    command: Sequence[str | os.PathLike[str]], *, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run `command` with these arguments of subprocess.run; its stdout and stderr are text."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **how)
