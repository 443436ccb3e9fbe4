"""The sections that all configurations share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flowalign import registry
from flowalign.config.engines import ENGINES, HERE, INSIDE, ServerSettings, check_name
from flowalign.config.method import Method
from flowalign.config.workers import RolloutWorkers
from flowalign.data import Difficulty, PromptList, Prompts
from flowalign.data.selection.settings import DynamicSampling, ReplaySettings
from flowalign.data.sizes import rows_by_size
from flowalign.errors import ConfigError, nearest
from flowalign.policies.settings import Network, SamplingSettings, Snapshot
from flowalign.runs.files import check_output
from flowalign.settings import Section, not_finite, parse

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Seed of torch's generators."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean."""

NO_WEIGHT = 1e-6
"""Weight of a reward, relative to the largest, at which nothing is learned from it."""


NO_GROUPS = "'{name}' has no groups of samples whose rewards could be alike; flow_grpo and, for texts, grpo work"
COMBINATIONS = (
    ("data.dynamic_sampling", "refill", NO_GROUPS),
    ("data.replay", "refill", NO_GROUPS),
    (
        "data.replay",
        "replay",
        "how '{name}' learns from a group depends on the iteration that sampled it; data.dynamic_sampling works",
    ),
    (
        "training.passes",
        "passes",
        "'{name}' learns from its samples once, while they are made or before its weights move; 1 works, with more "
        "training.updates_per_iteration where it takes them",
    ),
    (
        "training.old_log_prob",
        "ratios",
        "'{name}' has no ratios of old and new probabilities; null works",
    ),
    ("training.subsample.by=advantage", "advantages", "'{name}' has no advantages; uniform works"),
    (
        "rollout.search",
        "search",
        "'{name}' learns from the steps that its samples took, and a search keeps finished samples alone; nft, raft "
        "and the others that match them work",
    ),
    (
        "rollout.overlap",
        "overlap",
        "'{name}' has no samples scored before it learns, which could be done while others are sampled; 1 works",
    ),
    (
        "rollout.chunks",
        "chunks",
        "'{name}' learns from samples that are made as a whole; flow_grpo and self_forcing learn from chunks",
    ),
    (
        "rollout.workers",
        "workers",
        "'{name}' cannot learn from samples of other processes: it takes gradients through them, learns their noise, "
        "or is given them; flow_grpo and, for texts, grpo work",
    ),
    (
        "rollout.store",
        "store",
        "'{name}' learns from what is given, and has no trajectories that wait for the updates; device works",
    ),
    (
        "model.text_lora",
        "text_lora",
        "{name} learns from clean samples and their kept embeddings; methods that learn from the steps of a rollout "
        "work, flow_grpo and draft among them",
    ),
)
"""Settings, each with the entry that an algorithm's `combines` must have for it, and why it is refused otherwise."""


class Named(BaseModel):
    """Something chosen by name or dotted path; further keys are its own settings."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def part(self, table: str, where: str) -> Any:
        """The named function of the core, with its settings checked and bound."""
        return registry.part(table, self.name, self.settings, where)


class EngineSettings(Named):
    """What samples an iteration; further keys are its settings (docs/engines.md)."""

    name: str = HERE

    @model_validator(mode="before")
    @classmethod
    def _by_its_name(cls, value: object) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        # the library that samples texts in the process that learns
        return {**value, "name": HERE} if isinstance(value, dict) and value.get("name") == "transformers" else value

    @property
    def inside(self) -> bool:
        """Is it a library that samples in flowalign's processes, in the place of transformers?"""
        return self.name == INSIDE and not self.settings

    def served(self, kind: str) -> tuple[Any, ServerSettings] | None:
        """The class of an engine that is a server, and its settings; None where flowalign's processes sample.

        Args:
            kind: kind of the model.
        """
        check_name(self.name, kind)
        path = ENGINES[kind][self.name]
        if path is None or self.inside:
            return None
        engine = registry.imported(path)
        return engine, parse(engine.Settings, self.settings, "rollout.engine")


