"""The scripts for SLURM, with stand-ins for SLURM's own commands."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do case $1 in *=*|--overlap) shift;; *) shift 2;; esac; done
SLURM_PROCID=3 SLURM_LOCALID=1 "$@"
"""
PYTHON = """#!/usr/bin/env bash
if [ -n "$RAY_ADDRESS" ]; then until [ "$(grep -c start "$STARTED")" = 2 ]; do sleep 0.01; done; fi
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK, $MASTER_ADDR:$MASTER_PORT, ${RAY_ADDRESS:-no Ray}: $*"
exit $CODE
"""
RAY = """#!/usr/bin/env bash
echo "ray $*" >> "$STARTED"
if [ "$1" = status ]; then until grep -q -- --head "$STARTED"; do sleep 0.01; done; fi
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "scontrol $*"; fi
"""


def submitted(script: str, folder: Path, code: int) -> list[str]:
    """What a job on two nodes of two GPUs says whose run leaves with this code; its other commands are in `ray.txt`."""
    for name, text in {"srun": SRUN, "python": PYTHON, "scontrol": SCONTROL, "ray": RAY}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2"}
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "CODE": str(code), "SLURM_CPUS_PER_TASK": "32"}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), "my.yaml", "data.where={kind: [a b]}"],
        env=os.environ | job | own | {"STARTED": str(folder / "ray.txt")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
@pytest.mark.parametrize(
    ("script", "learners"),
    [("slurm.sh", "3 of 4, 1, node1:20007, no Ray"), ("slurm_ray.sh", "3 of 2, 1, node1:20008, node1:20007")],
)
def test_a_run_that_leaves_with_a_checkpoint_is_put_back_into_the_queue(
    tmp_path: Path, script: str, learners: str, code: int, requeued: bool
) -> None:
    first, *rest = submitted(script, tmp_path, code)
    assert first == f"{learners}: -m flowalign train my.yaml data.where={{kind: [a b]}} --resume"
    assert rest == (["scontrol requeue 7"] if requeued else [])


def test_the_head_of_ray_has_no_gpus_and_the_other_nodes_give_all(tmp_path: Path) -> None:
    submitted("slurm_ray.sh", tmp_path, 0)
    assert sorted((tmp_path / "ray.txt").read_text().splitlines()) == [
        "ray get-auth-token --generate",
        "ray start --block --disable-usage-stats --address node1:20007 --num-gpus 2",
        "ray start --block --disable-usage-stats --head --port 20007 --num-gpus 0",
        "ray status --address node1:20007",
    ]
