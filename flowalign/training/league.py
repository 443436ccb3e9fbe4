"""`flowalign league`: train several configurations under one budget and compare them over seeds."""

import itertools
import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from scipy.stats import chi2

from flowalign import registry
from flowalign.config import BaseConfig, load
from flowalign.config.diffusion import Evaluation
from flowalign.core.divergences import gaussian_kl
from flowalign.data import Prompts
from flowalign.errors import ConfigError, nearest
from flowalign.evaluation.card import SAMPLING, Card, check_same_protocol, score_card
from flowalign.evaluation.diversity import diversity
from flowalign.evaluation.power import POWER, detectable
from flowalign.evaluation.scores import evaluate, judges
from flowalign.evaluation.statistics import by_prompt, ranks
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.runs.files import write_atomically
from flowalign.runs.reading import read_yaml
from flowalign.training import Trainer
from flowalign.training.resuming import changed
from rewards import Reward, as_reward, score
from samplers import KERNELS, All

matplotlib.use("Agg")
from matplotlib import pyplot

logger = logging.getLogger(__name__)

SEED = 800_000_000
"""First seed of the start noises of the league's evaluation."""
WORLDS = {
    "shapes": (),
    "relations": (
        *("data.prompts=relations_train", "data.where={}", "evaluation.prompts=relations_heldout"),
        *("evaluation.where={}", "rewards=[{name: relations}]"),
    ),
    "spelling": (
        *("model.path=tiny_speller", "data.prompts=spelling_train", "data.where={}"),
        *("evaluation.prompts=spelling_heldout", "evaluation.where={}", "rewards=[{name: spelling}]"),
    ),
}
"""Settings of each world that a league trains in: prompts, a reward of another kind, and the model of words."""
COLUMNS = ("rank", "strict", "soft", "panel", "diversity", "kl", "forwards", "reward_calls", "seconds", "iterations")


@dataclass
class LeagueBudget:
    """Budget of each run of a league, in one of seconds, forwards, reward_calls."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, text: str) -> "LeagueBudget":
        """Read 'seconds=60'."""
        kind, _, amount = text.partition("=")
        try:
            value = float(amount)
            if {"seconds": value > 0, "forwards": value >= 1, "reward_calls": value >= 1}[kind] and value < math.inf:
                return cls(kind, value)
        except (ValueError, KeyError):
            pass
        raise ConfigError(f"--budget {text}: give seconds=60, forwards=100000 or reward_calls=5000")


@torch.no_grad()
def kl_from_base(policy: DiffusersPolicy, prompts: Sequence[str], arguments: dict[str, Any]) -> float:
    """KL of a step's transition from the base's, mean over elements and steps, under Flow-GRPO's SDE for all."""
    eta = All().etas(arguments["steps"], 0.7, 0, 0)
    seeds = list(range(SEED, SEED + len(prompts)))
    rollout = policy.sample(prompts, seeds, kernel=KERNELS["flow_sde"], eta=eta, **arguments)
    samples, steps = rollout.trajectory.mask.nonzero().unbind(1)
    values = []
    for rows, at in zip(samples.split(64), steps.split(64), strict=True):
        policy_step = policy.score(rollout, rows, at)
        with policy.reference():
            base = policy.score(rollout, rows, at)
        values.append(gaussian_kl(policy_step.mean, base.mean, policy_step.std))
    return torch.cat(values).mean().item()


def judge(trainer: Trainer, panel: Reward | None, pictures: int) -> dict[str, Any]:
    """The held-out figures of the current weights, and the means of each prompt, from which ranks are computed."""
    settings, policy = trainer.config.evaluation, trainer.policy
    assert isinstance(settings, Evaluation) and isinstance(policy, DiffusersPolicy), "a league is of pictures"
    prompts = Prompts.of(settings.model_copy(update={"limit": None}))
    with trainer.learner.averaged():
        result = evaluate(trainer.policy, trainer.evaluator.reward, prompts, settings, pictures, SEED)
        means = result.means()["all"]
        figures: dict[str, Any] = {name: means[name] for name in ("strict", "soft", "reward") if name in means}
        strict = result.parts.get("strict", result.value)
        figures["by_prompt"] = [statistics.mean(values) for values in by_prompt(strict, result.prompts)]
        if panel is not None:
            figures["panel"] = score(panel, result.samples, result.prompts, result.metadata).value.mean().item()
        figures["diversity"] = diversity(result).mean
        figures["kl"] = kl_from_base(policy, prompts.spread(32).texts, settings.arguments())
    return figures


