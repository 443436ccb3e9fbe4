"""Pictures of a model with a reward for every region, which `srum` learns from (arXiv 2510.12784).

    python scripts/label_regions.py configs/tiny_sd3/flow_grpo.yaml --count 1000 --output runs/regions [KEY=VALUE ...]

The configuration gives model, prompts, the evaluation's sampling, and one reward that says where it is earned:
`vlm_regions`, a judge that returns boxes, or the checker `shapes`. Writes OUTPUT/regions.jsonl, and the pictures beside
it. What no box covers gets the reward `--background`.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from pathlib import Path

from flowalign.config import Config, load
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.base import best_device
from flowalign.runs.files import write_atomically
from flowalign.training.building import build_policy
from rewards import RegionReward


def label_regions(config: Config, count: int, output: Path, background: float = 0.0, seed: int = 0) -> Path:
    """Sample this many pictures and have them judged; returns the file.

    Raises:
        ConfigError: the reward does not say where it is earned.
    """
    reward = build_reward(config.rewards)
    if not isinstance(reward, RegionReward):
        raise ConfigError(f"rewards: '{reward.name}' does not say where it is earned; vlm_regions does, of weight 1")
    policy, prompts = build_policy(config, best_device()), Prompts.of(config.data)
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    size = min(config.evaluation.batch_size, count)
    for iteration in range(-(-count // size)):
        batch = draw_batch(prompts, iteration, size, 1, seed, share_start_noise=False)[: count - len(lines)]
        rollout = policy.sample(batch.prompts, batch.seeds, **config.evaluation.arguments())
        images = policy.decode(rollout, config.evaluation.batch_size)
        judged = reward.regions(images, batch.prompts, batch.metadata)
        for image, prompt, regions in zip(images, batch.prompts, judged, strict=True):
            file = f"pictures/{len(lines):06d}.png"
            image.save(output / file)
            record = {"prompt": prompt, "target": file, "background": background, "regions": [*map(vars, regions)]}
            lines.append(json.dumps(record) + "\n")
    write_atomically(output / "regions.jsonl", "".join(lines))
    return output / "regions.jsonl"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("runs/regions"))
    parser.add_argument("--background", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and the start noises")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    print(label_regions(config, arguments.count, arguments.output, arguments.background, arguments.seed))
