"""Preferences between texts that begin alike, for a reward model (a tree of texts, arXiv 2402.10184).

    python scripts/tree_pairs.py configs/tiny_lm/grpo.yaml --pairs 1000 --output runs/tree_pairs.jsonl [KEY=VALUE ...]
    flowalign train-reward runs/tree_pairs.jsonl --texts --model tiny_lm --out runs/reward

A text of each prompt is sampled and cut at a place that is drawn evenly over it, its beginning included; two
continuations from there are a pair, of which the configuration's rewards choose one. What differs between both is then
what follows the cut, at every length. Pairs that score alike are left out.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from pathlib import Path

import torch
from tqdm.auto import tqdm

from flowalign.config import Config, load
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.policies.base import best_device
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import continued
from flowalign.runs.files import write_atomically
from flowalign.training.building import build_policy
from rewards import score


def tree_pairs(config: Config, pairs: int, output: Path, seed: int = 0) -> Path:
    """Sample pairs until this many score differently; returns the file of preferences."""
    policy, reward = build_policy(config, best_device()), build_reward(config.rewards)
    assert isinstance(policy, LanguagePolicy), "the configuration is of a language model"
    prompts, arguments = Prompts.of(config.data), config.evaluation.arguments()
    lines: list[str] = []
    bar = tqdm(total=pairs, desc="pairs")
    random, iteration = torch.Generator().manual_seed(seed), 0
    while len(lines) < pairs:
        batch = draw_batch(
            prompts, iteration, max(1, config.evaluation.batch_size // 2), 2, seed, share_start_noise=False
        )
        first = batch[range(0, len(batch), 2)]
        root = policy.sample(first.prompts, first.noise_seeds, metadata=first.metadata, **arguments)
        prefixes: list[list[int]] = []
        for row, mask in zip(root.completion_ids, root.mask, strict=True):
            tokens = [token for token in row[mask].tolist() if token not in policy.ends]
            cut = int(torch.randint(0, max(1, len(tokens)), (1,), generator=random))
            prefixes += [tokens[:cut]] * 2
        ended = continued(policy, batch.prompts, prefixes, batch.noise_seeds, metadata=batch.metadata, **arguments)
        texts = policy.decode(ended)
        value = score(reward, texts, batch.prompts, batch.metadata).value.tolist()
        for one in range(0, len(batch), 2):
            if value[one] == value[one + 1] or len(lines) == pairs:
                continue
            chosen, rejected = sorted((one, one + 1), key=lambda row: -value[row])
            record = {"prompt": batch.prompts[one], "chosen": texts[chosen], "rejected": texts[rejected]}
            shared = policy.tokenizer.decode(prefixes[one], skip_special_tokens=True)
            lines.append(json.dumps(record | {"shared": shared, "rater": reward.name}) + "\n")
            bar.update()
        iteration += 1
    write_atomically(output, "".join(lines))
    return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("runs/tree_pairs.jsonl"))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order, the texts and the cuts")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    print(tree_pairs(load(arguments.config, arguments.overrides), arguments.pairs, arguments.output, arguments.seed))