def run_league(
    configs: Sequence[Path],
    seeds: int,
    budget: LeagueBudget,
    output: Path,
    panel: str | None,
    overrides: Sequence[str],
    pictures: int,
    world: str = "shapes",
    first_seed: int = 0,
    any_sampling: bool = False,
) -> Path:
    """Train every configuration with every seed under the budget; finished runs in `output` are not repeated.

    Args:
        world: one of `WORLDS`, whose prompts and rewards replace the configurations' own.
        first_seed: first of consecutive seeds; settings are tuned on seeds that are not reported.
        any_sampling: take configurations that sample held-out prompts in different ways; each way has its own base.

    Returns:
        path of the table in Markdown; league.json and league.png are next to it.
    """
    loaded = _loaded(configs, range(first_seed, first_seed + seeds), budget, output, overrides, world)
    for config in loaded.values():
        check_same(config, pictures, panel)
    cards = {name: card_of(config, pictures) for (name, _), config in loaded.items()}
    check_same_protocol(cards, "--set evaluation.rewards=... or evaluation.prompts=... is for all", SAMPLING)
    if not any_sampling:
        check_same_protocol(cards, "--set evaluation.steps=... is for all, --any-sampling takes them as they are")
    results = _results(loaded, cards, output, panel, pictures)
    record = {"budget": vars(budget), "cards": cards, "results": results}
    write_atomically(output / "league.json", json.dumps(record, indent=2))
    _rank(results)
    _plot(results, output / "league.png")
    table = _markdown(results)
    if (seen := could_have_seen(results)) is not None:
        table += f"\n{seen}\n"
    write_atomically(output / "league.md", table)
    print(table)
    return output / "league.md"


def _loaded(
    configs: Sequence[Path], seeds: range, budget: LeagueBudget, output: Path, overrides: Sequence[str], world: str
) -> dict[tuple[str, int], BaseConfig]:
    """The configuration of every run, by its name and seed."""
    if world not in WORLDS:
        raise ConfigError(f"--world {world}: {nearest(world, WORLDS)}")
    amount = budget.amount if budget.kind == "seconds" else int(budget.amount)
    same = [*WORLDS[world], *overrides, f"training.budget.{budget.kind}={amount}", "training.iterations=1000000"]
    loaded = {
        (path.stem, seed): load(
            path, [*same, f"training.seed={seed}", f"output={output}", f"name={path.stem}-seed{seed}"]
        )
        for path in configs
        for seed in seeds
    }
    for config in loaded.values():
        if config.model.kind != "pictures":
            raise ConfigError(
                f"{config.name}: a league compares models of pictures, and this recipe trains one of text"
            )
        config.check(processes=1)
    return loaded


def _results(
    loaded: Mapping[tuple[str, int], BaseConfig],
    cards: Mapping[str, Card],
    output: Path,
    panel: str | None,
    pictures: int,
) -> dict[str, list[dict[str, Any]]]:
    """Figures of the start weights, and of each algorithm's runs; runs without figures are trained."""
    panel_reward = as_reward(registry.build("rewards", panel, {}, "--panel")) if panel else None
    known = output / "base.json"
    bases: dict[str, dict[str, Any]] = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    results: dict[str, list[dict[str, Any]]] = {}
    for (name, _), config in loaded.items():
        done = output / str(config.name) / "league.json"
        if not done.is_file():
            trainer = Trainer(config, resume=(done.parent / "checkpoints").is_dir())
            if judged(config) not in bases:
                bases[judged(config)] = judge(trainer, panel_reward, pictures)
                output.mkdir(parents=True, exist_ok=True)
                write_atomically(known, json.dumps(bases))
            figures = _trained(trainer) | judge(trainer, panel_reward, pictures) | {"judged_with": [pictures, panel]}
            figures["card"] = cards[name]
            write_atomically(done, json.dumps(figures))
        row = json.loads(done.read_text(encoding="utf-8"))
        # runs of a league from before there were cards have none
        mend = "begin the league in a new --output"
        check_same_protocol({str(done.parent): row.get("card", cards[name]), "this league": cards[name]}, mend)
        results.setdefault(name, []).append(row)
    return _start(loaded, bases, known) | results


def _trained(trainer: Trainer) -> dict[str, Any]:
    """Train, and return what the run has used of each budget."""
    trainer.train()
    used = {"forwards": trainer.policy.forwards, "reward_calls": trainer.scorer.calls}
    return used | {"seconds": trainer.spent.seconds, "iterations": trainer.iteration}


def _start(
    loaded: Mapping[tuple[str, int], BaseConfig], bases: Mapping[str, dict[str, Any]], known: Path
) -> dict[str, list[dict[str, Any]]]:
    """Results of the start weights, one for each way of sampling and scoring, since they differ in these."""
    first_with: dict[str, str] = {}
    for (name, _), config in loaded.items():
        first_with.setdefault(judged(config), name)
    if missing := first_with.keys() - bases.keys():
        name = first_with[missing.pop()]
        raise ConfigError(
            f"{known}: nothing of the start weights as {name} is judged; begin the league in a new --output"
        )
    alike = len(first_with) == 1
    return {"base" if alike else f"base, as {name}": [bases[by]] for by, name in first_with.items()}


