"""Train on pictures of a real server of sglang, and verify what it drew: for a machine with a GPU or more.

    python3 -m venv build/sglang && build/sglang/bin/pip install 'sglang[diffusion]==0.5.23'
    python scripts/train_on_sglang.py --sglang build/sglang/bin/sglang
    python scripts/train_on_sglang.py --print     # the commands alone, which need no GPU

A server is started, and a few iterations of the recipe learn from it with a reward that needs no weights. When it has
ended, every file of rollouts is verified, and the last iteration's metrics of the engine are printed. The exit code is
1 where a file has faults. One GPU is shared, and the server sleeps during updates; of several, the first learns and the
last serves.

The server computes in float32, so that states are not rounded between steps; `--precision bf16` tries its default. A
mean distance of log-probabilities ends no run here: `policy/mismatch` is printed beside the clip range.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import torch

from flowalign.config import load
from flowalign.errors import FlowalignError

VERSION = "0.5.23"
INSTALL = f"python3 -m venv build/sglang && build/sglang/bin/pip install 'sglang[diffusion]=={VERSION}'"
FLOWALIGN = [sys.executable, "-m", "flowalign"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", default="sglang", help=f"program of an environment with sglang {VERSION}")
    parser.add_argument("--config", default="configs/sd3/flow_grpo.yaml", help="recipe (%(default)s)")
    parser.add_argument(
        "settings",
        nargs="*",
        default=["model.encode.max_sequence_length=256"],
        help="further settings of the recipe (%(default)s, to which sglang pads prompts of SD3)",
    )
    parser.add_argument("--iterations", type=int, default=3, help="of training (%(default)s)")
    parser.add_argument("--precision", default="fp32", help="of the server's network: fp32, bf16 (%(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="of the server (%(default)s)")
    parser.add_argument("--patience", type=float, default=1800, help="seconds to wait for the server (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder of the run's folder (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: for a program that needs none")
    parser.add_argument("--print", action="store_true", help="print the commands, and run none")
    arguments = parser.parse_intermixed_args(argv)
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    try:
        serve, train = commands(arguments, gpus)
    except FlowalignError as error:
        parser.error(" ".join(str(error).split()))
    if arguments.print:
        print(f"{shlex.join(serve)}\n{shlex.join(train)}")
        return
    if arguments.device == "cuda" and not gpus:
        parser.error("torch finds no CUDA device here; --print shows the commands")
    trouble = unfit(arguments.sglang)
    if trouble is not None:
        parser.error(trouble)
    sys.exit(run(arguments, serve, train, gpus))


def commands(arguments: argparse.Namespace, gpus: int) -> tuple[list[str], list[str]]:
    """The command that serves, and the one that trains."""
    settings = [
        *arguments.settings,
        "rewards=[{name: jpeg_size}]",
        "rollout.share_start_noise=false",
        "rollout.save_every=1",
        f"rollout.engine={engine(arguments.port, gpus)}",
        "evaluation.prompts=null",
        "training.previews=0",
        f"training.iterations={arguments.iterations}",
        "training.prompts_per_iteration=2",
        "training.group_size=8",
        "training.micro_batch_size=1",
        "training.checkpoint_every=1",
        f"training.keep_checkpoints={arguments.iterations}",
        f"output={arguments.output}",
        "name=on-sglang",
    ]
    config = load(Path(arguments.config), settings)
    address = ["--host", "127.0.0.1", "--port", str(arguments.port), "--strict-ports"]
    precision = ["--dit-precision", arguments.precision]
    serve = [arguments.sglang, "serve", "--model-path", config.model.path, *address, *precision]
    return serve, [*FLOWALIGN, "train", arguments.config, *settings]


def engine(port: int, gpus: int) -> str:
    """The engine's settings, as YAML."""
    values = {"name": "sglang", "url": f"http://127.0.0.1:{port}", "mismatch": None, "share_gpu": gpus == 1}
    return json.dumps(values)


def unfit(program: str) -> str | None:
    """What is wrong with sglang's program, and what helps; None: nothing."""
    found = shutil.which(program)
    if found is None:
        return f"there is no program '{program}'; {INSTALL}, then --sglang build/sglang/bin/sglang"
    ask = "from importlib.metadata import version; print(version('sglang'))"
    told = subprocess.run([Path(found).with_name("python"), "-c", ask], capture_output=True, text=True)
    version = told.stdout.strip()
    return None if version == VERSION else f"{found} is version {version or 'unknown'}; {INSTALL}"


def run(arguments: argparse.Namespace, serve: list[str], train: list[str], gpus: int) -> int:
    """Serve and train, then verify; the exit code."""
    folder = arguments.output / "on-sglang"
    shutil.rmtree(folder, ignore_errors=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    first, last = ({"CUDA_VISIBLE_DEVICES": gpu} if gpus else {} for gpu in (visible[0], visible[-1]))
    with serving(arguments, serve, last):
        begin = time.perf_counter()
        code = told(train, first)
        print(f"training took {time.perf_counter() - begin:.0f} s")
    if code:
        return code
    files = sorted((folder / "rollouts").glob("*.safetensors"))
    verify = [*FLOWALIGN, "verify-rollout"]
    codes = [told([*verify, str(file), "--model", str(folder)]) for file in files]
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in metrics.items():
        if name.startswith(("engine/", "seconds/", "policy/mismatch")):
            print(f"{name}: {value:.6g}")
    return int(any(codes) or len(codes) != arguments.iterations)


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, serve: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Context in which the server answers."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    log = arguments.output / "sglang.log"
    print(shlex.join(serve), f"> {log}", flush=True)
    with open(log, "w") as written:
        process = subprocess.Popen(serve, env=os.environ | environment, stdout=written, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + arguments.patience
        while not healthy(f"http://127.0.0.1:{arguments.port}/health"):
            if process.poll() is not None:
                sys.exit(f"the server ended with code {process.returncode}: {' '.join(log.read_text()[-300:].split())}")
            if time.monotonic() > end:
                sys.exit(f"the server does not answer after {arguments.patience:g} s; {log} says more")
            time.sleep(1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(url: str) -> bool:
    """Whether the server is there and warm; while it warms up it answers with status 503."""
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def told(words: list[str], environment: dict[str, str] | None = None) -> int:
    """Exit code of a command that is shown and run."""
    print(shlex.join(words), flush=True)
    return subprocess.run(words, env=os.environ | (environment or {})).returncode


if __name__ == "__main__":
    main()
