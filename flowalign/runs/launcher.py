"""Ids of this process and of its launcher, taken before slow imports: the launcher may be gone afterwards."""

import os

PROCESS, LAUNCHER = os.getpid(), os.getppid()
