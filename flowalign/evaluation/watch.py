"""A watch on reward hacking: the trained reward rises while rewards that were never trained on fall.

`Panel` scores the pictures of each evaluation with further rewards and image statistics; `watched` adds to the line of
an evaluation the verdict of `diagnose` on it and all lines before. All state is in these lines, so runs can be resumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from safetensors.numpy import load_file, save_file

from flowalign.config import Watch
from rewards import Metadata, Reward, Scores, Sound, Spec, advance, as_reward, bind, groups, score, seen, sides, spec_of
from rewards.compose import joined, labels
from rewards.rules import STATISTICS, image_statistics, thumbnail, thumbnail_distances

NEAR_DUPLICATE = 0.02  # root mean square difference of thumbnails in [0, 1]
SIGNS = {
    "grid": (1, 0.2, 1.0),
    "saturation": (0, 0.05, 1.0),
    "sharpness": (0, 0.02, 1.0),
    "colour_entropy": (0, 0.1, 0.8),
    "layout_distance": (-1, 0.02, 1.0),
}
"""Statistics that move where a reward is gamed: the direction that counts (1 up, -1 down, 0 both), the least change,
and the least change in standard deviations of the first evaluation's pictures."""
SIGN_ERRORS = 3.0
"""Standard errors that a sign must exceed: there are five of them, looked at in every evaluation."""


