"""`flowalign search`: search better pictures or videos of a frozen model."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli import sampling as options
from flowalign.app.cli.modules import find_beside, opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output

if TYPE_CHECKING:
    from flowalign.data import Prompts
    from flowalign.search.found import Searches
    from rewards import Reward


@options.with_sampling
def search(
    requested: dict[str, Any],
    model: options.Model,
    prompts: Annotated[list[str], typer.Argument(help="Prompts, or a file or a shipped list of prompts.")],
    method: Annotated[
        list[str] | None, typer.Option(help="`flowalign list searches`; several are compared. Default best_of_n.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="A reward's name, or a YAML file with `rewards`; default the run's own.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Budget of each prompt: forwards=2000, reward_calls=100, or samples=16.")
    ] = "samples=16",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the methods: KEY=VALUE, or METHOD.KEY=VALUE.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts, spread over the list.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines of preferences to train on: the best sample over the worst.")
    ] = None,
    lora: options.Lora = None,
    image: options.Images = None,
    mask: options.Mask = None,
    seed: options.Seed = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the search; an interrupted one continues there. Default searches/ and the prompt.",
        ),
    ] = None,
    dtype: options.Dtype = "float32",
    trust: options.Trust = False,
) -> None:
    """Search better pictures or videos from a frozen model, by a reward and within a budget."""
    from flowalign.app.loading import load_for_sampling
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.search.engine import Budget
    from flowalign.search.run import build_methods, check_reward
    from flowalign.search.run import search as run_search
    from flowalign.search.store import SearchStore

    allowed = Budget.parse(budget)
    methods = build_methods(method or ["best_of_n"], settings(set_ or []))
    source = options.pictures(image, mask)
    options.check_prompts(prompts, requested.get("negative_prompt"))
    prompt_list = _prompts(prompts, limit, source)
    output = Path("searches") / _named_after(prompts[0]) if output is None else output
    check_output(output, "--output", folder=True)
    if out is not None:
        check_output(out, "--out")
    used = ["model", "algorithm", *([] if reward else ["rewards"])]
    with opened(model, trust, used):
        judge = _reward(reward, model)
        check_reward(methods, judge)
        policy, sampling = load_for_sampling(model, lora, dtype)
    if not isinstance(policy, DiffusersPolicy):
        raise ConfigError(f"{model}: a search is of pictures and videos, and this run trained a language model")
    options.check_pictures(policy, source)
    options.check_frames(policy, requested.get("num_frames"))
    sampling_settings: Any = sampling.asked(requested)
    print(sampling_settings.shown())
    store = SearchStore(output)
    _print(run_search(policy, prompt_list, methods, judge, sampling_settings, allowed, seed, store), judge.name)
    print(f"pictures: {output / 'pictures'}")
    if out is not None:
        print(f"{store.write_pairs(out, judge.name)} preferences: {out}")


def _print(results: "Searches", reward: str) -> None:
    """Print the means of each method, in a line for each."""
    from statistics import fmean

    for name in dict.fromkeys(result.method for result in results):
        of_method = [result for result in results if result.method == name]
        best, forwards = fmean(result.score for result in of_method), fmean(result.forwards for result in of_method)
        print(f"{name}: {reward} {best:.4g} with {forwards:.0f} forwards a prompt")


def settings(pairs: list[str]) -> dict[str, Any]:
    """The settings of methods in 'key=value' pairs, with values read as YAML."""
    from flowalign.runs.reading import parse_yaml

    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: give KEY=VALUE, e.g. --set fk_steering.strength=5")
        try:
            values[key] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"--set {pair}: {error}") from error
    return values


def _named_after(prompt: str) -> str:
    """A folder's name made from a prompt, or from the name of a file or list of prompts."""
    return re.sub(r"\W+", "-", Path(prompt).stem).strip("-")[:60] or "prompt"


def _prompts(prompts: list[str], limit: int | None, source: dict[str, Any]) -> "Prompts":
    from flowalign.data import Prompts
    from flowalign.data.files import SUFFIXES, located

    [first, *more] = prompts
    if not more and (os.path.isfile(located(first)) or first.endswith(SUFFIXES)):
        prompt_list = Prompts.read(first).spread(limit)
        prompt_list.metadata = [record | source for record in prompt_list.metadata]
        return prompt_list
    return Prompts(prompts, [dict(source) for _ in prompts]).spread(limit)


def _reward(name: str | None, model: str) -> "Reward":
    """The reward of the search."""
    from flowalign.app.cli.reward_file import read
    from flowalign.config import load
    from flowalign.config.rewards import build_reward
    from flowalign.config.sections import Weighted

    if name is not None:
        find_beside(Path(name))
    if name is not None and name.endswith((".yaml", ".yml")):
        return build_reward(read(Path(name)).rewards)
    if name is not None:
        return build_reward([Weighted(name=name)], "--reward")
    if not Path(model, "config.yaml").is_file():
        raise ConfigError("--reward: name what to search for, e.g. --reward clip_score; only a run has one of its own")
    return build_reward(load(Path(model, "config.yaml")).rewards)
