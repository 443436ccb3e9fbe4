"""Measure what a server of pictures costs a run: bytes, and seconds of processor and of waiting, a sample.

    python scripts/benchmark_protocol.py
    python scripts/benchmark_protocol.py --iterations 6 --prompts 8 --group 8 --json protocol.json

Two runs of flow_grpo on the shipped tiny SD3 take their iterations in turns, one with `rollout.engine: sglang`, one
without: the same prompts, seeds, batches of one and updates. The server is that of the tests, a process of its own on
this machine, which draws with the same network. Figures are medians over the iterations but the first, in which all
velocities are sent.

- **Run**: seconds of processor of an iteration, of the learner and of the server, and its seconds, over its samples.
- **Weights**: seconds of an iteration for writing the LoRA, handing it over and asking for its checksum.
- **Protocol**: answers that were drawn before go through it once more: packed, sent over a socket and read, one after
  another, in one process. It is what an answer takes besides sampling, on either side.

Samples that are replayed for comparison, and pictures that both sides decode, are in the run and not in the protocol.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import psutil
import uvicorn
from rich.console import Console
from rich.table import Table
from safetensors.torch import load, save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from flowalign.config import Config, recipe
from flowalign.config import load as load_config
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from flowalign.training.engines.rollout_api import SampleRequest, read, unpack
from flowalign.training.engines.servers import Servers
from flowalign.training.engines.sglang import SGLang

ROOT = Path(__file__).parents[1]
SERVER = ROOT / "tests/flowalign/training/engines/protocol_server.py"
PATH = "/rollout/generate"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=4, help="of each run (%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="of an iteration (%(default)s)")
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of the protocol alone (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    arguments = parser.parse_args(argv)
    if arguments.iterations < 2:
        parser.error("--iterations: the first one is not counted; 2 work")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with server() as (url, process):
        figures = benchmark(arguments, url, process)
    print_table(figures)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


@contextlib.contextmanager
def server() -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of the tests' server, which ends with the context."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, SERVER, str(port)], env=environment, stderr=subprocess.DEVNULL)
    try:
        while not listens(port):
            if process.poll() is not None:
                raise SystemExit(f"{SERVER} ended with code {process.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def benchmark(arguments: argparse.Namespace, url: str, process: psutil.Process) -> dict[str, Any]:
    """Every figure.

    Args:
        url, process: the server.
    """
    samples = arguments.prompts * arguments.group
    with tempfile.TemporaryDirectory() as output:
        runs = {
            "without": Trainer(configuration(arguments, output, "without"), progress=False),
            "with": Trainer(configuration(arguments, output, "with", url), progress=False),
        }
        metrics: list[dict[str, float]] = []
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for _ in range(arguments.iterations):
            for name, trainer in runs.items():
                found: list[dict[str, float]] = []
                beside = process if name == "with" else None
                taken[name].append(seconds(lambda t=trainer, f=found: f.append(t.iterate()), beside))
                trainer.iteration += 1
                metrics += found if name == "with" else []
        trainer = runs["with"]
        assert isinstance(trainer.engine, SGLang)
        alone = protocol(trainer, trainer.engine, url, arguments.repeats)
        trainer.engine.close()
    return {
        "samples": samples,
        "steps": trainer.config.rollout.steps,
        "bytes_sent": statistics.median(row["engine/bytes_sent"] for row in metrics[1:]),
        "bytes": statistics.median(row["engine/bytes"] for row in metrics[1:]),
        "bytes_first": metrics[0]["engine/bytes"],
        "run": {
            name: {
                key: statistics.median(row[key] for row in rows[1:]) / samples for key in ("learner", "server", "wall")
            }
            for name, rows in taken.items()
        },
        **alone,
    }


def configuration(arguments: argparse.Namespace, output: str, name: str, url: str | None = None) -> Config:
    """The recipe with settings that a server can draw, each sample in a batch of its own as there."""
    overrides = [
        f"output={output}",
        f"name={name}",
        "rollout.sigmas=null",
        "rollout.share_start_noise=false",
        "rollout.batch_size=1",
        "rewards=[{name: jpeg_size}]",
        "training.old_log_prob=replayed",
        f"training.iterations={arguments.iterations}",
        f"training.prompts_per_iteration={arguments.prompts}",
        f"training.group_size={arguments.group}",
        "training.previews=0",
        "training.checkpoint_every=0",
    ]
    if url is not None:
        overrides.append(f"rollout.engine={{name: sglang, url: '{url}', generator_device: cpu}}")
    config = load_config(recipe("tiny_sd3/flow_grpo"), overrides)
    assert isinstance(config, Config)
    return config


def seconds(work: Callable[[], object], process: psutil.Process | None = None) -> dict[str, float]:
    """Seconds of processor, of this process and of another one, and seconds, that some work takes."""

    def counts() -> tuple[float, float, float]:
        times = None if process is None else process.cpu_times()
        return time.process_time(), 0.0 if times is None else times.user + times.system, time.perf_counter()

    before = counts()
    work()
    return {name: after - at for name, at, after in zip(("learner", "server", "wall"), before, counts(), strict=True)}


def protocol(trainer: Trainer, engine: SGLang, url: str, repeats: int) -> dict[str, Any]:
    """What weights take an iteration, and what answers that are drawn already take a sample."""
    iteration = trainer.iteration
    weights = seconds(lambda: engine.servers.load(url, engine.publish(iteration, trainer.learner.parameters, {})))
    published = engine.publish(iteration, trainer.learner.parameters, {})
    [part] = engine.generate([trainer.groups.draw(iteration).batch], published)
    part.result()
    answers = {asked: engine.servers.client.post(url + PATH, content=asked.content).content for asked in part.asked}
    drawn = {asked.content: loaded(unpack(body)) for asked, body in answers.items()}

    def of_each(work: Callable[[SampleRequest, bytes], object], unit: str = "learner") -> float:
        """Seconds a sample, the median over turns."""
        turns = []
        for _ in range(repeats):
            turn = [seconds(lambda a=asked, b=body: work(a, b))[unit] for asked, body in answers.items()]
            turns.append(statistics.mean(turn))
        return statistics.median(turns)

    with echo(drawn) as address:
        servers = Servers("protocol", [address], timeout=60, retries=0, patience=60)

        def through(asked: SampleRequest, _: bytes) -> None:
            servers.ask(0, PATH, asked.content, None, lambda body: read(body, asked), asked.most)

        of_each(through)
        whole, wall = of_each(through), of_each(through, "wall")
        servers.close()
    packing = of_each(lambda asked, _: msgpack.packb(packed(drawn[asked.content])))
    reading = of_each(lambda asked, body: read(body, asked))
    return {
        "weights": {"learner": weights["learner"], "wall": weights["wall"]},
        "protocol": {"processor": whole, "packing": packing, "reading": reading, "wall": wall},
    }


@contextlib.contextmanager
def echo(drawn: dict[bytes, Any]) -> Iterator[str]:
    """Address of a server in a thread that packs and sends what was drawn for a request."""

    async def answer(request: Request) -> Response:
        return Response(msgpack.packb(packed(drawn[await request.body()])), media_type="application/msgpack")

    port = free_port()
    application = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    serving = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    while not serving.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    serving.should_exit = True
    thread.join()


def loaded(value: Any) -> Any:
    """An answer with its tensors in the place of their bytes."""
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load(value["data"])["t"]
        return {name: loaded(inner) for name, inner in value.items()}
    return [loaded(inner) for inner in value] if isinstance(value, list) else value


def packed(value: Any) -> Any:
    """The answer again, as sglang makes it."""
    if isinstance(value, Tensor):
        data = save({"t": value})
        return {"__tensor__": True, "data": data, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {name: packed(inner) for name, inner in value.items()}
    return [packed(inner) for inner in value] if isinstance(value, list) else value


def print_table(figures: dict[str, Any]) -> None:
    print(
        f"{figures['samples']} samples of {figures['steps']} steps an iteration. Bytes a sample: "
        f"{figures['bytes_sent']:,.0f} asked, {figures['bytes']:,.0f} answered, {figures['bytes_first']:,.0f} in the "
        "first iteration"
    )
    run, alone, weights = figures["run"], figures["protocol"], figures["weights"]
    table = Table("milliseconds a sample", "learner's processor", "server's", "both", "wall")
    for name, row in run.items():
        cells = [row["learner"], row["server"], row["learner"] + row["server"], row["wall"]]
        table.add_row(f"run {name} a server", *(f"{1000 * cell:.1f}" for cell in cells))
    table.add_row("protocol", "", "", f"{1000 * alone['processor']:.2f}", f"{1000 * alone['wall']:.2f}")
    table.add_row("  packing", "", f"{1000 * alone['packing']:.2f}", "", "")
    table.add_row("  reading", f"{1000 * alone['reading']:.2f}", "", "", "")
    Console().print(table)
    print(f"weights, an iteration: {1000 * weights['learner']:.0f} ms of processor, {1000 * weights['wall']:.0f} ms")


if __name__ == "__main__":
    main()