def check_same(config: BaseConfig, pictures: int, panel: str | None) -> None:
    """Refuse a run in the folder that was trained or judged otherwise: the table would show it as this one."""
    run, requested = Path(config.output) / str(config.name), [pictures, panel]
    if (run / "config.yaml").is_file() and (different := changed(read_yaml(run / "config.yaml"), config)):
        raise ConfigError(f"{run} was trained with other settings ({different[0]}); begin the league in a new --output")
    done = run / "league.json"
    if (
        done.is_file()
        and (had := json.loads(done.read_text(encoding="utf-8")).get("judged_with", requested)) != requested
    ):
        raise ConfigError(
            f"{run} was judged with --pictures {had[0]} and --panel {had[1]}; the same ones, or a new --output, work"
        )


def card_of(config: BaseConfig, pictures: int) -> Card:
    """The protocol by which `judge` measures a configuration's run."""
    settings = config.evaluation
    prompts = Prompts.of(settings.model_copy(update={"limit": None}))
    rows = [i for i in range(len(prompts)) for _ in range(pictures)]
    return score_card(
        [prompts.texts[i] for i in rows],
        [prompts.metadata[i] for i in rows],
        range(SEED, SEED + len(rows)),
        settings.arguments(),
        judges(config),
    )


def judged(config: BaseConfig) -> str:
    """Key of the way in which a configuration's pictures are sampled and scored; each key has one base."""
    settings = config.evaluation
    assert isinstance(settings, Evaluation), "a league is of pictures"
    prompts = {name: getattr(settings, name) for name in ("prompts", "where", "limit")}
    return json.dumps({"model": config.model.path} | settings.arguments() | prompts | {"rewards": judges(config)})


def _rank(results: dict[str, list[dict[str, Any]]]) -> None:
    """Add the interval of its rank to each algorithm, if all were judged on the same prompts."""
    judged = [row.get("by_prompt") for rows in results.values() for row in rows]
    if len({len(prompt_means) for prompt_means in judged if prompt_means}) > 1:
        logger.warning("no ranks: evaluation.prompts, where and limit differ; --set evaluation.prompts=... is for all")
    elif all(judged):
        intervals = ranks({name: [row["by_prompt"] for row in rows] for name, rows in results.items()})
        for name, (low, high) in intervals.items():
            results[name][0]["rank"] = f"{low}" if low == high else f"{low}–{high}"


def is_base(name: str) -> bool:
    """True for a row of the table about start weights."""
    return name == "base" or name.startswith("base, as ")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, 0 for one value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _cell(rows: Sequence[dict[str, Any]], column: str) -> str:
    if column == "rank":
        return str(rows[0].get("rank", ""))
    values = [row[column] for row in rows if column in row]
    if not values:
        return ""
    mean, deviation = spread(values)
    if column in ("forwards", "reward_calls", "iterations", "seconds"):
        return f"{mean:,.0f}"
    digits = 5 if column == "kl" else 3
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if len(values) > 1 else "")


def _ordered(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    return sorted(results, key=lambda name: -statistics.mean(row["reward"] for row in results[name]))


def _markdown(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| algorithm | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in _ordered(results):
        lines.append(f"| {name} | " + " | ".join(_cell(results[name], column) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def could_have_seen(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """A sentence about the difference of two algorithms that this many seeds would show; None with one seed.

    The spread of seeds is pooled over the algorithms, so that its chi-squared interval has the freedom of all.
    """
    groups = [[row["reward"] for row in rows] for name, rows in results.items() if not is_base(name)]
    seeds = min(map(len, groups))
    if seeds < 2:
        return None
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    ends = [(squares / chi2.ppf(quantile, freedom)) ** 0.5 for quantile in (0.975, 0.025)]
    deviations = [(squares / freedom) ** 0.5, *ends]
    mean, low, high = (detectable(deviation, seeds) for deviation in deviations)
    return (
        f"With {seeds} seeds each, a difference of {mean:.3f} ({low:.3f} to {high:.3f}) in the held-out reward would "
        f"be found in {POWER:.0%} of the leagues, by the spread of the seeds; of a smaller one the table says little."
    )


def _plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot each algorithm's held-out score over seeds, with the base as a line; the strict score if all have it."""
    strict = all("strict" in row for rows in results.values() for row in rows)
    score, label = ("strict", "held-out strict pass") if strict else ("reward", "held-out reward")
    names = [name for name in reversed(_ordered(results)) if not is_base(name)]
    stats = [spread([row[score] for row in results[name]]) for name in names]
    figure, axis = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.4), layout="constrained")
    means, deviations = [mean for mean, _ in stats], [deviation for _, deviation in stats]
    bars = axis.barh(names, means, xerr=deviations, color="#3b45c4", ecolor="#15181e", height=0.65)
    axis.bar_label(bars, [f"{mean:.3f}" for mean in means], label_type="center", color="white", fontsize=11)
    bases = [name for name in results if is_base(name)]
    for base, style in zip(bases, itertools.cycle(("--", ":", "-.")), strict=False):
        axis.axvline(results[base][0][score], color="#b3441a", linestyle=style, label=base)
    axis.set_xlabel(f"{label} (line: start weights; error bar: standard deviation over seeds)", fontsize=11)
    axis.tick_params(labelsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=11, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=160)
    pyplot.close(figure)
    partial.replace(path)