class RolloutSearch(Named):
    """A search that finds each sample (`flowalign list searches`); further keys are the method's settings."""

    name: str = "best_of_n"
    budget: str = Field("samples=4", pattern=r"^(forwards|reward_calls|samples)=[1-9]\d*$")
    """Budget of each sample: forwards=40, reward_calls=8, or samples=4."""


class Weighted(Named):
    """A reward of a weighted sum."""

    weight: float = 1.0


class Watch(Section):
    """Evaluations that end a run: signs of reward hacking, or no rise any more; see `flowalign.evaluation.watch`."""

    deviations: float = Field(2.0, ge=0)
    """Standard errors that a change must exceed."""
    share: float = Field(0.5, gt=0, le=1)
    """Share of the panel's rewards that must fall."""
    patience: int = Field(2, ge=1)
    """Evaluations in a row that must look hacked."""
    action: Literal["warn", "stop"] = "warn"
    """Reaction; stop ends the run with the weights of the last good evaluation."""
    early_stop: int | None = Field(None, ge=1)
    """Evaluations in a row without a new best reward that end the run; the result has the weights of the best one, also
    if the run reaches its last iteration (RPO, arXiv 2407.12164)."""
    keep_best: bool = False
    """Whether the result has the weights of the evaluation with the best reward; the run goes on to its end."""
    best_by: str = "reward"
    """Score that `keep_best` and `early_stop` compare evaluations by: `reward`, or one of the panel, such as
    panel/critical_entropy."""

    @property
    def returns_best(self) -> bool:
        """True if the result has the weights of the best evaluation."""
        return self.keep_best or self.early_stop is not None


class PictureSize(Section):
    """Height and width of pictures, in pixels."""

    height: int = Field(ge=8)
    width: int = Field(ge=8)


class Heldout(SamplingSettings, PromptList):
    """Evaluation on held-out prompts before, during and after training."""

    prompts: str | None = None
    """Prompts held out from training; null: no evaluation."""
    every: int = Field(0, ge=0)
    """Iterations between evaluations; 0: only before and after training."""
    seed: Seed = 1_000_000
    """Seed of the first sample."""
    rewards: list[Weighted] | None = None
    """Rewards of the evaluation; default: those trained on."""
    panel: list[Named] = []
    """Rewards that are never trained on; if they fall while the trained one rises, it is reward hacking."""
    weights: str | None = None
    """Weights that are evaluated and saved, by a name as in `rollout.weights`; default: the average if there is one
    (`training.ema_decay`), else the policy."""
    watch: Watch = Watch()
    samples_per_prompt: int = Field(1, ge=1)
    also_at: PictureSize | None = None
    """A second size, in pixels, at which the held-out pictures are scored and saved too, such as twice the size trained
    at. Its figures have names that begin with the size, such as 1024x1024/reward."""
    save_samples: int = Field(16, ge=0)
    """Number of samples that are saved to look at."""

    @property
    def watching(self) -> bool:
        """True if evaluations may end the run, or bring earlier weights back."""
        return bool(self.panel) or self.watch.returns_best


class Data(PromptList):
    prompts: str
    selection: Named = Named(name="shuffled")
    """Rule that selects an iteration's prompts; `flowalign list selections`."""
    difficulty: Difficulty | None = None
    dynamic_sampling: DynamicSampling | None = None
    replay: ReplaySettings | None = None

    def kept(self, prompts: Prompts) -> Prompts:
        """The prompts of the configured difficulty; all if none is configured."""
        difficulty = self.difficulty
        return prompts if difficulty is None else prompts.between(difficulty.key, difficulty.low, difficulty.high)


