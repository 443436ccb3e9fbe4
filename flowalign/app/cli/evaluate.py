"""`flowalign eval` and `flowalign watch`: measurements of trained runs."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.modules import find_beside, opened
from flowalign.app.cli.results import print_comparison, suggested
from flowalign.app.cli.sampling import TRUST, check_frames, of_pictures, with_sampling
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.config import BaseConfig, Weighted
    from flowalign.evaluation.card import Card
    from flowalign.evaluation.comparison import Comparison
    from flowalign.evaluation.scores import Evaluated
    from flowalign.policies.base import Policy
    from flowalign.policies.settings import SamplingSettings
    from rewards import Reward

Panel = Annotated[
    list[str] | None,
    typer.Option(help="A reward that was not trained on: a name, or a YAML file with `rewards`; repeat for several."),
]
Pictures = Annotated[int | None, typer.Option(min=1, help="Samples per prompt; default the first run's.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Trust = Annotated[bool, typer.Option("--trust", help=TRUST)]


@with_sampling
def evaluate_runs(
    requested: dict[str, Any],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; the others are compared with the first.")
    ],
    base: Annotated[bool, typer.Option("--base", help="Compare with the first run's model before training.")] = False,
    prompts: Annotated[str | None, typer.Option(help="A file or a shipped list; default the first run's.")] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(help="A name, or a YAML file with `rewards`; repeat for several. Default the first run's."),
    ] = None,
    panel: Panel = None,
    pictures: Pictures = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the first start noise.")] = None,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Score runs on held-out prompts and compare them: the same prompts, start noises and rewards for all.

    Sampling options that are not given are each run's own.
    """
    if base and "rlg" in requested:
        raise ConfigError("--rlg weighs what was trained, which --base takes off; measure one at a time")
    if json_path is not None:
        check_output(json_path, "--json")
    judge = judge_of(runs[0], rewards, panel, trust)
    settings = heldout_of(runs[0], {"prompts": prompts, "samples_per_prompt": pictures, "seed": seed}, trust)
    results = {"base": _evaluate(runs[0], judge, settings, trust, requested, trained=False)} if base else {}
    for name, run in zip(labels_of(runs), runs, strict=True):
        results[name] = _evaluate(run, judge, settings, trust, requested)
    judges = judges_of(runs[0], rewards, panel)
    sampled = dict(zip(results, [runs[0], *runs] if base else runs, strict=True))
    cards = {name: card_of(run, results[name], judges, requested) for name, run in sampled.items()}
    _show(results, json_path, {"cards": cards})
    show_cards(cards)


def judges_of(run: Path, rewards: Sequence[str] | None, panel: Sequence[str] | None) -> list[dict[str, Any]]:
    """Names, settings and weights of the rewards that `judge_of` builds."""
    from flowalign.evaluation import scores

    named = [reward.model_dump() for reward in _named(rewards)] if rewards else scores.judges(_config(run))
    return [*named, *(reward.model_dump() for reward in _named(panel or ()))]


def card_of(
    run: Path, result: "Evaluated", judges: Sequence[Mapping[str, Any]], requested: Mapping[str, Any]
) -> "Card":
    """The score card of samples that `_evaluate` made and scored."""
    return result.card(_config(run).evaluation.asked(requested).arguments(), judges)


def show_cards(cards: "Mapping[str, Card]") -> None:
    """Print the hash of the protocol, and how runs were measured that were not measured alike."""
    from flowalign.evaluation.card import differing

    (first, card), *others = cards.items()
    print(f"score card: {card['sha256'][:12]}")
    for name, other in others:
        if differences := differing(card, other):
            told = "; ".join(f"{key} {values}" for key, values in differences.items())
            print(f"not by one protocol: {first} and {name} ({told})")


