"""The same held-out samples of several models, saved for the gallery's slider with their figures and intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.errors import ConfigError
from flowalign.evaluation.diversity import distances
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Interval, means
from flowalign.policies.base import Policy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.runs.files import check_output
from flowalign.runs.slider import SHOWN, SLIDER, Position, save_slider


def check_slider(folder: Path, policy: Policy[Any]) -> None:
    """Refuse texts, and a folder that cannot be written or holds something else than a slider.

    Raises:
        ConfigError: one line that says which.
    """
    if isinstance(policy, LanguagePolicy):
        raise ConfigError("--slider: shows pictures, and the run trained a language model; leave it out")
    check_output(folder, "--slider", folder=True)
    if folder.exists() and not (folder / SLIDER).is_file():
        raise ConfigError(f"--slider: {folder} is there already and has no {SLIDER}; name a new folder")


def save(folder: Path, title: str, results: Mapping[str, Evaluated], names: Sequence[str]) -> None:
    """Write what the models made of the first prompts, and the means over all prompts.

    Args:
        results: results by the labels of the slider's positions, of the same prompts and seeds.
        names: names of the scores to show, 'reward' for the reward itself.
    """
    first = next(iter(results.values()))
    rows = list({prompt: row for row, prompt in reversed(list(enumerate(first.prompts)))}.values())[::-1][:SHOWN]
    positions = [
        Position(
            label=label,
            figures={name: vars(interval) for name, interval in figures(result, names).items()},
            pictures=[result.samples[row] for row in rows],
        )
        for label, result in results.items()
    ]
    save_slider(folder, title, [first.prompts[row] for row in rows], positions)


def figures(result: Evaluated, names: Sequence[str]) -> dict[str, Interval]:
    """The mean of each score and the diversity, with their 95% intervals over prompts."""
    columns = {name: result.value if name == "reward" else result.parts[name] for name in names}
    scores: dict[str, list[dict[str, float]]] = {}
    for row, prompt in enumerate(result.prompts):
        # NaN: the score does not apply to the sample
        scores.setdefault(prompt, []).append({n: v[row] for n, v in columns.items() if v[row] == v[row]})
    # of videos there is no distance
    apart = {} if isinstance(result.samples[0], list) else distances(result)
    for prompt, distance in apart.items():
        scores[prompt].append({"diversity": distance})
    intervals = means(list(scores.values()), names)
    return {name: intervals[name] for name in (*columns, "diversity") if name in intervals}
