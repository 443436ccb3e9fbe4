"""Evaluation on held-out prompts: the same prompts and seeds every time, pictures by the ODE."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from flowalign.config import load
from flowalign.config.sections import BaseConfig
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.card import VERSIONS, Card, read_card, score_card
from flowalign.policies.base import Policy
from flowalign.policies.settings import SamplingSettings
from flowalign.rollouts.processes import Processes
from flowalign.runs.files import write_atomically
from flowalign.runs.foreign import read_text
from flowalign.runs.reading import read_yaml
from rewards import Reward, score, seen, spec_of

FOLDER = "scores"
"""Subfolder of a run's folder with the scores of all samples of each evaluation."""


def judges(config: BaseConfig) -> list[dict[str, Any]]:
    """The rewards that judge a run's held-out samples: names, settings and weights; without those of weight 0."""
    return [reward.model_dump() for reward in config.evaluation.rewards or config.rewards if reward.weight]


def scores_of(run: Path, iteration: int) -> Path:
    """The file of a run's scores at an iteration."""
    return run / FOLDER / f"iteration-{iteration:06d}.jsonl"


def card_of(run: Path, iteration: int) -> Card:
    """The score card of a run's scores; of a run from before there were cards, by its configuration and versions."""
    scores = scores_of(run, iteration)
    file = scores.with_suffix(".card.json")
    if file.is_file():
        return read_card(file)
    config, result = load(run / "config.yaml"), Evaluated.read(scores)
    versions = read_yaml(run / "versions.yaml") if (run / "versions.yaml").is_file() else {}
    known = {name: str(versions[name]) for name in VERSIONS if name in versions}
    return result.card(config.evaluation.arguments(), judges(config), known)


@dataclass(kw_only=True)
class Evaluated:
    """Scores of N samples, over all processes, in the order of the prompts."""

    prompts: list[str]
    metadata: list[dict[str, Any]]
    seeds: list[int]
    value: list[float]
    parts: dict[str, list[float]]
    samples: list[Any]
    """Pictures, videos or texts of this process: one process has all; of n processes each has every n-th prompt's."""
    rows: list[int]
    """Numbers of this process's samples among the N."""
    replies: list[dict[str, str]] | None = None
    """Judges' texts about each sample of this process."""

    def save(self, path: Path) -> None:
        """Write a JSON line for each sample of all processes: prompt, seed, metadata, value, parts."""
        names, columns = list(self.parts), list(self.parts.values())
        rows = zip(self.prompts, self.seeds, self.metadata, self.value, *columns, strict=True)
        keys = ("prompt", "seed", "metadata", "reward")
        lines = [dict(zip(keys, row)) | {"parts": dict(zip(names, row[len(keys) :], strict=True))} for row in rows]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))

    def card(
        self,
        sampling: Mapping[str, Any],
        rewards: Sequence[Mapping[str, Any]],
        versions: Mapping[str, str] | None = None,
    ) -> Card:
        """The protocol behind these scores; see `score_card`."""
        return score_card(self.prompts, self.metadata, self.seeds, sampling, rewards, versions)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `save` wrote; it has no samples."""
        try:
            lines = [json.loads(line) for line in read_text(path).splitlines()]
            prompts, seeds = ([line[key] for line in lines] for key in ("prompt", "seed"))
            metadata, value = [dict(line["metadata"]) for line in lines], [float(line["reward"]) for line in lines]
            parts = {name: [float(line["parts"][name]) for line in lines] for name in lines[0]["parts"]}
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise ConfigError(f"{path} is no file of scores as flowalign writes it ({reason})") from error
        return cls(prompts=prompts, metadata=metadata, seeds=seeds, value=value, parts=parts, samples=[], rows=[])

    def lines(self) -> list[tuple[Any, dict[str, Any]]]:
        """This process's samples, each with the line that `save_samples` writes."""
        lines = []
        for number, (i, sample) in enumerate(zip(self.rows, self.samples, strict=True)):
            record = {"prompt": self.prompts[i], "seed": self.seeds[i], "metadata": self.metadata[i]}
            if self.replies is not None:
                record["replies"] = self.replies[number]
            scores = {"reward": self.value[i], **{name: values[i] for name, values in self.parts.items()}}
            lines.append((sample, record | scores))
        return lines

    def means(self, by: str = "category") -> dict[str, dict[str, float]]:
        """Mean value and parts over all samples ('all'), and over the samples with each value of a metadata key."""
        labels = [str(record[by]) if by in record else None for record in self.metadata]
        table: dict[str, dict[str, float]] = {}
        for label in ["all", *sorted({name for name in labels if name is not None})]:
            rows = [i for i, name in enumerate(labels) if label in ("all", name)]
            columns = {"reward": self.value, **self.parts}
            for name, column in columns.items():
                # NaN marks samples that a part does not apply to
                known = [column[i] for i in rows if column[i] == column[i]]
                if known:
                    table.setdefault(label, {})[name] = sum(known) / len(known)
            table[label]["samples"] = len(rows)
        return table


def evaluate(
    policy: Policy[Any],
    reward: Reward,
    prompts: Prompts,
    sampling: SamplingSettings,
    per_prompt: int,
    seed: int,
    processes: Processes | None = None,
) -> Evaluated:
    """Sample each prompt `per_prompt` times, and score the samples.

    Sample n of the list has the generator `torch.Generator().manual_seed(seed + n)`: a picture takes its start noise
    from it, so that plain diffusers makes the same one, and a text draws its tokens from it.
    """
    texts = [text for text in prompts.texts for _ in range(per_prompt)]
    metadata = [record for record in prompts.metadata for _ in range(per_prompt)]
    seeds = list(range(seed, seed + len(texts)))
    process, count = (processes.row, processes.rows) if processes else (0, 1)
    # a prompt's samples stay together, for rewards that look at groups
    rows = [i for i in range(len(texts)) if i // per_prompt % count == process]
    # every process samples the same number, since a sharded network runs on all processes or on none
    share = -(-len(prompts) // count) * per_prompt
    filled = rows + [0] * (share - len(rows))
    forwards = policy.forwards
    records = [metadata[i] for i in filled]
    generated = policy.make(
        [texts[i] for i in filled], [seeds[i] for i in filled], sampling, records, spec_of(reward).needs
    )
    samples = generated[: len(rows)]
    scored: list[tuple[int, float, dict[str, float]]] = []
    replies = None
    if rows:
        records = [metadata[i] | {"group": i // per_prompt, "seed": seeds[i]} for i in rows]
        request = partial(score, reward, samples, [texts[i] for i in rows], records)
        scores = processes.once(request) if processes else request()
        replies = scores.replies
        for row, i in enumerate(rows):
            row_parts = {name: float(values[row]) for name, values in scores.parts.items()}
            scored.append((i, float(scores.value[row]), row_parts))
    # the count is of training alone, so evaluation does not add to it
    policy.forwards = forwards
    if processes:
        scored = processes.gather_objects(scored)
    _, value, columns = zip(*sorted(scored, key=lambda line: line[0]), strict=True)
    parts = {name: [column[name] for column in columns] for name in columns[0]}
    return Evaluated(
        prompts=texts,
        metadata=metadata,
        seeds=seeds,
        value=list(value),
        parts=parts,
        samples=[seen(sample) for sample in samples],
        rows=rows,
        replies=replies,
    )
