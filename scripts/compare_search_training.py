"""Best of n beside training: strict pass against a prompt's network forwards, of the shipped tiny SD3 and of runs.

Of each held-out prompt samples are drawn with the base and with what each run trained. The best of every 1, 2, 4, 8 and
16 of them, by the checker or by the tiny CLIP preference model, is judged by the checker. Training is paid once: after
how many pictures it was worth it follows from its forwards. Errors are standard errors over prompts.

    flowalign league configs/tiny_sd3/nft.yaml --seeds 1 --budget forwards=40000 --output runs/nft
    OMP_NUM_THREADS=1 python scripts/compare_search_training.py runs/nft/... --json figures.json
"""

import argparse
import json
import os
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import torch
from torch import Tensor

from flowalign.cli.launch import load_for_sampling
from flowalign.data import ASSETS, Prompts
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.runs.files import write_atomically
from rewards import Reward, score
from rewards.shapes.clip import TinyCLIP
from rewards.shapes.reward import ShapesReward

SAMPLING = Sampling(steps=5, sigmas=[1.0, 0.8, 0.6, 0.4, 0.2], batch_size=64)


BASE = "base"


def loaded(model: str) -> Any:
    if model == BASE:
        # without the padding of a text encoder that it lacks, as the recipes load it
        return DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", encode_options={"max_sequence_length": 0})
    return load_for_sampling(model, None, "float32")[0]


def sampled(model: str, prompts: Prompts, n: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """[P, n] strict pass of samples, and by the name of each searched reward their scores [P, n]."""
    policy = loaded(model)
    texts = [text for text in prompts.texts for _ in range(n)]
    records: Any = [record for record in prompts.metadata for _ in range(n)]
    samples = policy.make(texts, range(seed, seed + len(texts)), SAMPLING, records)
    rewards: dict[str, Reward] = {"checker": ShapesReward(), "tiny CLIP": TinyCLIP()}
    scores = {name: score(reward, samples, texts, records) for name, reward in rewards.items()}
    strict = scores["checker"].parts["strict"].view(-1, n)
    return strict, {name: made.value.view(-1, n) for name, made in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="folders")
    parser.add_argument("--prompts", type=int, help="so many of the held-out prompts, spread over the list")
    parser.add_argument("--category", default="counting", help="of the prompts; what the recipes train")
    parser.add_argument("--samples", type=int, default=64, help="of each prompt, a multiple of 16")
    parser.add_argument("--json", type=Path, default=Path("search_training.json"))
    given = parser.parse_args()
    prompts = Prompts.read("shapes_heldout", {"category": [given.category]}).spread(given.prompts)
    rows: list[dict[str, Any]] = []
    for model in [BASE, *given.runs]:
        strict, searched = sampled(model, prompts, given.samples, 10**6)
        for reward, scores in searched.items():
            for n in (1, 2, 4, 8, 16):
                # of every n neighbours the best
                best = scores.view(len(prompts), -1, n).argmax(-1, keepdim=True)
                passed = strict.view(len(prompts), -1, n).gather(-1, best).mean((1, 2)).tolist()
                own = {"model": model, "reward": reward, "forwards": n * SAMPLING.steps}
                rows.append(own | {"strict": mean(passed), "error": stdev(passed) / len(passed) ** 0.5})
                print(rows[-1], flush=True)
    write_atomically(given.json, json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()