class Optimizer(Section):
    learning_rate: float = Field(3e-4, gt=0)
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """Name of the schedule in diffusers' get_scheduler."""
    warmup_updates: int = Field(0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: float = Field(1e-4, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    bits: Literal[8, 32] = 32
    """Bits of the moments; 8 needs the extra 'bitsandbytes'."""
    offload: bool = False
    """Whether the moments stay in the host's memory and visit the device, a tensor at a time, in each update."""


class TrainingBudget(Section):
    """Limits of a run: training ends with the iteration that reaches one of them."""

    seconds: float | None = Field(None, gt=0)
    forwards: int | None = Field(None, ge=1)
    """Samples that the denoiser is evaluated on, in rollouts, completions and updates."""
    reward_calls: int | None = Field(None, ge=1)
    """Pictures that are scored for training."""


class Subsample(Section):
    """A random share of each update's items (steps of a trajectory, noised samples, texts), each weighted by 1 / p."""

    share: float = Field(gt=0, lt=1)
    """Share of the items that are drawn, on average."""
    by: Literal["uniform", "advantage"] = "uniform"
    """Probability of an item: the same for all, or half the same and half in proportion to its advantage's size."""


class Training(Section):
    iterations: int = Field(ge=1)
    prompts_per_iteration: int = Field(ge=1)
    """Prompts of an iteration, over all processes."""
    group_size: int = Field(ge=1)
    """Trajectories of a prompt; 1 for methods of texts that learn from lines of the data."""
    updates_per_iteration: int = Field(1, ge=1)
    """Updates that a pass over an iteration's samples is split into; each takes an equal share of every group."""
    passes: int = Field(1, ge=1)
    """Passes over an iteration's samples, each in another order; TRL's num_iterations, verl's ppo_epochs."""
    micro_batch_size: int = Field(16, ge=1)
    """(sample, step) pairs of a network call, on each process; gradients accumulate over the calls."""
    optimizer: Optimizer = Optimizer()
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of a running average of the weights, which is evaluated and saved instead of them."""
    ema_every: int = Field(1, ge=1)
    """Updates from one averaging to the next."""
    subsample: Subsample | None = None
    """Random share of an update's items to learn from; the gradient is on average the same."""
    offload_copies: bool = False
    """Whether copies of the weights (snapshots and the average) stay in the host's memory while they are not used."""
    snapshots: dict[str, Snapshot] = {}
    """Further copies of the weights, by name, for `rollout.weights` and `evaluation.weights`; a name that the algorithm
    uses itself changes the algorithm's copy."""
    old_log_prob: Literal["sampled", "replayed"] | None = None
    """Log-probabilities that ratios refer to: recorded in sampling, or computed again in the batches of the updates,
    which costs a forward pass and makes ratios start at 1 in any precision; null: the algorithm's choice."""
    seed: Seed = 0
    checkpoint_every: int = Field(10, ge=0)
    """Iterations between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    previews: int = Field(4, ge=0, le=4)
    """Held-out prompts whose denoising and group are saved at each evaluation, for the gallery."""
    budget: TrainingBudget = TrainingBudget()
    timeout: float = Field(1800, gt=0)
    """Seconds that processes wait for each other, the slowest reward included."""
    patience: float = Field(25, ge=3)
    """Seconds without a sign of life from a process after which the run ends with an error."""

    @property
    def updates(self) -> int:
        """Updates of an iteration."""
        return self.passes * self.updates_per_iteration


class Rollouts(SamplingSettings):
    """How an iteration's samples are made, for pictures, videos and texts."""

    weights: str | None = None
    """Weights that draw the samples: policy, reference, ema, or a snapshot (`training.snapshots`, or the algorithm's
    own); default the algorithm's choice."""
    overlap: int | None = Field(None, ge=1)
    """Number of parts that an iteration is sampled in: one part is scored while the next one is sampled; null: up to 8
    where the reward leaves the device free and the numbers stay the same to the bit, else 1."""
    engine: EngineSettings = EngineSettings()
    """Engine that samples: trainside, the processes that learn themselves; workers, separate processes on Ray; a server
    with its `url`, sglang or for texts also vllm; vllm without a url, in those processes."""
    workers: RolloutWorkers | None = None
    """Separate processes that sample, the same as `engine: {name: workers, ...}`."""
    search: RolloutSearch | None = None
    """Search that finds each sample to learn from, for the reward that is trained; default plain sampling."""

    @model_validator(mode="after")
    def _workers_are_an_engine(self) -> Self:
        if self.engine.name == "workers":
            self.workers, self.engine = parse(RolloutWorkers, self.engine.settings, "rollout.engine"), EngineSettings()
        return self

    @property
    def staleness(self) -> int:
        """Iterations that are sampled ahead."""
        ahead = self.engine.settings.get("staleness", 0) if self.workers is None else self.workers.staleness
        return int(ahead)


class BaseConfig(Section):
    """Sections and settings of all configurations."""

    model: Network
    data: Data
    rewards: list[Weighted] = []
    """Rewards of the weighted sum, each with `name`, an optional `weight`, and its settings; none if a reward is passed
    in Python."""
    algorithm: Named
    rollout: Rollouts = Rollouts()
    evaluation: Heldout = Heldout()
    training: Training
    output: str = "runs"
    """Folder that gets the run's folder."""
    name: str | None = None
    """Name of the run's folder; default from the configuration's file name and the seed."""
    trackers: list[str] = []
    """Trackers of accelerate: tensorboard, wandb, ..."""
    show_every: int = Field(10, ge=0)
    """Iterations from one to the next whose best and worst samples tensorboard and wandb show, besides the samples of
    evaluations; 0: only numbers."""

    def build_algorithm(self) -> Any:
        """The algorithm with its settings checked."""
        kind = registry.resolve("algorithms", self.algorithm.name)
        if not hasattr(kind, "Settings"):
            raise ConfigError(f"algorithm: '{self.algorithm.name}' is no algorithm (docs/extending.md)")
        from flowalign.core.seams import check_method  # loads torch

        check_method(kind)
        return kind(parse(kind.Settings, self.algorithm.settings, "algorithm"))

    def check(self, processes: int) -> None:
        """Refuse every mistake that can be found before a model loads."""
        key = not_finite(self.model_dump())
        if key is not None:
            raise ConfigError(f"{key}: a finite number is wanted")
        if not self.rewards:
            raise ConfigError("rewards: name at least one, e.g. rewards: [{name: clip_score}]")
        lora = self.model.lora
        if lora is not None and lora.path is not None and not (Path(lora.path).exists() or lora.path.count("/") == 1):
            raise ConfigError(f"model.lora.path: no file or folder at '{lora.path}', and a hub name is owner/name")
        check_output(Path(self.output) / (self.name or "run"), "output", folder=True)
        algorithm = self.build_algorithm()
        if algorithm.kind != self.model.kind:
            raise ConfigError(
                f"algorithm: '{self.algorithm.name}' trains models of {algorithm.kind}, "
                f"and model.kind here is {self.model.kind}"
            )
        training, evaluation = self.training, self.evaluation
        if training.group_size == 1 and "lines" not in algorithm.combines:
            raise ConfigError("training.group_size: 1 leaves a sample nothing to be compared with; 2 or more works")
        algorithm.check(self)
        if training.optimizer.offload and training.optimizer.bits == 8:
            raise ConfigError("training.optimizer.offload: moments of 8 bits stay on the device; bits: 32 works")
        if training.ema_every > 1 and training.ema_decay is None:
            raise ConfigError("training.ema_every: there is no average; set training.ema_decay, or leave it out")
        self._check_snapshots(algorithm)
        self._check_effects(algorithm)
        rows = self.rows(processes)
        if training.prompts_per_iteration % rows:
            up = -(-training.prompts_per_iteration // rows) * rows
            raise ConfigError(
                f"training.prompts_per_iteration: {training.prompts_per_iteration} groups cannot be split over "
                f"{rows} processes (groups stay whole); {up} would work"
            )
        self._check_combinations(algorithm)
        groups = training.prompts_per_iteration // rows
        self.check_sampling(groups, algorithm)
        if (self.rollout.overlap or 1) > groups:
            raise ConfigError(
                f"rollout.overlap: the {groups} groups of a process cannot be split into {self.rollout.overlap} parts "
                f"(groups stay whole); at most {groups} works"
            )
        self._check_weights(self.rollout.weights, "rollout", algorithm)
        self._check_weights(evaluation.weights, "evaluation", algorithm)
        served = self.rollout.engine.served(self.model.kind)
        if served is not None:
            served[1].check(self, algorithm, processes)
        if self.rollout.workers is not None:
            self.rollout.workers.check(self, algorithm, groups, processes)
            if served is not None:
                raise ConfigError(
                    f"rollout.workers: '{self.rollout.engine.name}' at {', '.join(served[1].url)} samples already; "
                    "one of the two works"
                )
        self._check_names()
        prompts = self.data.kept(algorithm.read(self.data))
        self._check_sizes(prompts)
        self.check_prompts(prompts)
        self._check_evaluation()
        self._check_items(algorithm, groups)

    def check_prompts(self, prompts: Prompts) -> None:
        """Refuse prompts that the model cannot be given."""

    def _check_items(self, algorithm: Method, groups: int) -> None:
        """Refuse an iteration whose items cannot be divided into its updates."""
        training = self.training
        if training.subsample is not None and getattr(algorithm, "loss_looks_at", "action") == "group":
            raise ConfigError(
                f"training.subsample: the loss of '{self.algorithm.name}' looks at whole groups, of which some members "
                "would be missing; null works"
            )
        items = algorithm.items(self)
        if items % training.updates_per_iteration:
            raise ConfigError(
                f"training.updates_per_iteration: the {items} {algorithm.unit} of a group cannot be split into "
                f"{training.updates_per_iteration} equal updates"
            )
        drawn = groups * items // training.updates_per_iteration
        if training.subsample is not None and training.subsample.share * drawn < 1:
            raise ConfigError(
                f"training.subsample.share: {training.subsample.share:g} of the {drawn} {algorithm.unit} of an update "
                f"is less than one; {2 / drawn:.2g} works"
            )

    def _check_snapshots(self, algorithm: Method) -> None:
        """Refuse snapshots of unknown weights, and snapshots whose name is taken."""
        training = self.training
        taken = sorted({"policy", "reference", "ema", *algorithm.roles} & training.snapshots.keys())
        if taken:
            raise ConfigError(f"training.snapshots: '{taken[0]}' is a name of its own; call the snapshot otherwise")
        for name in self.training.snapshots:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ConfigError(f"training.snapshots: '{name}' is no name of a file; letters, digits, _ and - work")
        copied = ["policy", *algorithm.snapshots, *training.snapshots, *algorithm.roles]
        for name, snapshot in {**algorithm.snapshots, **training.snapshots}.items():
            if snapshot.of not in copied or snapshot.of == name:
                works = nearest(snapshot.of, [other for other in copied if other != name])
                raise ConfigError(f"training.snapshots.{name}.of: no weights are called '{snapshot.of}'; {works}")

    def _check_names(self) -> None:
        """Refuse unknown rewards and selections."""
        evaluation = self.evaluation
        sections: dict[str, Sequence[Named]] = {
            "rewards": self.rewards,
            "evaluation.rewards": evaluation.rewards or [],
            "evaluation.panel": evaluation.panel,
        }
        for where, rewards in sections.items():
            for i, named in enumerate(rewards):
                if not named.name.startswith(registry.GIVEN):
                    registry.check("rewards", named.name, named.settings, f"{where}.{i}")
        chosen = self.data.selection
        selection = registry.build("selections", chosen.name, chosen.settings, "data.selection")
        for name in ("picks", "learn", "state_dict", "load_state_dict"):
            if not callable(getattr(selection, name, None)):
                raise ConfigError(
                    f"data.selection: '{chosen.name}' is no selection, it has no '{name}' (docs/extending.md)"
                )

    def _check_sizes(self, prompts: Prompts) -> None:
        """Refuse prompts of several sizes where an iteration cannot be of one."""
        several = self.model.kind == "pictures" and len(rows_by_size(prompts.metadata)) > 1
        if several and self.data.replay is not None:
            raise ConfigError(
                "data.replay: brings back groups of any size, and the prompts have several (height, width), of which "
                "an iteration has one; leave it out, or take prompts of one size"
            )

    def _check_evaluation(self) -> None:
        """Refuse a watch that would see nothing."""
        evaluation = self.evaluation
        if evaluation.also_at is not None and self.model.kind != "pictures":
            raise ConfigError("evaluation.also_at: is a size of pictures, and this model makes texts; leave it out")
        if self.evaluation.prompts is not None:
            Prompts.of(self.evaluation)
        elif evaluation.panel:
            raise ConfigError("evaluation.panel: without evaluation.prompts there are no samples to watch")
        if evaluation.watch.action == "stop" and not (evaluation.panel and evaluation.every):
            raise ConfigError(
                "evaluation.watch.action: to stop a run takes an evaluation.panel to watch by, and evaluations during "
                "training (evaluation.every: 10)"
            )
        if evaluation.watch.returns_best and not (evaluation.prompts and evaluation.every):
            key = "keep_best" if evaluation.watch.early_stop is None else "early_stop"
            raise ConfigError(
                f"evaluation.watch.{key}: takes evaluations during training (evaluation.prompts, evaluation.every)"
            )

    def _check_effects(self, algorithm: Method) -> None:
        """Refuse settings that would have no effect, and those under which nothing would be learned."""
        training = self.training
        if training.optimizer.warmup_updates and training.optimizer.schedule == "constant":
            raise ConfigError(
                "training.optimizer.warmup_updates: the schedule 'constant' has no warm-up; schedule: "
                "constant_with_warmup works, or warmup_updates: 0"
            )
        updates = training.iterations * training.updates
        for name, role in algorithm.roles.items():
            if role.alone >= updates:
                raise ConfigError(
                    f"algorithm.{name}.alone: the first {role.alone} updates leave the policy as it is, and the run "
                    f"has {updates}; at most {updates - 1} works"
                )
        most = max(abs(named.weight) for named in self.rewards)
        for i, named in enumerate(self.rewards):
            # one of weight 0 is only measured
            if most < NO_WEIGHT or 0 < abs(named.weight) < NO_WEIGHT * most:
                raise ConfigError(
                    f"rewards.{i}.weight: nothing would be learned from '{named.name}' with a weight of "
                    f"{named.weight:g}; 1.0 works"
                )

    def _check_combinations(self, algorithm: Method) -> None:
        """Refuse settings that the algorithm's `combines` does not list."""
        for setting, needed, why in COMBINATIONS:
            key, _, refused = setting.partition("=")
            value: Any = self
            for name in key.split("."):
                value = getattr(value, name, None)
            is_set = value == refused if refused else value not in (None, 1, "device")
            if is_set and needed not in algorithm.combines:
                raise ConfigError(f"{key}: {why.format(name=self.algorithm.name)}")

    def _check_weights(self, name: str | None, where: str, algorithm: Method) -> None:
        """Refuse a name of weights that the run will not have."""
        averaged = ["ema"] if self.training.ema_decay is not None else []
        known = ["policy", "reference", *averaged, *self.training.snapshots, *algorithm.snapshots]
        if name == "ema" and not averaged:
            raise ConfigError(f"{where}.weights: there is no average of the weights; set training.ema_decay")
        if name == "reference" and where == "evaluation":
            raise ConfigError(
                "evaluation.weights: what is evaluated is saved too, and the reference is the model before training; "
                "flowalign eval RUN --base evaluates it"
            )
        if name is not None and name not in known:
            raise ConfigError(f"{where}.weights: no snapshot is called '{name}'; {nearest(name, known)}")

    def rows(self, processes: int) -> int:
        """Number of processes that have groups of their own; processes that share a sample count as one."""
        return processes

    def check_sampling(self, groups: int, algorithm: Method) -> None:
        """Refuse mistakes in the sections about sampling; `groups` is the number of groups of a process."""
        raise NotImplementedError

    def dump(self) -> str:
        """The full configuration as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
