"""The functions of `import flowalign as fa`: load a model, name rewards, train, look at runs and compare them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign import registry
from flowalign.app.loading import ENCODE, load_for_sampling, load_modules
from flowalign.config import Config, TextConfig, Weighted
from flowalign.config import load as load_config
from flowalign.config.loader import merge
from flowalign.config.rewards import build_reward, build_rewards
from flowalign.data import Prompts, shipped
from flowalign.data.prompts import PromptList
from flowalign.errors import ConfigError
from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import evaluate
from flowalign.evaluation.statistics import Estimate
from flowalign.policies.base import Policy, best_device
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.settings import Sampling
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer
from flowalign.runs.checkpoint import Checkpoints
from flowalign.runs.result import Result
from flowalign.runs.show import Grid, Texts, strip
from flowalign.search import Budget, Searches
from flowalign.search.run import build_methods, search
from flowalign.search.store import SearchStore
from flowalign.settings import parse
from flowalign.training import Trainer
from flowalign.training.building import build_accelerator, build_sampler
from flowalign.training.evaluator import before_and_after
from flowalign.training.given import reward_names
from flowalign.training.previews import seen_groups
from rewards import Metadata, Reward, Scores, WeightedSum, advance, as_reward, spec_of
from rewards.base import Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Function = Callable[..., Sequence[float]]
"""(samples, prompts) -> a float each"""


class Generator(DiffusersPolicy):
    """Result of `load`: a pipeline to sample from, to search and to train."""

    def search(
        self,
        prompts: str | Path | Sequence[str],
        method: str = "best_of_n",
        reward: "str | RewardSum | Reward | Function | None" = None,
        budget: str = "samples=16",
        **more: Any,
    ) -> Searches:
        """Search better samples by a reward and within a budget; further arguments are those of `find`.

        Returns:
            `samples`, `scores`, and for each prompt the tree of tried samples.

        Raises:
            ConfigError: there is no reward, or `find` raises.
        """
        if reward is None:
            raise ConfigError("reward: name what to search for, e.g. policy.search(prompts, reward='clip_score')")
        return find(self, prompts, reward, method=method, budget=budget, **more)


@overload
def load(
    model: str | Path | DiffusionPipeline,
    lora: Mapping[str, Any] | str | Path | None = None,
    dtype: str = "float32",
    device: torch.device | str | None = None,
    kind: Literal["pictures"] = "pictures",
    **settings: object,
) -> Generator: ...
@overload
def load(
    model: str | Path,
    lora: Mapping[str, Any] | str | Path | None = None,
    dtype: str = "float32",
    device: torch.device | str | None = None,
    *,
    kind: Literal["text"],
    **settings: object,
) -> LanguagePolicy: ...
def load(
    model: str | Path | DiffusionPipeline,
    lora: Mapping[str, Any] | str | Path | None = None,
    dtype: str = "float32",
    device: torch.device | str | None = None,
    kind: Literal["pictures", "text"] = "pictures",
    **settings: Any,
) -> Generator | LanguagePolicy:
    """A model to sample from and to train: a generator of pictures, or a language model.

    Args:
        model: a hub name, a folder, a run's folder, a model shipped with flowalign ('tiny_sd3', 'tiny_lm'), or a
            pipeline.
        lora: {'rank': 16, ...} adds an adapter to train (arguments of `Policy.add_lora`; alpha is twice the rank by
            default), {'path': ...} adds one that starts from a trained one, and a folder has the weights of one.
        dtype: dtype of the frozen weights and the forward pass.
        device: device; default that of a given pipeline, else the best one of this machine.
        kind: 'text' for a language model.
        settings: settings of `DiffusersPolicy`, where a shipped model's `encode_options` are those of its training; or
            of `LanguagePolicy` (chat, system, ...).

    Raises:
        ConfigError: there is no such model, or this one is not supported.
    """
    weights = None if lora is None or isinstance(lora, Mapping) else Path(lora)
    wanted = LanguagePolicy if kind == "text" else Generator
    policy: Any
    if isinstance(model, DiffusionPipeline):
        policy = Generator(model, device or model.device, **settings)
    elif (Path(model) / "config.yaml").is_file():
        policy, _ = load_for_sampling(str(model), weights, dtype, kind=Generator)
        if not isinstance(policy, wanted):
            other = "text" if kind == "pictures" else "pictures"
            raise ConfigError(f"{model}: this run's model is of another kind; fa.load({str(model)!r}, kind={other!r})")
        return policy
    else:
        if str(model) in ENCODE:
            settings.setdefault("encode_options", ENCODE[str(model)])
        policy = wanted.from_pretrained(shipped(str(model)), dtype, device or best_device(), **settings)
    if weights is not None:
        policy.load(weights)
    elif isinstance(lora, Mapping) and "path" in lora:
        policy.start_from_lora(lora["path"])
    elif isinstance(lora, Mapping):
        policy.add_lora(**{"alpha": 2.0 * lora.get("rank", 32), "rank": 32} | dict(lora))
    return policy


class RewardSum:
    """A weighted sum of rewards, made by `reward`, `*` and `+`; itself a reward. Models load when it first scores.

    Args:
        terms: entries of a configuration's `rewards`, each with its reward object, or None if it must be built.
    """

    def __init__(self, terms: Sequence[tuple[Weighted, Reward | None]]) -> None:
        self.terms = list(terms)
        self.name = "+".join(entry.name for entry, _ in terms)

    @classmethod
    def of(cls, reward: "RewardSum | Reward | Function") -> Self:
        """Any reward as a sum of one term."""
        if isinstance(reward, cls):
            return reward
        return cls([(entry, as_reward(reward)) for entry in reward_names(reward)[:1]])

    def __repr__(self) -> str:
        return " + ".join(f"{entry.weight:g} * {entry.name}" for entry, _ in self.terms)

    def __mul__(self, weight: float) -> "RewardSum":
        return RewardSum([(e.model_copy(update={"weight": e.weight * weight}), term) for e, term in self.terms])

    __rmul__ = __mul__

    def __add__(self, other: "RewardSum | Reward | Function") -> "RewardSum":
        return RewardSum([*self.terms, *RewardSum.of(other).terms])

    def __radd__(self, other: "RewardSum | Reward | Function") -> "RewardSum":
        return RewardSum.of(other) + self

    def entries(self) -> list[Weighted]:
        """Entries of the terms for the `rewards` of a configuration."""
        return [entry for entry, _ in self.terms]

    @cached_property
    def built(self) -> Reward:
        """The reward with its models loaded."""
        rewards = [term or build_rewards([entry], "reward")[0] for entry, term in self.terms]
        weights = [entry.weight for entry, _ in self.terms]
        return rewards[0] if weights == [1.0] else WeightedSum(rewards, weights)

    @property
    def spec(self) -> Spec:
        return spec_of(self.built)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata = ()) -> Scores:
        return self.built(samples, prompts, metadata or [{}] * len(samples))

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata = ()) -> Scores:
        """Score pictures with a gradient, if all terms are differentiable; see `DifferentiableReward.score_pixels`."""
        built: Any = self.built
        return built.score_pixels(pixels, prompts, metadata or [{}] * len(pixels))

    def advance(self, progress: float) -> None:
        """Pass on the progress of training, in [0, 1]."""
        advance(self.built, progress)


def reward(name: str | Reward | Function, **settings: object) -> RewardSum:
    """A reward by its name and settings (`flowalign list rewards`), by its dotted path, or any function.

    Sums and multiples are rewards: reward("pick_score") * 0.04 + my_function.

    Raises:
        ConfigError: there is no such reward or setting.
    """
    if not isinstance(name, str):
        return RewardSum.of(name)
    registry.check("rewards", name, settings, "reward")
    return RewardSum([(Weighted(name=name, **settings), None)])


def _sum(source: str | RewardSum | Reward | Function) -> RewardSum:
    return reward(source) if isinstance(source, str) else RewardSum.of(source)


def train(
    model: str | Path | DiffusionPipeline | DiffusersPolicy | LanguagePolicy,
    reward: str | RewardSum | Reward | Function,
    prompts: str | Path | Sequence[str],
    *,
    algorithm: str | Mapping[str, Any] | None = None,
    iterations: int = 100,
    size: int | None = None,
    steps: int = 10,
    guidance: float = 1.0,
    max_new_tokens: int = 256,
    learning_rate: float | None = None,
    heldout: str | Path | Sequence[str] | None = None,
    panel: Sequence[str] = (),
    seed: int = 0,
    name: str | None = None,
    output: str | Path = "runs",
    exist: Literal["error", "resume", "replace"] = "error",
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> "Run":
    """Train a model, with 8 groups of 8 samples an iteration.

    Args:
        model: a loaded policy, or a generator as in `load`; one without an adapter gets a LoRA.
        reward: a name, a function (samples, prompts) -> floats, or a result of `reward`.
        prompts: a file or a shipped list, or texts.
        algorithm: a name, or {'name': ..., its settings}; default 'flow_grpo', of a language model 'grpo'.
        size: height and width in pixels; default the pipeline's own.
        steps: denoising steps of a picture.
        guidance: classifier-free guidance of a picture; 1 does without.
        max_new_tokens: tokens at which a text without an end is cut.
        learning_rate: default the configuration's, which suits models of billions of weights; tiny ones take 2e-3.
        heldout: prompts to evaluate on before and after training.
        panel: names of rewards that are not trained on, to notice reward hacking by.
        name: name of the run's folder in `output`; default from the model and the algorithm.
        exist: for a run that is there already: an error, resume it, or replace it.
        settings: further keys of a configuration, nested (docs/algorithms.md) or as {'training.group_size': 16}.

    Raises:
        ConfigError: says what is wrong, and what would work.
    """
    policy = model if isinstance(model, DiffusersPolicy | LanguagePolicy) else load(model)
    pictures = isinstance(policy, DiffusersPolicy)
    algorithm = algorithm or ("flow_grpo" if pictures else "grpo")
    chosen = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    architecture = policy.family if isinstance(policy, DiffusersPolicy) else policy.network
    name = name or f"{type(architecture).__name__.lower()}-{chosen['name']}-seed{seed}"
    folder = Path(output) / name
    if exist == "replace" and (folder / "config.yaml").is_file():
        shutil.rmtree(folder)
    sampling: dict[str, Any] = {"steps": steps, "guidance": guidance, "height": size, "width": size}
    if not pictures:
        sampling = {"max_new_tokens": max_new_tokens}
    values: dict[str, Any] = {
        "model": {"path": "given"} | ({} if pictures else {"kind": "text"}),
        "data": {"prompts": _prompts(prompts, folder, "prompts.txt")},
        "algorithm": chosen,
        "rollout": sampling,
        "evaluation": sampling | {"panel": [{"name": watcher} for watcher in panel]},
        "training": {"iterations": iterations, "prompts_per_iteration": 8, "group_size": 8, "seed": seed},
        "output": str(output),
        "name": name,
    }
    if learning_rate is not None:
        values["training"]["optimizer"] = {"learning_rate": learning_rate}
    if heldout is not None:
        values["evaluation"]["prompts"] = _prompts(heldout, folder, "heldout.txt")
    for key, value in (settings or {}).items():
        for word in reversed(key.split(".")):
            value = {word: value}
        values = merge(values, value)
    config = parse(Config if pictures else TextConfig, values)
    trainer = Trainer(config, policy, _sum(reward), resume=exist == "resume", progress=progress)
    return Run(trainer.train().folder, policy)


def _prompts(prompts: str | Path | Sequence[str], folder: Path, file: str) -> str:
    """The file of prompts; texts are written into the run's folder."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    if broken := [text for text in prompts if "\n" in text]:
        raise ConfigError(f"prompts: a line break in {broken[0]!r}; each is one line")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("".join(f"{text}\n" for text in prompts), encoding="utf-8")
    return str(folder / file)


