"""The core as a whole."""

import subprocess
import sys


def test_the_core_imports_neither_diffusers_nor_transformers() -> None:

    modules = "advantages, divergences, losses"
    code = (
        f"import sys; from flowalign.core import {modules}; print({{'diffusers', 'transformers'}} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