def sampled_again(
    runs: Sequence[Path], pictures: int | None, trust: bool, any_sampling: bool = False
) -> "list[Evaluated]":
    """Sample the first run's held-out prompts with every run, and score the samples by the first run's rewards.

    Raises:
        ConfigError: the runs sample in different ways, without `any_sampling`.
    """
    if not any_sampling:
        check_sampling(runs, trust)
    judge = judge_of(runs[0], None, None, trust)
    settings = heldout_of(runs[0], {"samples_per_prompt": pictures}, trust)
    return [_evaluate(run, judge, settings, trust) for run in runs]


def check_sampling(runs: Sequence[Path], trust: bool) -> None:
    """Refuse runs that sample their held-out prompts in different ways.

    Raises:
        ConfigError: names two of them, the keys in which they differ, and --any-sampling.
    """
    from flowalign.evaluation.card import check_same_protocol

    ways = {}
    for name, run in zip(labels_of(runs), runs, strict=True):
        with opened(run, trust, ()):
            arguments = _config(run).evaluation.arguments()
        ways[name] = {"sampling": {key: value for key, value in arguments.items() if key != "batch_size"}}
    check_same_protocol(ways, "--any-sampling compares them as they are")


def watch(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    panel: Panel = None,
    pictures: Pictures = None,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Judge a finished run by rewards that it was not trained on; exit code 1 if the run gamed its reward."""
    from flowalign.evaluation.watch import diagnose, record

    if json_path is not None:
        check_output(json_path, "--json")
    with opened(run, trust, ()):
        config = _config(run)
    if not panel and not config.evaluation.panel:
        names = " or ".join(suggested(config)) or "a reward that was not trained on"
        raise ConfigError(f"--panel: name a reward to watch by, e.g. {names}")
    judge = judge_of(run, None, panel, trust, watching=True)
    settings = heldout_of(run, {"samples_per_prompt": pictures}, trust)
    before, after = (_evaluate(run, judge, settings, trust, trained=trained) for trained in (False, True))
    records = [record(moment, result.value, result.parts) for moment, result in enumerate((before, after))]
    verdict = diagnose(records, config.evaluation.watch)
    judges = judges_of(run, None, panel)
    if not panel:
        judges += [reward.model_dump() for reward in config.evaluation.panel]
    cards = {name: card_of(run, result, judges, {}) for name, result in (("before", before), ("after", after))}
    _show({"before": before, "after": after}, json_path, {"verdict": verdict.status, "cards": cards}, "gain")
    show_cards(cards)
    if verdict.status == "good":
        print("no sign of reward hacking: the panel does not fall while the reward rises, pictures look as before")
        return
    print(f"this looks like reward hacking: {verdict.message.partition(', in the last')[0]}")
    raise typer.Exit(1)


def _config(run: Path) -> "BaseConfig":
    from flowalign.config import load

    config: BaseConfig = load(run / "config.yaml")
    return config


def judge_of(
    run: Path,
    rewards: Sequence[str] | None,
    panel: Sequence[str] | None,
    trust: bool,
    watching: bool = False,
) -> "Reward":
    """The rewards of the command line, or else the run's own, together with a panel.

    Args:
        watching: use the run's own panel, if the command line gives none.
    """
    from flowalign.config.rewards import build_reward, build_rewards
    from flowalign.evaluation.watch import Panel

    trained = None
    used = ["model", "algorithm", *([] if rewards else ["rewards", "evaluation"])]
    with opened(run, trust, used):
        config = _config(run)
        if not rewards:
            evaluated = config.evaluation.rewards or config.rewards
            reward = build_reward(evaluated)
            trained = build_reward(config.rewards) if watching and evaluated is not config.rewards else None
        watchers = build_rewards(config.evaluation.panel, "evaluation.panel") if watching and not panel else []
    if rewards:
        reward = build_reward(_named(rewards), "--rewards")
    if panel:
        watchers = build_rewards(_named(panel), "--panel")
    return Panel(reward, watchers, trained) if watchers else reward


def _named(names: Sequence[str]) -> "list[Weighted]":
    """Rewards by names and files of the command line."""
    from flowalign.app.cli.reward_file import read
    from flowalign.config import Weighted

    rewards = []
    for name in names:
        find_beside(Path(name))
        if name.endswith((".yaml", ".yml")):
            rewards += read(Path(name)).rewards
        else:
            rewards.append(Weighted(name=name))
    return rewards


def heldout_of(run: Path, changes: dict[str, Any], trust: bool) -> Any:
    """A run's evaluation section, with the settings of the command line instead of its own."""
    from flowalign.config.foreign import check_prompts

    changes = {name: value for name, value in changes.items() if value is not None}
    if "prompts" in changes:
        # these settings choose among the run's own prompts
        changes |= {"where": {}, "limit": None, "column": "prompt", "split": None, "subset": None}
    with opened(run, trust, [] if "prompts" in changes else ["evaluation"]):
        settings = _config(run).evaluation.model_copy(update=changes)
    if settings.prompts is None:
        raise ConfigError(f"{run / 'config.yaml'} has no evaluation.prompts to evaluate on; --prompts names some")
    if not trust and "prompts" not in changes:
        check_prompts(settings, run)
    return settings


def _evaluate(
    run: Path, judge: "Reward", heldout: Any, trust: bool, requested: dict[str, Any] | None = None, trained: bool = True
) -> "Evaluated":
    """Sample the held-out prompts with a run, with its own settings, and score the samples."""
    from flowalign.data import Prompts
    from flowalign.evaluation.scores import evaluate

    prompts = Prompts.of(heldout)
    policy, sampling = loaded(run, judge, trust, requested or {}, trained)
    print(f"{run}{'' if trained else ' before training'}: {sampling.shown()}")
    return evaluate(policy, judge, prompts, sampling, heldout.samples_per_prompt, heldout.seed)


def loaded(
    run: Path, judge: "Reward", trust: bool, requested: dict[str, Any], trained: bool = True
) -> "tuple[Policy[Any], SamplingSettings]":
    """A run's policy, which the judge may ask, and its settings of sampling with those of the command line."""
    from flowalign.app.loading import load_for_sampling
    from flowalign.training.building import check_media

    with opened(run, trust):
        config = _config(run)
    check_media(judge, config.model)
    if requested and config.model.kind != "pictures":
        raise ConfigError(f"{of_pictures(requested)}, and {run} trained a language model")
    with opened(run, trust):
        policy, sampling = load_for_sampling(str(run), None, config.model.dtype, trained)
    if requested:
        check_frames(policy, requested.get("num_frames"))
        sampling = sampling.asked(requested)
    policy.bind(judge)
    return policy, sampling


def labels_of(runs: Sequence[Path]) -> list[str]:
    """The names of runs. Where two have the same name, what differs in the paths: a and b of runs/a/x, runs/b/x."""
    names = [run.name for run in runs]
    if len(set(names)) == len(runs):
        return names
    paths = [run.parts for run in runs]
    ahead, behind = _alike(paths), _alike([path[::-1] for path in paths])
    return ["/".join(path[ahead : len(path) - behind]) or str(run) for path, run in zip(paths, runs, strict=True)]


def _alike(paths: Sequence[Sequence[str]]) -> int:
    """Number of first parts that all paths have."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _show(
    results: "dict[str, Evaluated]", json_path: Path | None, more: dict[str, Any], gain: str | None = None
) -> None:
    from flowalign.evaluation.comparison import Comparison

    show(Comparison(results), json_path, more, gain)


def show(comparison: "Comparison", json_path: Path | None, more: dict[str, Any], gain: str | None = None) -> None:
    """Print a comparison, and write it with `more` to a file."""
    print_comparison(comparison, gain)
    if json_path is not None:
        write_atomically(json_path, json.dumps(comparison.record() | more, indent=2) + "\n")
