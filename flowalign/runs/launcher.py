"""Who started this process, asked before anything slow is loaded: the launcher may be gone when it matters."""

import os

PROCESS, LAUNCHER = os.getpid(), os.getppid()
