"""Preferences between a model's own texts, for DPO after GRPO (VerIPO's loop, arXiv 2505.19000, after the abstract).

    python scripts/judge_pairs.py configs/tiny_lm/grpo.yaml model.path=RUN/model --judge '{"name": "text_judge", ...}'
    flowalign train configs/tiny_lm/text_dpo.yaml model.path=RUN/model data.prompts=runs/judge_pairs.jsonl

The configuration gives model, prompts, rewards and the evaluation's sampling. Of several texts of a prompt a right one
by the rewards (`--right`) is preferred, the one that the judge likes best, to the worst: a wrong one, or where all are
right the one that the judge likes least. Without a judge the rewards say so too. Other prompts are left out.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from pathlib import Path

from tqdm.auto import tqdm

from flowalign.config import Config, load
from flowalign.config.rewards import build_reward
from flowalign.config.sections import Weighted
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.policies.base import best_device
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.runs.files import write_atomically
from flowalign.training.building import build_policy
from rewards import Reward, score


def judge_pairs(
    config: Config,
    output: Path,
    judge: Reward | None = None,
    pairs: int = 1000,
    texts: int = 8,
    right: float = 0.5,
    passes: int = 10,
    seed: int = 0,
) -> Path:
    """Sample texts until there are this many pairs, or the prompts were gone through `passes` times; returns the file
    of preferences."""
    policy, reward = build_policy(config, best_device()), build_reward(config.rewards)
    assert isinstance(policy, LanguagePolicy), "the configuration is of a language model"
    policy.bind(reward)
    if judge is not None:
        policy.bind(judge)
    prompts, arguments = Prompts.of(config.data), config.evaluation.arguments()
    at_once = min(len(prompts), max(1, config.evaluation.batch_size // texts))
    lines: list[str] = []
    bar = tqdm(total=pairs, desc="pairs")
    for iteration in range(passes * len(prompts) // at_once):
        batch = draw_batch(prompts, iteration, at_once, texts, seed, share_start_noise=False)
        rollout = policy.sample(batch.prompts, batch.noise_seeds, metadata=batch.metadata, **arguments)
        written = policy.decode(rollout)
        value = score(reward, written, batch.prompts, batch.metadata).value.tolist()
        verdict = value if judge is None else score(judge, written, batch.prompts, batch.metadata).value.tolist()
        for start in range(0, len(batch), texts):
            chosen, rejected = chosen_pair(value[start : start + texts], verdict[start : start + texts], right)
            if chosen is None or rejected is None or len(lines) == pairs:
                continue
            best, worst = written[start + chosen], written[start + rejected]
            record = {"prompt": batch.prompts[start], **batch.metadata[start], "chosen": best, "rejected": worst}
            lines.append(json.dumps(record | {"rater": (judge or reward).name}) + "\n")
            bar.update()
        if len(lines) == pairs:
            break
    bar.close()
    if not lines:
        raise SystemExit(
            f"no prompt has a right text and a worse one among {texts}; more --texts or a lower --right works"
        )
    write_atomically(output, "".join(lines))
    return output


def chosen_pair(value: list[float], verdict: list[float], right: float) -> tuple[int | None, int | None]:
    """The place of the right text that the judge likes best, and that of the worst text of all.

    Wrong texts are worse than right ones; within both the judge's verdict counts. None where no text is right, or none
    is worse.
    """
    order = sorted(range(len(value)), key=lambda i: (value[i] >= right, verdict[i]))
    worst, best = order[0], order[-1]
    rank = [(value[i] >= right, verdict[i]) for i in (best, worst)]
    if not rank[0][0] or rank[0] == rank[1]:
        return None, None
    return best, worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--judge", type=json.loads, help="a reward's settings as JSON, such as a text_judge's")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=8, help="texts of a prompt")
    parser.add_argument("--right", type=float, default=0.5, help="reward from which a text is right")
    parser.add_argument("--output", type=Path, default=Path("runs/judge_pairs.jsonl"))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and the texts")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    judge = None if given.judge is None else build_reward([Weighted(**given.judge)])
    settings = {"pairs": given.pairs, "texts": given.texts, "right": given.right, "seed": given.seed}
    print(judge_pairs(load(given.config, given.overrides), given.output, judge, **settings))
