"""What `import flowalign as fa` gives: load a model, name rewards, train, look at runs and compare them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign import registry
from flowalign.app.loading import load_for_sampling
from flowalign.config import Config, Weighted
from flowalign.config import load as load_config
from flowalign.config.loader import merge
from flowalign.config.rewards import build_reward, build_rewards
from flowalign.data import Prompts, shipped
from flowalign.errors import ConfigError
from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import evaluate
from flowalign.evaluation.statistics import Estimate
from flowalign.policies.base import best_device
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.runs.result import Result
from flowalign.runs.show import Grid
from flowalign.search import Budget, Searches
from flowalign.search.run import build_methods, search
from flowalign.search.store import SearchStore
from flowalign.settings import parse
from flowalign.training import Trainer
from flowalign.training.evaluator import before_and_after
from flowalign.training.given import reward_names
from rewards import Metadata, Reward, Scores, WeightedSum, advance, as_reward, spec_of
from rewards.base import Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Function = Callable[..., Sequence[float]]
"""(samples, prompts) -> a float each"""
ENCODE = {name: {"max_sequence_length": 0} for name in ("tiny_sd3", "tiny_speller")}
"""Encoding that the shipped models were taught with: without the 256 empty tokens that stand in for a missing T5."""


class Generator(DiffusersPolicy):
    """What `load` gives: a pipeline to sample from, to search and to train."""

    def search(
        self,
        prompts: str | Path | Sequence[str],
        method: str = "best_of_n",
        reward: "str | RewardSum | Reward | Function | None" = None,
        budget: str = "samples=16",
        **more: Any,
    ) -> Searches:
        """Search better samples by a reward and within a budget, as `find` does, whose other arguments it takes.

        Returns:
            `samples`, `scores`, and for each prompt the tree of what was tried.

        Raises:
            ConfigError: no reward, and whatever `find` raises.
        """
        if reward is None:
            raise ConfigError("reward: name what to search for, e.g. policy.search(prompts, reward='clip_score')")
        return find(self, prompts, reward, method=method, budget=budget, **more)


def load(
    model: str | Path | DiffusionPipeline,
    lora: Mapping[str, Any] | str | Path | None = None,
    dtype: str = "float32",
    device: torch.device | str | None = None,
    **settings: Any,
) -> Generator:
    """A generator to sample from and to train.

    Args:
        model: a hub name, a folder, a run's folder, a model shipped with flowalign ('tiny_sd3'), or a pipeline.
        lora: {'rank': 16, ...} puts an adapter on it to train (arguments of `Policy.add_lora`; alpha is twice the rank
            by default), {'path': ...} one that starts from a trained one; a folder has the weights of one.
        dtype: of the frozen weights and the forward pass.
        device: default where a given pipeline is, else the best there is.
        settings: of `DiffusersPolicy`; a shipped model's `encode_options` are those that it was trained with.

    Raises:
        ConfigError: there is no such model, or this one is not supported.
    """
    weights = None if lora is None or isinstance(lora, Mapping) else Path(lora)
    if isinstance(model, DiffusionPipeline):
        policy = Generator(model, device or model.device, **settings)
    elif (Path(model) / "config.yaml").is_file():
        trained, _ = load_for_sampling(str(model), weights, dtype, kind=Generator)
        if not isinstance(trained, Generator):
            raise ConfigError(f"{model}: this run trained a language model; flowalign sample {model} works")
        return trained
    else:
        if str(model) in ENCODE:
            settings.setdefault("encode_options", ENCODE[str(model)])
        policy = Generator.from_pretrained(shipped(str(model)), dtype, device or best_device(), **settings)
    if weights is not None:
        policy.load(weights)
    elif isinstance(lora, Mapping) and "path" in lora:
        policy.start_from_lora(lora["path"])
    elif isinstance(lora, Mapping):
        policy.add_lora(**{"alpha": 2.0 * lora.get("rank", 32), "rank": 32} | dict(lora))
    return policy


class RewardSum:
    """A weighted sum of rewards, made by `reward`, `*` and `+`; a reward itself. Models load when it is first asked.

    Args:
        terms: the entries of a configuration's `rewards`, each with its object where it is not to be built.
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
        return RewardSum([(e.model_copy(update={"weight": e.weight * weight}), own) for e, own in self.terms])

    __rmul__ = __mul__

    def __add__(self, other: "RewardSum | Reward | Function") -> "RewardSum":
        return RewardSum([*self.terms, *RewardSum.of(other).terms])

    def __radd__(self, other: "RewardSum | Reward | Function") -> "RewardSum":
        return RewardSum.of(other) + self

    def entries(self) -> list[Weighted]:
        """As the `rewards` of a configuration."""
        return [entry for entry, _ in self.terms]

    @cached_property
    def built(self) -> Reward:
        """The reward with its models loaded."""
        rewards = [own or build_rewards([entry], "reward")[0] for entry, own in self.terms]
        weights = [entry.weight for entry, _ in self.terms]
        return rewards[0] if weights == [1.0] else WeightedSum(rewards, weights)

    @property
    def spec(self) -> Spec:
        return spec_of(self.built)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata = ()) -> Scores:
        return self.built(samples, prompts, metadata or [{}] * len(samples))

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata = ()) -> Scores:
        """As `DifferentiableReward.score_pixels`, where all terms are differentiable."""
        built: Any = self.built
        return built.score_pixels(pixels, prompts, metadata or [{}] * len(pixels))

    def advance(self, progress: float) -> None:
        """Pass on how far training is, in [0, 1]."""
        advance(self.built, progress)


