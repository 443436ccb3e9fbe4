"""Summary of blind votes: win rates, agreement, and the commands that train on them."""

import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.data.votes import CATCH, FEW, REPEAT, WORTH, plain
from flowalign.errors import ConfigError
from flowalign.evaluation.voting import alpha, fails, more_needed, wilson
from flowalign.runs.reading import read_yaml

DPO = "dpo.yaml"
"""Name of the configuration that trains on the votes, in the folder that `flowalign pairs` made."""


def enough(choices: int) -> str:
    """A sentence on what this number of choices is good for; docs/gallery.md has the measurements behind it."""
    margin = f"a win rate is known to {98 / math.sqrt(choices):.0f} points, and " if choices else ""
    few = f"too few yet to train on ({FEW - choices} more), " if choices < FEW else ""
    return (
        f"{choices} choices so far: {few}{margin}training wants hundreds at least. On a tiny model 50 made it worse, "
        "100 left it as it was, 2,000 helped. With few, train few passes and vote again on the new samples."
    )


def commands(runs: Sequence[Path], gallery: Path, texts: bool) -> list[str]:
    """The command lines that export a gallery's votes and train on them.

    Args:
        runs: folders that the gallery shows; one that `flowalign pairs` made has a configuration for its votes.
        gallery: the gallery's folder.
        texts: the votes are on texts.
    """
    votes = gallery / "votes.jsonl"
    lines: list[list[Path | str]] = [["gallery", *runs, "--output", gallery, "--export", votes]]
    if texts:
        lines += [["pair-questions", votes, "--template", "text_better", "--out", gallery / "questions.jsonl"]]
    else:
        lines += [["train", *_recipe(runs[0]), f"data.prompts={votes}"]]
        lines += [["train-reward", votes, "--out", gallery / "reward"]]
    return [shlex.join(["flowalign", *map(str, words)]) for words in lines]


def decided(successes: float, trials: int) -> str:
    """A sentence on how many more votes tell which of two moments is better."""
    needed = more_needed(successes, trials)
    if needed is None:
        return "The votes tell which moment is better."
    fewest, staying = needed
    if staying is None:
        return f"The votes cannot tell which moment is better; {fewest} more at least would."
    return (
        f"The votes cannot tell yet which moment is better. If the win rate stays at {successes / trials:.0%}, "
        f"{staying} more would; at the end of its interval {fewest}."
    )


def failed(rater: str, right: int, pairs: int, choices: int) -> str:
    """A sentence on a rater whose answers on pairs with a broken sample say that they do not look."""
    return (
        f"{rater} took the broken sample, or a tie, in {pairs - right} of {pairs} catch trials. Who looks hardly "
        f"does: leave the {choices} choices of this rater out (data.where names the raters to keep)."
    )


def _recipe(run: Path) -> list[Path | str]:
    """The configuration that trains a run's model by DPO, with the settings that it needs."""
    if (run / DPO).is_file():
        return [run / DPO]
    try:
        model = read_yaml(run / "config.yaml")["model"]["path"]
    except (ConfigError, KeyError, TypeError):
        return ["sd3/dpo"]
    return ["tiny_sd3/dpo"] if model == "tiny_sd3" else ["sd3/dpo", f"model.path={model}"]


BETWEEN = 200
"""Most pairs of raters in the results: those who judged most pictures in common."""


