"""The script for SLURM, with stand-ins for SLURM's own commands."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm.sh"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do case $1 in *=*) shift;; *) shift 2;; esac; done
SLURM_PROCID=3 SLURM_LOCALID=1 "$@"
"""
PYTHON = """#!/usr/bin/env bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK, $MASTER_ADDR:$MASTER_PORT: $*"
exit $CODE
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "scontrol $*"; fi
"""


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_a_run_that_leaves_with_a_checkpoint_is_put_back_into_the_queue(
    tmp_path: Path, code: int, requeued: bool
) -> None:
    for name, text in {"srun": SRUN, "python": PYTHON, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2"}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SLURM_CPUS_PER_TASK": "32"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "my.yaml", "data.where={kind: [a b]}"],
        env=os.environ | job | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first == "3 of 4, 1, node1:20007: -m flowalign train my.yaml data.where={kind: [a b]} --resume"
    assert rest == (["scontrol requeue 7"] if requeued else [])
