"""Measure what it costs to serve a reward, and how much of a served reward's time hides behind sampling.

    python scripts/benchmark_rewards.py                      # a CLIP ViT-B/32 of random weights; the shipped tiny SD3
    python scripts/benchmark_rewards.py --reward '{name: pick_score, dtype: bfloat16}' --size 1024

Served: the same reward in this process and behind `flowalign reward-server` on loopback, in turns, the same --pictures.
The overhead is the median served time over --repeats, divided by the median time in process, less 1; and the same for
the processor time that all processes use together, which other programs on the machine change less.

Overlap: an iteration of Flow-GRPO is sampled here and scored by a server in another process that waits as long for a
picture as sampling it takes, as a model on another device would. Hidden is the share of the scoring's time that the
iteration does not wait for, with the groups in --parts parts (`rollout.overlap`); 1 - 1/parts is the most that can be.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import torch
import uvicorn
import yaml
from PIL import Image

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.data.batches import draw_batch
from flowalign.errors import FlowalignError
from flowalign.rollouts.draw import Draw
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from rewards import FunctionReward, RewardError
from rewards.remote import RemoteReward
from rewards.server import RewardServer
from rewards.shapes.clip import TINY_CLIP


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", help="its name and settings as YAML (clip_score of a random ViT-B/32)")
    parser.add_argument("--pictures", type=int, default=32, help="pictures a call (%(default)s)")
    parser.add_argument("--size", type=int, default=512, help="pixels of a side of them (%(default)s)")
    parser.add_argument("--images", choices=["safetensors", "png"], default="safetensors", help="how they travel")
    parser.add_argument("--parts", type=int, default=8, help="parts of an iteration, of 8 pictures each (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="turns that the medians are over (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    parser.add_argument("--wait", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.wait is not None:
        serve_waiting(arguments.wait)
        return
    try:
        figures = {"served": served(arguments), "overlap": overlap(arguments)}
    except (FlowalignError, RewardError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    one, two = figures["served"], figures["overlap"]
    print(
        f"served: {arguments.pictures} pictures of {arguments.size} pixels, {one['reward']}: in process "
        f"{one['seconds']['in_process']:.3f} s, served {one['seconds']['served']:.3f} s, overhead "
        f"{one['overhead']:+.1%}, in processor time {one['processor_overhead']:+.1%}"
    )
    print(
        f"overlap: {two['pictures']} pictures in {arguments.parts} parts: sampling {two['sampling_seconds']:.2f} s, "
        f"scoring {two['scoring_seconds']:.2f} s, hidden {two['hidden']:.1%} (at most {1 - 1 / arguments.parts:.1%}); "
        f"same values: {two['same_values']}"
    )
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a reward here and behind a server, in turns."""
    rng = np.random.default_rng(0)
    shape = (arguments.size, arguments.size, 3)
    pictures = [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(arguments.pictures)]
    prompts, metadata = [f"picture {i}" for i in range(len(pictures))], [{} for _ in pictures]
    with tempfile.TemporaryDirectory() as name:
        entry = yaml.safe_load(arguments.reward) if arguments.reward else random_clip(Path(name))
        settings = {key: value for key, value in entry.items() if key != "name"}
        reward = registry.build("rewards", entry["name"], settings, "--reward")
        port = free_port()
        config = Path(name) / "reward.yaml"
        config.write_text(yaml.safe_dump({"rewards": [entry], "server": {"port": port}}))
        with process(port, "-m", "flowalign", "reward-server", str(config)) as (url, server):
            remote = RemoteReward(url, images=arguments.images)
            ask: dict[str, Callable[[], torch.Tensor]] = {
                "in_process": lambda: reward(pictures, prompts, metadata).value,
                "served": lambda: remote(pictures, prompts, metadata).value,
            }
            torch.testing.assert_close(ask["served"](), ask["in_process"](), rtol=0, atol=1e-4)
            turns: dict[str, list[tuple[float, float]]] = {side: [] for side in ask}
            for _ in range(arguments.repeats):
                for side, call in ask.items():
                    begin, busy = time.perf_counter(), processor_seconds(server)
                    call()
                    turns[side].append((time.perf_counter() - begin, processor_seconds(server) - busy))
    medians = {side: [statistics.median(column) for column in zip(*own, strict=True)] for side, own in turns.items()}
    seconds, processor = ({side: own[i] for side, own in medians.items()} for i in range(2))
    return {
        "reward": entry["name"] if arguments.reward else "clip_score of a random ViT-B/32",
        "seconds": seconds,
        "processor_seconds": processor,
        "overhead": seconds["served"] / seconds["in_process"] - 1,
        "processor_overhead": processor["served"] / processor["in_process"] - 1,
    }


