"""Searches of many prompts with one or several methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from flowalign import registry
from flowalign.data import Prompts
from flowalign.errors import ConfigError, nearest
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.search.engine import DEFAULT, Budget, Engine
from flowalign.search.found import Searches, SearchResult
from flowalign.search.store import SearchStore
from rewards import Reward, spec_of

Method = Callable[[Engine], None]


def build_methods(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Method]:
    """Methods by their names.

    Args:
        settings: 'method.key' or, of all methods that have it, 'key', each with its value.

    Raises:
        ConfigError: an unknown method or setting, or a value that does not fit.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in settings.items():
        owner, _, chosen = key.rpartition(".")
        if owner and owner not in given:
            raise ConfigError(f"{key}: '{owner}' is none of the methods; {nearest(owner, given)}")
        known = {name: _settings(name) for name in names}
        takers = [owner] if owner else [name for name in names if chosen in known[name]]
        if not takers or chosen not in known[takers[0]]:
            raise ConfigError(f"{key}: no such setting; {nearest(chosen, {s for n in names for s in known[n]})}")
        for name in takers:
            given[name][chosen] = value
    return {name: registry.build("searches", name, settings, name) for name, settings in given.items()}


def _settings(name: str) -> set[str]:
    return set(getattr(registry.resolve("searches", name, "method"), "__dataclass_fields__", {}))


def check_reward(methods: Mapping[str, Method], reward: Reward) -> None:
    """Refuse a reward that these methods cannot search for.

    Raises:
        ConfigError: says what would work.
    """
    spec = spec_of(reward)
    if spec.kind != "pointwise":
        raise ConfigError(
            f"reward '{reward.name}' is of a {spec.kind}, and a search compares samples one by one; a pointwise reward "
            "such as clip_score works"
        )
    for name, method in methods.items():
        if getattr(method, "gradients", False) and not spec.differentiable:
            raise ConfigError(
                f"{name} follows the gradient of the reward, and '{reward.name}' has none; evosearch needs none, "
                "and clip_score, pick_score, hpsv2, image_reward and aesthetic have one"
            )


def check_steps(methods: Mapping[str, Method], sampling: Sampling) -> None:
    """Refuse several steps for methods of models that make a sample in one.

    Raises:
        ConfigError: says what would work.
    """
    for name, method in methods.items():
        if getattr(method, "one_step", False) and sampling.steps != 1:
            raise ConfigError(
                f"{name} is for models of one step, and {sampling.steps} are asked for; 1, or dno for more, works"
            )


def search(
    policy: DiffusersPolicy,
    prompts: Prompts,
    methods: Mapping[str, Method],
    reward: Reward,
    sampling: Sampling,
    budget: Budget = DEFAULT,
    seed: int = 0,
    store: SearchStore | None = None,
    progress: bool = True,
) -> Searches:
    """Search samples of prompts.

    Args:
        methods: by their names.
        reward: reward of single samples.
        budget: budget of each prompt and method.
        seed: seed of each prompt's first start noise.
        store: keeps what is found, and goes on from what is there.

    Returns:
        for each prompt what each method found.

    Raises:
        ConfigError: what does not go together; a folder of another search.
    """
    check_reward(methods, reward)
    check_steps(methods, sampling)
    settings = {
        "reward": reward.name,
        "budget": str(budget),
        "seed": seed,
        "prompts": prompts.texts,
        "sampling": sampling.model_dump(mode="json"),
        "methods": {name: repr(method) for name, method in methods.items()},
    }
    done = {} if store is None else store.open(settings)
    results = Searches()
    jobs = [(number, name) for number in range(len(prompts)) for name in methods]
    with tqdm(jobs, desc="search", disable=not progress) as bar:

        def report(so_far: SearchResult) -> None:
            best = "" if so_far.best is None else f", best {so_far.best.score:.4g}"
            bar.set_postfix_str(f"{so_far.method}: {so_far.forwards} forwards{best}")

        for number, name in bar:
            result = done.get((number, name))
            if result is None:
                text, metadata = prompts.texts[number], prompts.metadata[number]
                told = {"metadata": metadata, "method": name, "report": report}
                engine = Engine(policy, reward, text, sampling, seed=seed, budget=budget, **told)
                engine.found.small = None if store is None else {}
                with torch.no_grad():
                    methods[name](engine)
                result = engine.found
                if store is not None:
                    store.add(number, result)
                    result.small = None
            results.append(result)
    return results
