"""What a prompt rewriter is worth: pictures of the requests as they are, of what they mean, and of what runs rewrite.

    python scripts/measure_rewrites.py runs/tiny_lm-prompt_enhancer-seed0 [RUN ...]

Prompts, rewards and sampling are as in the first run's evaluation; texts are the most probable ones besides.
"""

import argparse
from pathlib import Path

from flowalign.app.loading import load_for_sampling
from flowalign.config import load
from flowalign.config.rewards import build_reward
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.policies.rendering import renderer
from rewards import score


def measure(runs: list[Path]) -> dict[str, dict[str, float]]:
    """The share of pictures of each kind of text that pass every requirement, by category and in all."""
    config = load(runs[0] / "config.yaml")
    reward = build_reward(config.evaluation.rewards or config.rewards)
    drawn = renderer(reward)
    if drawn is None:
        raise ConfigError(f"{runs[0]}: its reward renders no pictures")
    prompts = Prompts.of(config.evaluation)
    seeds = range(config.evaluation.seed, config.evaluation.seed + len(prompts))
    metadata = [record | {"seed": seed} for record, seed in zip(prompts.metadata, seeds, strict=True)]
    texts = {"as requested": prompts.texts}
    if drawn.judged_by is not None:
        texts["as meant"] = [str(record[drawn.judged_by]) for record in prompts.metadata]
    greedy = config.evaluation.model_copy(update={"temperature": 0.0})
    for run in runs:
        for trained in (False, True):
            name = run.name if trained else "before"
            if f"{name}, greedy" not in texts:
                policy, _ = load_for_sampling(str(run), None, config.model.dtype, trained)
                texts[f"{name}, sampled"] = policy.make(prompts.texts, list(seeds), config.evaluation)
                texts[f"{name}, greedy"] = policy.make(prompts.texts, list(seeds), greedy)
    table = {}
    for name, own in texts.items():
        strict = score(reward, own, prompts.texts, metadata).parts["strict"]
        kinds = [str(record.get("category", "all")) for record in prompts.metadata]
        row = {kind: strict[[own == kind for own in kinds]].mean().item() for kind in dict.fromkeys(kinds)}
        table[name] = {"all": strict.mean().item(), **row}
        print(name, " ".join(f"{kind} {share:.1%}" for kind, share in table[name].items()), sep=": ", flush=True)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    measure(parser.parse_args().runs)
