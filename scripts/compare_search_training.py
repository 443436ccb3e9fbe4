"""Best of n beside training: strict pass against a prompt's network forwards, of the shipped tiny SD3 and of what a
recipe makes of it.

The recipe is trained once with each seed, under one budget of forwards. Of each held-out prompt samples are drawn with
the base and with what was trained. The best of every 1, 2, 4, 8 and 16 of them, by the checker or by the tiny CLIP
preference model, is judged by the checker. Training is paid once: after how many pictures it was worth it follows from
its forwards. The base has a standard error over prompts, what was trained a standard deviation over seeds.

    OMP_NUM_THREADS=1 python scripts/compare_search_training.py --seeds 3 --forwards 12500 --output runs/best-of-n

Runs that are done in the folder are not trained again, and an interrupted one goes on.
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

from flowalign.app.loading import load_for_sampling
from flowalign.config import load, recipe
from flowalign.data import ASSETS, Prompts
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from rewards import Reward, score
from rewards.shapes.clip import TinyCLIP
from rewards.shapes.reward import ShapesReward

SAMPLING = Sampling(steps=5, sigmas=[1.0, 0.8, 0.6, 0.4, 0.2], batch_size=64)
BEST_OF = (1, 2, 4, 8, 16)


def trained(name: str, seed: int, forwards: int, output: Path) -> Path:
    """The folder of the run of a recipe, with `forwards.json` where it is done."""
    folder = output / f"{Path(name).name}-seed{seed}"
    if not (folder / "forwards.json").is_file():
        overrides = [f"training.seed={seed}", f"training.budget.forwards={forwards}", "training.iterations=1000000"]
        overrides += ["evaluation.prompts=null", "training.previews=0", f"output={output}", f"name={folder.name}"]
        trainer = Trainer(load(recipe(name), overrides), resume=(folder / "checkpoints").is_dir())
        trainer.train()
        write_atomically(folder / "forwards.json", json.dumps(trainer.policy.forwards))
    return folder


def loaded(run: Path | None) -> Any:
    """The policy of a run, or the base."""
    if run is None:
        # without the padding of a text encoder that it lacks, as the recipes load it
        return DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", encode_options={"max_sequence_length": 0})
    return load_for_sampling(str(run), None, "float32")[0]


def sampled(run: Path | None, prompts: Prompts, n: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """[P, n] strict pass of samples of a run or the base, and by each searched reward's name their scores [P, n]."""
    policy = loaded(run)
    texts = [text for text in prompts.texts for _ in range(n)]
    records: Any = [record for record in prompts.metadata for _ in range(n)]
    with torch.no_grad():
        samples = policy.make(texts, range(seed, seed + len(texts)), SAMPLING, records)
        rewards: dict[str, Reward] = {"checker": ShapesReward(), "tiny CLIP": TinyCLIP()}
        scores = {name: score(reward, samples, texts, records) for name, reward in rewards.items()}
    strict = scores["checker"].parts["strict"].view(-1, n)
    return strict, {name: made.value.view(-1, n) for name, made in scores.items()}


def passed(strict: Tensor, scores: Tensor, n: int) -> list[float]:
    """[P] strict pass of the best by the scores of every n neighbours."""
    best = scores.view(len(scores), -1, n).argmax(-1, keepdim=True)
    rates: list[float] = strict.view(len(scores), -1, n).gather(-1, best).mean((1, 2)).tolist()
    return rates


def row(reward: str, n: int, base: list[float], runs: list[list[float]]) -> dict[str, Any]:
    """Means with their errors, in percent."""
    means = [mean(rates) for rates in runs]
    return {
        "reward": reward,
        "forwards": n * SAMPLING.steps,
        "base": 100 * mean(base),
        "base_error": 100 * stdev(base) / len(base) ** 0.5,
        "trained": 100 * mean(means),
        "trained_spread": 100 * stdev(means) if len(means) > 1 else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny_sd3/nft", help="of the shipped ones")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--forwards", type=int, default=12_500, help="that a training may take")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/best-of-n"), help="folder of the runs and the figures"
    )
    parser.add_argument("--prompts", type=int, help="so many of the held-out prompts, spread over the list")
    parser.add_argument("--category", default="counting", help="of the prompts; what the recipes train")
    parser.add_argument("--samples", type=int, default=64, help="of each prompt, a multiple of 16")
    given = parser.parse_args()
    prompts = Prompts.read("shapes_heldout", {"category": [given.category]}).spread(given.prompts)
    runs = [trained(given.recipe, seed, given.forwards, given.output) for seed in range(given.seeds)]
    drawn = [sampled(run, prompts, given.samples, 10**6) for run in (None, *runs)]
    rows = []
    print("| best by | forwards a picture | base | trained |\n|---|---|---|---|")
    for reward in ("checker", "tiny CLIP"):
        for n in BEST_OF:
            base, *others = (passed(strict, scores[reward], n) for strict, scores in drawn)
            rows.append(made := row(reward, n, base, others))
            figures = "{base:.0f} ± {base_error:.0f} | {trained:.0f} ± {trained_spread:.0f}".format(**made)
            print(f"| {reward} | {made['forwards']} | {figures} |")
    paid = [json.loads((run / "forwards.json").read_text(encoding="utf-8")) for run in runs]
    print(f"trained with {', '.join(map(str, paid))} forwards")
    write_atomically(given.output / "figures.json", json.dumps({"trained_with": paid, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
