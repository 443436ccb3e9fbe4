"""Votes on random pairs against votes on the pairs that are most open, by raters whose noise is known.

    python scripts/compare_vote_order.py [--seeds 16] [--votes 150]

Pictures: the shipped tiny model's, four of each of 200 prompts, with the scores of three rewards and their parts. A
simulated rater's taste is a random weighting of the scores, and a part of each picture that no score sees (`own` is its
share of the variance). Raters choose by Bradley and Terry's model; the standard deviation of the taste, `scale`, says
how sure they are. Half of the prompts are voted on. Bradley and Terry's model is fitted to the votes, and its accuracy
is the share of the other prompts' pairs that it orders as the taste does. "As good after" is the first vote after which
the mean accuracy by open pairs is that of the random ones, with a 95% interval over the seeds of raters.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from flowalign.evaluation.statistics import redrawn
from flowalign.evaluation.voting import BradleyTerry

Array = NDArray[np.float64]


def accuracies(features: Array, how: str, votes: int, seed: int, own: float = 0.25, scale: float = 2.0) -> Array:
    """Held-out accuracy [votes] of a reward after each vote.

    Args:
        features: [prompts, samples, F].
        how: 'random' or 'open'.
        own: share of the taste's variance that no feature sees.
        scale: standard deviation of the taste; the larger, the surer raters are.
    """
    rng = np.random.default_rng(seed)
    prompts, samples, count = features.shape
    deviation = features.std((0, 1))
    scaled = (features / np.where(deviation > 0, deviation, 1)) @ rng.normal(size=count)
    taste = (1 - own) ** 0.5 * scaled / scaled.std() + own**0.5 * rng.normal(size=scaled.shape)
    rows = np.arange(prompts * samples).reshape(prompts, samples)
    one, other = np.triu_indices(samples, 1)
    first, second = rows[:, one].ravel(), rows[:, other].ravel()
    margin = scale * (taste.ravel()[second] - taste.ravel()[first])
    training = np.repeat(rng.permutation(prompts) < prompts // 2, len(one))
    outcome = rng.random(len(margin)) < expit(margin)
    left, heldout = rng.permutation(np.flatnonzero(training)), np.flatnonzero(~training)
    model, asked, curve = BradleyTerry(features.reshape(-1, count), first, second), np.zeros(0, np.intp), []
    for _ in range(votes):
        pair = left[0] if how == "random" else left[model.openness(left).argmax()]
        left, asked = left[left != pair], np.append(asked, pair)
        model.fit(asked, outcome[asked].astype(float))
        curve.append(((model.predict(heldout)[0] > 0) == (margin[heldout] > 0)).mean())
    return np.array(curve)


def pictures(prompts: int, samples: int) -> Array:
    """Scores [prompts, samples, F] of pictures of the shipped model."""
    from flowalign.config import load, recipe
    from flowalign.data import Prompts
    from flowalign.policies.base import best_device
    from flowalign.registry import build
    from flowalign.training.building import build_policy
    from rewards import score

    config = load(recipe("tiny_sd3/flow_grpo"), [])
    policy, data = build_policy(config, best_device()), Prompts.of(config.data).spread(prompts)
    texts = [text for text in data.texts for _ in range(samples)]
    metadata = [record for record in data.metadata for _ in range(samples)]
    images = policy.make(texts, list(range(len(texts))), config.evaluation, metadata)
    columns = []
    for name in ("shapes", "tiny_clip", "jpeg_size"):
        scores = score(build("rewards", name, {}, "rewards"), images, texts, metadata)
        columns += [scores.value, *scores.parts.values()]
    table = np.stack([np.asarray(column, dtype=float) for column in columns], -1)
    return np.nan_to_num(table[:, np.ptp(table, 0) > 0]).reshape(len(data), samples, -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--votes", type=int, default=150)
    arguments = parser.parse_args()
    features = pictures(200, 4)
    print(f"{features.shape[-1]} scores")
    # the mean of all seeds, and those of seeds drawn with replacement
    weights = np.concatenate([np.ones((1, arguments.seeds)), redrawn(arguments.seeds)]) / arguments.seeds
    for own, scale in itertools.product((0.0, 0.25, 0.5), (4.0, 2.0, 1.0)):
        runs = [
            [accuracies(features, how, arguments.votes, seed, own, scale) for seed in range(arguments.seeds)]
            for how in ("random", "open")
        ]
        random, chosen = (weights @ np.array(run) for run in runs)
        cells = []
        for votes in (25, 50, 100, 150):
            needed = [
                int(np.append(after >= goal, True).argmax()) + 1
                for after, goal in zip(chosen, random[:, votes - 1], strict=True)
            ]
            low, high = np.quantile(needed[1:], (0.025, 0.975), method="nearest")
            shown = f"{votes} random {random[0, votes - 1]:.1%}, open {chosen[0, votes - 1]:.1%}"
            cells.append(f"{shown}, as good after {needed[0]} ({low} to {high})")
        print(f"own {own:.2f}, scale {scale:g}", *cells, sep=" | ", flush=True)
