"""Preferences without people: pairs of samples of a model, the one that a reward scores higher is chosen.

    python scripts/label_pairs.py configs/tiny_sd3/flow_grpo.yaml --pairs 1000 --output runs/pairs [KEY=VALUE ...]

The configuration gives model, prompts, rewards and the evaluation's sampling. Writes OUTPUT/preferences.jsonl,
as the gallery exports votes, and the pictures beside it. Both pictures of a pair have one prompt; pairs that score
alike are left out.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from pathlib import Path

from tqdm.auto import tqdm

from flowalign.config import Config, load
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.policies.base import best_device
from flowalign.runs.files import write_atomically
from flowalign.training.building import build_policy
from rewards import score


def label_pairs(config: Config, pairs: int, output: Path, seed: int = 0) -> Path:
    """Sample pairs until this many score differently; returns the file of preferences."""
    policy = build_policy(config, best_device())
    reward = build_reward(config.rewards)
    prompts = Prompts.of(config.data)
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    bar = tqdm(total=pairs, desc="pairs")
    groups, iteration = max(1, config.evaluation.batch_size // 2), 0
    while len(lines) < pairs:
        batch = draw_batch(prompts, iteration, groups, 2, seed, share_start_noise=False)
        rollout = policy.sample(batch.prompts, batch.seeds, **config.evaluation.arguments())
        images = policy.decode(rollout, config.evaluation.batch_size)
        value = score(reward, images, batch.prompts, batch.metadata).value.tolist()
        for one in range(0, len(batch), 2):
            chosen, rejected = sorted((one, one + 1), key=lambda row: -value[row])
            if value[chosen] == value[rejected] or len(lines) == pairs:
                continue
            record = {"prompt": batch.prompts[one]}
            for name, row in (("chosen", chosen), ("rejected", rejected)):
                record[name] = f"pictures/{len(lines):06d}-{name}.png"
                images[row].save(output / record[name])
            lines.append(json.dumps(record | {"rater": reward.name}) + "\n")
            bar.update()
        iteration += 1
    write_atomically(output / "preferences.jsonl", "".join(lines))
    return output / "preferences.jsonl"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and the start noises")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    print(label_pairs(config, arguments.pairs, arguments.output, arguments.seed))
