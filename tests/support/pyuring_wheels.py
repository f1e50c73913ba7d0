"""Where pyuring can be installed. Elsewhere threads take the place of io_uring, with a warning."""

import platform
import sys

WHEELS_OF_PYURING = sys.version_info < (3, 14) and platform.machine() == "x86_64"