def processor_seconds(server: subprocess.Popen[bytes]) -> float:
    """Used so far by this process and the server together."""
    return time.process_time() + sum(psutil.Process(server.pid).cpu_times()[:2])


def overlap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect iterations with a served reward that takes as long as sampling, in one part and in many."""
    groups, members = arguments.parts, 8
    overrides = [
        f"training.prompts_per_iteration={groups}",
        f"training.group_size={members}",
        "evaluation.prompts=null",
    ]
    overrides += [f"rollout.batch_size={members}", "rollout.share_start_noise=false"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(load(recipe("tiny_sd3/flow_grpo"), [*overrides, f"output={folder}"]), progress=False)
    batches = [draw_batch(trainer.prompts, i, groups, members, 0, False) for i in range(arguments.repeats + 1)]

    def collect(i: int, parts: int, reward: Any) -> tuple[dict[str, float], list[float]]:
        trainer.scorer.reward, trainer.config.rollout.overlap = reward, parts
        experience = trainer.collect(Draw(trainer.sampler, trainer.scorer, batches[i]))
        return experience.metrics, experience.scores.value.tolist()

    nothing = FunctionReward(lambda images, prompts: [0.0] * len(images), "nothing")
    port = free_port()
    apart, together = [], []
    with process(port, __file__, "--wait", str(port)) as (url, _):
        remote = RemoteReward(url)
        for i, batch in enumerate(batches):
            # how long sampling takes just now, on a machine that may have other work
            pace = collect(i, arguments.parts, nothing)[0]["seconds/rollout"] / len(batch)
            batch.metadata = [{"seconds": pace} for _ in batch.metadata]
            together.append(collect(i, arguments.parts, remote))
            apart.append(collect(i, 1, remote))
    together, apart = together[1:], apart[1:]  # the first is for warming up
    metrics = [own for own, _ in together]
    hidden = [own["seconds/reward_hidden"] / (own["seconds/reward_hidden"] + own["seconds/reward"]) for own in metrics]
    return {
        "pictures": groups * members,
        "sampling_seconds": statistics.median(own["seconds/rollout"] for own in metrics),
        "scoring_seconds": statistics.median(own["seconds/reward"] for own, _ in apart),
        "hidden": statistics.median(hidden),
        "same_values": [values for _, values in together] == [values for _, values in apart],
    }


def random_clip(folder: Path) -> dict[str, Any]:
    """A CLIP ViT-B/32 of random weights, which takes the time of a trained one, with the tokenizer of the tiny CLIP."""
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPConfig, CLIPModel

    torch.manual_seed(0)
    tiny = str(TINY_CLIP)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    CLIPModel(CLIPConfig(text_config=text, vision_config={"patch_size": 32})).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures = AutoImageProcessor.from_pretrained(tiny)
    pictures.size, pictures.crop_size = {"shortest_edge": 224}, {"height": 224, "width": 224}
    pictures.do_center_crop = True
    pictures.save_pretrained(folder)
    return {"name": "clip_score", "model": str(folder)}


def serve_waiting(port: int) -> None:
    """Serve the pictures' brightness, after waiting metadata["seconds"] for each."""

    def brightness(
        samples: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        time.sleep(sum(record["seconds"] for record in metadata))
        return [float(np.asarray(image).mean()) for image in samples]

    uvicorn.run(RewardServer(FunctionReward(brightness)).app, port=port, log_level="warning")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(port: int, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run Python with these arguments until the end of the block: its address, once it serves there, and itself."""
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=os.environ)
    try:
        while True:
            if server.poll() is not None:
                raise ValueError(f"the server ended with status {server.returncode}")
            with contextlib.suppress(httpx2.HTTPError):
                httpx2.get(f"{url}/health", timeout=5)
                break
            time.sleep(0.2)
        yield url, server
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