def find(
    model: str | Path | DiffusionPipeline | DiffusersPolicy,
    prompts: str | Path | Sequence[str],
    reward: str | RewardSum | Reward | Function,
    *,
    method: str = "best_of_n",
    budget: str = "samples=16",
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    progress: bool = True,
    **sampling: object,
) -> Searches:
    """Search better samples of a frozen model, by a reward and within a budget.

    Args:
        model: a model as in `load`, or a loaded policy.
        prompts: a file or a shipped list, or texts.
        reward: a name, a function (samples, prompts) -> floats, or a result of `reward`.
        method: a name in `flowalign list searches`.
        budget: budget of each prompt: 'forwards=2000', 'reward_calls=100', or 'samples=16'.
        settings: settings of the method.
        output: folder for the results; an interrupted search continues there.
        sampling: steps, guidance, height, rlg, ... as in a configuration's `evaluation`.

    Returns:
        for each prompt its best sample and score, and the tree of tried samples; `samples` and `scores` are of all
        prompts.

    Raises:
        ConfigError: says what is wrong, and what would work.
    """
    allowed, methods = Budget.parse(budget), build_methods([method], settings or {})
    prompt_list = (
        Prompts.read(str(prompts)) if isinstance(prompts, str | Path) else Prompts(list(prompts), [{}] * len(prompts))
    )
    options: Sampling = parse(Sampling, sampling)
    policy = model if isinstance(model, DiffusersPolicy) else load(model)
    store, built = None if output is None else SearchStore(Path(output)), _sum(reward).built
    return search(policy, prompt_list, methods, built, options, allowed, seed=seed, store=store, progress=progress)