def reward(name: str | Reward | Function, **settings: Any) -> RewardSum:
    """A reward by its name and settings (`flowalign list rewards`), by its dotted path, or any function.

    Sums and multiples are rewards: reward("pick_score") * 0.04 + my_function.

    Raises:
        ConfigError: there is no such reward or setting.
    """
    if not isinstance(name, str):
        return RewardSum.of(name)
    registry.check("rewards", name, settings, "reward")
    return RewardSum([(Weighted(name=name, **settings), None)])


def _sum(wanted: str | RewardSum | Reward | Function) -> RewardSum:
    return reward(wanted) if isinstance(wanted, str) else RewardSum.of(wanted)


def train(
    model: str | Path | DiffusionPipeline | DiffusersPolicy,
    reward: str | RewardSum | Reward | Function,
    prompts: str | Path | Sequence[str],
    *,
    algorithm: str | Mapping[str, Any] = "flow_grpo",
    iterations: int = 100,
    size: int | None = None,
    steps: int = 10,
    guidance: float = 1.0,
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
    """Train a generator, by default Flow-GRPO with 8 groups of 8 samples an iteration.

    Args:
        model: as of `load`, or a loaded policy; one without an adapter gets a LoRA.
        reward: a name, a function (samples, prompts) -> floats, or what `reward` makes of them.
        prompts: a file or a shipped list, or texts.
        algorithm: a name, or {'name': ..., its settings}.
        size: height and width in pixels; default the pipeline's own.
        learning_rate: default the configuration's, which suits models of billions of weights; tiny ones take 2e-3.
        heldout: prompts to evaluate on before and after training.
        panel: names of rewards that are not trained on, to notice reward hacking by.
        name: of the run's folder in `output`; default the model's and the algorithm's.
        exist: what becomes of a run that is there already.
        settings: further keys of a configuration, nested (docs/algorithms.md) or as {'training.group_size': 16}.

    Raises:
        ConfigError: what is wrong, and what would work.
    """
    policy = model if isinstance(model, DiffusersPolicy) else load(model)
    chosen = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    name = name or f"{policy.family.__class__.__name__.lower()}-{chosen['name']}-seed{seed}"
    folder = Path(output) / name
    if exist == "replace" and (folder / "config.yaml").is_file():
        shutil.rmtree(folder)
    sampling = {"steps": steps, "guidance": guidance, "height": size, "width": size}
    values: dict[str, Any] = {
        "model": {"path": "given"},
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
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(values, value)
    trainer = Trainer(parse(Config, values), policy, _sum(reward), resume=exist == "resume", progress=progress)
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
    **sampling: Any,
) -> Searches:
    """Search better samples of a frozen model, by a reward and within a budget.

    Args:
        model: as of `load`, or a loaded policy.
        prompts: a file or a shipped list, or texts.
        reward: a name, a function (samples, prompts) -> floats, or what `reward` makes of them.
        method: `flowalign list searches`.
        budget: of each prompt: 'forwards=2000', 'reward_calls=100', or 'samples=16' and what they take.
        settings: of the method.
        output: a folder that keeps what is found; a search that was interrupted goes on there.
        sampling: steps, guidance, height, rlg, ... as in a configuration's `evaluation`.

    Returns:
        for each prompt its best sample and score, and the tree of what was tried; `samples` and `scores` are of all.

    Raises:
        ConfigError: what is wrong, and what would work.
    """
    allowed, methods = Budget.parse(budget), build_methods([method], settings or {})
    listed = (
        Prompts.read(str(prompts)) if isinstance(prompts, str | Path) else Prompts(list(prompts), [{}] * len(prompts))
    )
    wanted: Sampling = parse(Sampling, sampling)
    policy = model if isinstance(model, DiffusersPolicy) else load(model)
    store = None if output is None else SearchStore(Path(output))
    return search(policy, listed, methods, _sum(reward).built, wanted, allowed, seed, store, progress)


@dataclass(repr=False)
class Run(Result):
    """A run, to look at."""

    trained: DiffusersPolicy | None = None

    @cached_property
    def policy(self) -> DiffusersPolicy:
        """The trained generator."""
        return self.trained or load(self.folder)

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
        """Curves of metrics over the iterations; default the mean reward and the KL where there is one."""
        from matplotlib import pyplot

        metrics = self.metrics
        names = names or tuple(n for n in ("reward/mean", "policy/kl") if metrics and n in metrics[0])
        figure, axes = pyplot.subplots(1, len(names), squeeze=False, figsize=(5 * len(names), 3.5))
        for name, axis in zip(names, axes[0], strict=True):
            axis.plot([record["iteration"] for record in metrics], [record[name] for record in metrics])
            axis.set_title(name)
            axis.set_xlabel("iteration")
        return figure

    def before_after(self, prompts: str | Path | Sequence[str] | None = None, n: int = 4, seed: int = 0) -> Grid:
        """Pictures of n prompts before training (above) and after, from the same start noises.

        Args:
            prompts: a file, a shipped list or texts, of which the first n are taken; default n of the held-out prompts,
                spread over them, or of those trained on where none were held out.
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
        return Grid([before, after], [[f"before: {text}" for text in texts], ["after"] * len(texts)])


def _sampling(run: Path) -> Any:
    """How a run's evaluations sample."""
    return load_config(run / "config.yaml").evaluation


def compare(
    runs: Sequence[str | Path | Run],
    prompts: str | Path | Sequence[str],
    reward: str | RewardSum | Reward | Function | None = None,
    n: int = 4,
    seed: int = 0,
) -> "DataFrame":
    """Runs on the same prompts and start noises: a row each, with standard errors over prompts.

    Args:
        reward: judges all of them; default the first run's own.
        n: samples a prompt.

    Returns:
        columns `reward`, `error`, and the paired `difference` to the first run with its own `difference_error`.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("compare returns a data frame: pip install 'flowalign[pandas]'") from error

    opened = [run if isinstance(run, Run) else Run(Path(run)) for run in runs]
    judge = _judge(opened[0], reward)
    listed = (
        Prompts.read(str(prompts)) if isinstance(prompts, str | Path) else Prompts(list(prompts), [{}] * len(prompts))
    )
    results = {
        str(i): evaluate(run.policy, judge, listed, _sampling(run.folder), n, seed) for i, run in enumerate(opened)
    }
    whole = next(Comparison(results).rows())
    rows: dict[str, list[Any]] = {"run": [run.folder.name for run in opened]}
    # the first does not differ from itself
    for label, found in (("reward", whole.means), ("difference", [Estimate(0.0, 0.0), *whole.differences])):
        rows[label] = [own and own.mean for own in found]
        rows["error" if label == "reward" else "difference_error"] = [own and own.error for own in found]
    return pandas.DataFrame(rows).set_index("run")


def _judge(run: Run, wanted: str | RewardSum | Reward | Function | None) -> Reward:
    if wanted is None:
        return build_reward(load_config(run.folder / "config.yaml").rewards)
    return _sum(wanted).built