class Panel:
    """A reward whose value is the evaluated one's, with the panel's rewards and image statistics as further parts.

    Part `trained`: the trained reward, if another one is evaluated. Parts `panel/<reward>`: rewards never trained on;
    without any, there is no part `trained` either. Parts `statistics/<name>`: the parts of `image_statistics`,
    `near_duplicate` (1 where another picture of the group looks the same), with several prompts `layout_distance` (the
    distance of thumbnails to the nearest picture of another prompt) and, with a folder, `from_base`: the
    distance to the picture that the base model made of the same prompt and noise (left out if a resumed run has
    another number of processes).

    Args:
        reward: the evaluated reward.
        rewards: the panel.
        trained: the trained reward; default the evaluated one.
        folder: the run's folder. The first call counts as the base model's, and its thumbnails are saved there.
        process: number of this process; each has its own pictures.
        processes: number of processes. With several there is no `layout_distance`, which compares all pictures.
    """

    def __init__(
        self,
        reward: Reward,
        rewards: Sequence[Reward],
        trained: Reward | None = None,
        folder: Path | None = None,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.reward, self.name = reward, reward.name
        rewards = [as_reward(entry) for entry in rewards]
        self.others = {f"panel/{label}": entry for label, entry in zip(labels(rewards), rewards, strict=True)}
        if rewards and trained is not None and trained is not reward:
            self.others["trained"] = trained
        self.file = folder / f"base-pictures-{process}.safetensors" if folder else None
        self.processes = processes

    @property
    def spec(self) -> Spec:
        needs = frozenset[str]().union(*(spec_of(entry).needs for entry in (self.reward, *self.others.values())))
        # where the reward takes latents or sounds, the statistics still need the pictures
        looked_at = set() if sides(needs) == ["picture"] else {"image"}
        return Spec(needs | looked_at, kind="set", deterministic=False)

    def advance(self, progress: float) -> None:
        """Tell the schedules inside how far training is, in [0, 1]."""
        for entry in (self.reward, *self.others.values()):
            advance(entry, progress)

    def bind(self, model: object) -> None:
        """Pass on the language model in training."""
        for entry in (self.reward, *self.others.values()):
            bind(entry, model)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.reward, samples, prompts, metadata)
        parts, judged = dict(scores.parts), {self.name: scores}
        for label, entry in self.others.items():
            judged[label] = score(entry, samples, prompts, metadata)
            parts[label] = judged[label].value
        scores = replace(scores, replies=joined(judged))
        if isinstance(seen(samples[0]), str | Sound):
            # a text or a sound has no image statistics
            return replace(scores, parts=parts)
        # the statistics of a video are its middle frame's
        views = [seen(sample) for sample in samples]
        images = [view if isinstance(view, Image) else view[len(view) // 2] for view in views]
        rows = [image_statistics(image) for image in images]
        parts |= {f"statistics/{name}": torch.tensor([row[name] for row in rows]) for name in STATISTICS}
        duplicates = torch.zeros(len(images))
        for members in groups(prompts, metadata):
            distance = thumbnail_distances([images[i] for i in members]) + np.diag(np.full(len(members), np.inf))
            duplicates[members] = torch.from_numpy((distance.min(axis=1) < NEAR_DUPLICATE).astype(np.float32))
        parts["statistics/near_duplicate"] = duplicates
        if self.processes == 1 and len(set(prompts)) > 1:
            names = np.array(prompts)
            distance = np.where(names[:, None] == names, np.inf, thumbnail_distances(images))
            parts["statistics/layout_distance"] = torch.from_numpy(distance.min(axis=1)).float()
        if self.file is not None:
            small = np.stack([thumbnail(image) for image in images]).astype(np.float32)
            base = _base_thumbnails(self.file, small)
            if base.shape == small.shape:
                distance = np.sqrt(((small - base) ** 2).mean(axis=(1, 2, 3)))
                parts["statistics/from_base"] = torch.from_numpy(distance)
        return replace(scores, parts=parts)


def _base_thumbnails(file: Path, thumbnails: NDArray[np.float32]) -> NDArray[np.float32]:
    """Read the thumbnails in the file; without a file, write these thumbnails first."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"thumbnails": thumbnails}, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    return load_file(file)["thumbnails"]


@dataclass(frozen=True)
class WatchVerdict:
    """Verdict on all evaluations so far."""

    status: Literal["good", "suspect", "hacked", "stalled"]
    """Judgement; suspect: the last evaluation looks hacked, or its pictures have `signs` of it; hacked: `patience`
    evaluations in a row look hacked; stalled: `early_stop` evaluations in a row were no better than the best before."""
    message: str
    last_good: int
    """Iteration of the last evaluation before those that look hacked; with `early_stop` or `keep_best`, of
    the best one until then."""


def watched(
    line: Mapping[str, Any],
    value: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    earlier: Sequence[Mapping[str, Any]],
    rule: Watch,
) -> tuple[dict[str, Any], WatchVerdict]:
    """Add the watch's record and verdict to the line of an evaluation, and a warning if the verdict is not good.

    Args:
        line: the evaluation's metrics, at least `iteration`.
        value, parts: scores of all pictures, as in `Evaluated`.
        earlier: lines of the evaluations before, as this function returned them.
        rule: definition of a hacked evaluation.
    """
    now = record(line["iteration"], value, parts)
    records = [entry["watch"] for entry in earlier if "watch" in entry]
    verdict = diagnose([*records, now], rule)
    warnings = {"warnings": [verdict.message]} if verdict.status in ("suspect", "hacked") else {}
    return {**line, "watch": now, "verdict": verdict.status, **warnings}, verdict


def record(iteration: int, value: Sequence[float], parts: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Record of one evaluation for `diagnose`: mean and standard error of the evaluated reward, of the trained reward
    if it is another one, of each of the panel's, and of the `SIGNS`, these with the standard deviation of pictures.

    Args:
        value, parts: scores of all pictures, as in `Evaluated`.
    """
    columns = {"reward": value}
    columns |= {name: values for name, values in parts.items() if name == "trained" or name.startswith("panel/")}
    entries: dict[str, Any] = {"iteration": iteration}
    entries |= {name: _mean_and_error(values) for name, values in columns.items()}
    for name in SIGNS:
        values = parts.get(f"statistics/{name}", [])
        if len(values) > 1:
            entries[f"statistics/{name}"] = _mean_and_error(values) | {"deviation": stdev(values)}
    return entries


def _mean_and_error(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "error": stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0}


NOTHING_SEEN = WatchVerdict("good", "", 0)


def diagnose(records: Sequence[Mapping[str, Any]], rule: Watch) -> WatchVerdict:
    """Tell whether the run is hacking its reward.

    An evaluation looks hacked when at least `rule.share` of the panel's rewards are each below their best earlier
    evaluation, while the reward (trained or evaluated) is above its value there, both by more than
    `rule.deviations` standard errors of the difference. `rule.patience` of them in a row are called hacked. With
    `rule.early_stop` the verdict also says when the evaluated reward, or what `rule.best_by` names, has stopped rising.
    `signs` alone make an evaluation suspect, never hacked: they say that pictures changed, not that they are worse.

    Args:
        records: results of `record`, in order of iteration.
    """
    fallen = [_fallen(records[: i + 1], rule.deviations) for i in range(len(records))]
    panel = [name for name in records[-1] if name.startswith("panel/")]
    looks = [bool(panel) and len(names) >= rule.share * len(panel) and bool(names) for names in fallen]
    streak = next((i for i, bad in enumerate(reversed(looks)) if not bad), len(looks))
    last = max(len(records) - 1 - streak, 0)
    if rule.returns_best:
        last = max(range(last + 1), key=lambda i: _mean_of(records[i], rule.best_by))
    last_good = records[last]["iteration"]
    if not streak and rule.early_stop is not None and len(records) - 1 - last >= rule.early_stop:
        message = f"no evaluation since the one at iteration {last_good} scored higher"
        return WatchVerdict("stalled", message, last_good)
    if not streak and (changes := signs(records)):
        message = f"the pictures have changed as those of a gamed reward do: {', '.join(changes)}"
        return WatchVerdict("suspect", message, last_good)
    if not streak:
        return WatchVerdict("good", "", last_good)
    names = ", ".join(name.removeprefix("panel/") for name in fallen[-1])
    message = (
        f"the reward rises while {names} {'falls' if len(fallen[-1]) == 1 else 'fall'}, in the last {streak} "
        f"evaluation{'s' if streak > 1 else ''}; the last good one was at iteration {last_good}"
    )
    return WatchVerdict("hacked" if streak >= rule.patience else "suspect", message, last_good)


def _mean_of(entry: Mapping[str, Any], name: str) -> float:
    """Mean of an evaluation's reward or of one of its panel's; -infinity where it was not measured then."""
    return float(entry[name]["mean"]) if name in entry else -math.inf


def signs(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Statistics of the last evaluation's pictures that have left those of the first one, with both means.

    One has where its mean moved by more than `SIGN_ERRORS` standard errors of the difference, and by more than its
    limit in `SIGNS`, 0.8 or 1 standard deviation of the first evaluation's pictures. The means of two sets of 80 clean
    pictures are at most 0.7 of it apart (docs/instruments.md).
    """
    first, last = records[0], records[-1]
    changes = []
    for name, (direction, least, deviations) in SIGNS.items():
        before, after = (entry.get(f"statistics/{name}") for entry in (first, last))
        if before is None or after is None:
            continue
        change = after["mean"] - before["mean"]
        size = change * direction if direction else abs(change)
        beyond_noise = size > SIGN_ERRORS * math.hypot(before["error"], after["error"])
        if size > max(deviations * before["deviation"], least) and beyond_noise:
            changes.append(f"{name.replace('_', ' ')} {before['mean']:.3f} -> {after['mean']:.3f}")
    return changes


def _fallen(records: Sequence[Mapping[str, Any]], deviations: float) -> list[str]:
    """Names of the panel's rewards that fell since their best evaluation, while the trained or evaluated one rose."""
    *earlier, now = records
    names = []
    for name in now:
        # the panel may have changed when the run was resumed
        known = [entry for entry in earlier if name in entry]
        if name.startswith("panel/") and known:
            best = max(known, key=lambda entry: entry[name]["mean"])
            rose = any(
                _above(now[key], best[key], deviations) for key in ("reward", "trained") if key in now and key in best
            )
            if rose and _above(best[name], now[name], deviations):
                names.append(name)
    return names


def _above(first: Mapping[str, float], second: Mapping[str, float], deviations: float) -> bool:
    return first["mean"] - second["mean"] > deviations * math.hypot(first["error"], second["error"])
