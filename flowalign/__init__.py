"""flowalign: align diffusion and flow models with rewards."""

import os

# Threads that wait for others sleep. By default they spin, and a run beside other busy processes takes many times as
# long. GNU's OpenMP, which torch's wheels bring, reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