@dataclass(repr=False)
class Run(Result):
    """A run with its trained generator, curves and pictures."""

    trained: Policy[Any] | None = None

    @cached_property
    def policy(self) -> Any:
        """The trained model."""
        return self.trained or load_for_sampling(str(self.folder), None, "float32", kind=Generator)[0]

    def __repr__(self) -> str:
        gain = before_and_after(self.folder, load_config(self.folder / "config.yaml").evaluation.watch)
        if gain is None:
            return super().__repr__()
        lines = [
            f"  {row.score:<12} {row.means[0]} -> {row.means[1]}   gain {row.differences[0]:+}"
            for row in gain.rows()
            if row.prompts == "all"
        ]
        count = len(set(gain.results["before"].prompts))
        return "\n".join([super().__repr__(), f"{count} held-out prompts, before -> after, ± standard error:", *lines])

    def curves(self, *names: str) -> "Figure":
        """Plot metrics over the iterations; default the mean reward, and the KL if there is one."""
        from matplotlib import pyplot

        metrics = self.metrics
        names = names or tuple(n for n in ("reward/mean", "policy/kl") if metrics and n in metrics[0])
        figure, axes = pyplot.subplots(1, len(names), squeeze=False, figsize=(5 * len(names), 3.5))
        for name, axis in zip(names, axes[0], strict=True):
            axis.plot([record["iteration"] for record in metrics], [record[name] for record in metrics])
            axis.set_title(name)
            axis.set_xlabel("iteration")
        return figure

    def before_after(
        self, prompts: str | Path | Sequence[str] | None = None, n: int = 4, seed: int = 0
    ) -> "Grid | Texts":
        """Samples of n prompts before training and after, from the same seeds: pictures above each other, or texts.

        Args:
            prompts: a file, a shipped list or texts, of which the first n are taken; default n of the held-out prompts,
                spread over them, or of the trained ones if none were held out.
        """
        if prompts is None:
            config = load_config(self.folder / "config.yaml")
            data = config.data if config.evaluation.prompts is None else config.evaluation
            listed = Prompts.of(data).spread(n).texts
        else:
            listed = Prompts.read(str(prompts)).texts if isinstance(prompts, str | Path) else list(prompts)
        texts, sampling = listed[:n], _sampling(self.folder)
        seeds = list(range(seed, seed + len(texts)))
        with self.policy.reference():
            before = self.policy.make(texts, seeds, sampling)
        after = self.policy.make(texts, seeds, sampling)
        if isinstance(self.policy, LanguagePolicy):
            return Texts(texts, before, after)
        return Grid([before, after], [[f"Before: {text}" for text in texts], ["After"] * len(texts)])

    def film(
        self,
        prompt: str | None = None,
        seed: int = 0,
        reward: str | RewardSum | Reward | Function | None = None,
    ) -> Grid:
        """The denoising of one sample by the trained weights: what each step gained, its advantage and its ratio.

        A group of the prompt is sampled and scored as the run does, and its first member shown.

        Args:
            prompt: prompt; default the first held-out one, or the first trained one if none were held out.
            seed: seed of the group's noises.
            reward: reward; default the run's.

        Raises:
            ConfigError: the run trained a language model, or its reward was handed over in Python.
        """
        config = load_config(self.folder / "config.yaml")
        if not isinstance(config, Config):
            raise ConfigError("film: a run of a language model has no denoising steps; the gallery shows its tokens")
        data: PromptList = config.data if config.evaluation.prompts is None else config.evaluation
        known = Prompts.of(data)
        row = 0 if prompt is None else known.texts.index(prompt) if prompt in known.texts else None
        listed = Prompts([str(prompt)], [{}]) if row is None else known.take([row])
        judge, algorithm, policy = _judge(self, reward), config.build_algorithm(), self.policy
        load_modules(algorithm.modules(policy), self.folder)
        policy.bind(judge)
        sampler = build_sampler(config, policy, spec_of(judge).needs)
        checkpoints = Checkpoints(self.folder / "checkpoints", keep=1)
        newest = checkpoints.newest()
        if newest is not None:
            # a plan may have adapted its noise
            sampler.load_state(checkpoints.state(newest)["actor"])
        scorer = Scorer(judge, Processes(build_accelerator()))
        films, _ = seen_groups(sampler, scorer, algorithm, listed, 0, seed)
        return strip(films[0], self.metrics[-1] if self.metrics else {})