def agreement(verdicts: Mapping[str, Mapping[str, str]], most: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Agreement of two raters on the pairs that both judged: its share, and Cohen's kappa with its interval.

    Kappa is None where chance alone would always agree. The 95% interval is that of the share (Wilson), with the
    agreement by chance as it is.

    Args:
        verdicts: {rater: {pair: verdict}}.
        most: how many couples of raters to return, those with most pairs in common; all if None.

    Returns:
        The couples in the order of their names, and how many more have pairs in common.
    """
    raters = sorted(verdicts)
    pairs = {pair: i for i, pair in enumerate(sorted({pair for votes in verdicts.values() for pair in votes}))}
    one_hot = np.zeros((len(WORTH), len(raters), len(pairs)))
    kinds = {verdict: i for i, verdict in enumerate(WORTH)}
    for row, rater in enumerate(raters):
        for pair, verdict in verdicts[rater].items():
            if verdict in kinds:
                one_hot[kinds[verdict], row, pairs[pair]] = 1
    judged = one_hot.sum(0)
    # [raters, raters]
    both = judged @ judged.T
    same = (one_hot @ one_hot.transpose(0, 2, 1)).sum(0)
    # how often the row's rater gave each verdict on pairs that the column's rater judged too
    often = one_hot @ judged.T
    chance = (often * often.transpose(0, 2, 1)).sum(0)
    couples = np.argwhere(np.triu(both, 1))
    kept = np.sort(np.argsort(-both[tuple(couples.T)], kind="stable")[:most])
    agreements = []
    for a, b in couples[kept]:
        count = int(both[a, b])
        share, luck = float(same[a, b]) / count, float(chance[a, b]) / count**2
        ends = (share, *wilson(share * count, count))
        kappa, low, high = (None if luck == 1 else (end - luck) / (1 - luck) for end in ends)
        agreed = {"raters": [raters[a], raters[b]], "pairs": count, "same": share}
        agreements.append(agreed | {"kappa": kappa, "low": low, "high": high})
    return agreements, len(couples) - len(kept)


def results(
    verdicts: Mapping[str, Mapping[str, str]], scores: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]
) -> dict[str, Any]:
    """Win rates of the second pictures, agreement between raters, and agreement of the choices with each reward.

    A pair that several raters judged counts once, with their mean verdict, so that repetition does not make the
    interval narrower.

    Args:
        verdicts: {rater: {pair: verdict}}; keys with `REPEAT` are of pairs shown again, those with
            `CATCH` of pairs whose second sample was broken.
        scores: {pair: (scores of the first picture, scores of the second)}.
    """
    again, caught = (
        {rater: {k: v for k, v in votes.items() if k.endswith(end)} for rater, votes in verdicts.items()}
        for end in (REPEAT, CATCH)
    )
    verdicts = {rater: {k: v for k, v in votes.items() if plain(k)} for rater, votes in verdicts.items()}
    judged: dict[str, list[float]] = defaultdict(list)
    for votes in verdicts.values():
        for pair, verdict in votes.items():
            if verdict != "skip":
                judged[pair].append(WORTH[verdict])
    means = {pair: sum(worth) / len(worth) for pair, worth in judged.items()}
    everything = [verdict for votes in verdicts.values() for verdict in votes.values()]
    raters, failing = [], []
    for rater, votes in sorted(verdicts.items()):
        known = [verdict for verdict in caught[rater].values() if verdict != "skip"]
        right = known.count("first")
        row = {"rater": rater} | _voting(votes, again[rater])
        row["caught"] = {**_rate(right, len(known)), "pairs": len(known)}
        raters.append(row)
        if fails(right, len(known)):
            failing.append(failed(rater, right, len(known), row["wins"] + row["losses"]))
    between, more_between = agreement(verdicts, BETWEEN)
    shared, common = alpha(verdicts)
    return {
        "all": {**_rate(sum(means.values()), len(means)), **_counts(everything)},
        "decided": decided(sum(means.values()), len(means)),
        "raters": raters,
        "failing": failing,
        "alpha": {"pairs": common} | ({"mean": None} if shared is None else vars(shared)),
        "between": between,
        "more_between": more_between,
        "rewards": _agreement_with_rewards(means, scores),
    }


def _voting(votes: Mapping[str, str], again: Mapping[str, str]) -> dict[str, Any]:
    """How a rater voted, and how often alike on pairs that were shown again."""
    worths = [WORTH[v] for v in votes.values() if v != "skip"]
    repeats = [(votes[key.removesuffix(REPEAT)], verdict) for key, verdict in again.items()]
    same = sum(one == other for one, other in repeats)
    repeated = {**_rate(same, len(repeats)), "pairs": len(repeats)}
    return {**_rate(sum(worths), len(worths)), **_counts(list(votes.values())), "again": repeated}


def _agreement_with_rewards(
    means: Mapping[str, float], scores: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """How often the choices of each pair, by their mean verdicts, are those of each reward."""
    names = sorted({name for first, second in scores.values() for name in first.keys() & second.keys()})
    rewards = []
    for name in names:
        agrees = [
            (mean > 0.5) == (second[name] > first[name])
            for pair, mean in means.items()
            for first, second in [scores[pair]]
            if mean != 0.5 and name in first and name in second and first[name] != second[name]
        ]
        # what the watch measures is no opinion
        if agrees and not name.startswith("statistics/"):
            rewards.append({"name": name, **_rate(sum(agrees), len(agrees)), "pairs": len(agrees)})
    return rewards


def _rate(successes: float, trials: int) -> dict[str, float | None]:
    low, high = wilson(successes, trials)
    return {"rate": successes / trials if trials else None, "low": low, "high": high}


def _counts(verdicts: list[str]) -> dict[str, int]:
    names = {"wins": "second", "losses": "first", "ties": "tie", "skipped": "skip"}
    return {name: verdicts.count(verdict) for name, verdict in names.items()}
