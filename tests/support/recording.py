"""Recording: a writer that reports its files, fails, or kills its process."""

import os
import signal
from typing import Any

from iobench.errors import TransferError
from iobench.writers.odirect import ODirectWriter
from iobench.writers.transfer import Transfer


class Recording(ODirectWriter):
    """Records the files that it writes and reads; may fail, or kill its process, at one of them."""

    def __init__(self, *, fails: str = "", dies: str = "") -> None:
        super().__init__()
        self.written: list[str] = []
        self.read_: list[str] = []
        self.fails, self.dies = fails, dies

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        if image.path == self.fails:
            raise TransferError(28, "No space left on device", image.path)
        if image.path == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.written.append(image.path)
        return super().write(image, target, **options)

    def read(self, image: Any, target: Any, **options: Any) -> Transfer:
        self.read_.append(image.path)
        return super().read(image, target, **options)