def _sampling(run: Path) -> Any:
    """Sampling settings of a run's evaluations."""
    return load_config(run / "config.yaml").evaluation


def compare(
    runs: Sequence[str | Path | Run],
    prompts: str | Path | Sequence[str],
    reward: str | RewardSum | Reward | Function | None = None,
    n: int = 4,
    seed: int = 0,
) -> "DataFrame":
    """Compare runs on the same prompts and start noises: a row for each, with standard errors over prompts.

    Args:
        reward: reward for all runs; default the first run's.
        n: samples per prompt.

    Returns:
        columns `reward`, `error`, and the paired `difference` to the first run with its own `difference_error`.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("compare returns a data frame: pip install 'flowalign[pandas]'") from error

    opened = [run if isinstance(run, Run) else Run(Path(run)) for run in runs]
    judge = _judge(opened[0], reward)
    prompt_list = (
        Prompts.read(str(prompts)) if isinstance(prompts, str | Path) else Prompts(list(prompts), [{}] * len(prompts))
    )
    results = {
        str(i): evaluate(run.policy, judge, prompt_list, _sampling(run.folder), n, seed) for i, run in enumerate(opened)
    }
    whole = next(Comparison(results).rows())
    rows: dict[str, list[Any]] = {"run": [run.folder.name for run in opened]}
    # the first run does not differ from itself
    for label, estimates in (("reward", whole.means), ("difference", [Estimate(0.0, 0.0), *whole.differences])):
        rows[label] = [value and value.mean for value in estimates]
        rows["error" if label == "reward" else "difference_error"] = [value and value.error for value in estimates]
    return pandas.DataFrame(rows).set_index("run")


def _judge(run: Run, source: str | RewardSum | Reward | Function | None) -> Reward:
    if source is None:
        return build_reward(load_config(run.folder / "config.yaml").rewards)
    return _sum(source).built
