"""The configuration of a run: read from YAML, checked before anything loads."""

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowalign import registry
from flowalign.data import Prompts
from flowalign.errors import ConfigError, nearest
from samplers import check_eta


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class Named(BaseModel):
    """Something chosen by name or dotted path; further keys are its own settings."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def part(self, table: str, where: str) -> Any:
        """The function of the core that is meant, its settings checked and bound."""
        return registry.part(table, self.name, self.settings, where)


class Weighted(Named):
    """A reward of a weighted sum."""

    weight: float = 1.0


class Lora(Section):
    rank: int = Field(32, ge=1)
    alpha: float = Field(64, gt=0)
    targets: list[str] | None = None
    """module names; default the model family's"""
    init: bool | str = True
    """peft's init_lora_weights"""


class Model(Section):
    path: str
    """a folder, a hub name, or 'tiny_sd3', the pipeline shipped with flowalign"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the frozen weights and the forward pass; what is trained stays float32"""
    lora: Lora | None = Lora()
    """null trains every weight of the denoiser"""
    attention: str | None = None
    """diffusers attention backend: native (default), xformers, flash, ..."""
    gradient_checkpointing: bool = False
    encode: dict[str, Any] = {}
    """arguments of the pipeline's prompt encoding, e.g. max_sequence_length"""


class Sampling(Section):
    steps: int = Field(10, ge=1)
    guidance: float = Field(1.0, ge=1)
    """1 samples without classifier-free guidance"""
    sigmas: list[float] | None = None
    """noise levels before the pipeline's own shift; default its scheduler's"""
    height: int | None = Field(None, ge=8)
    width: int | None = Field(None, ge=8)
    batch_size: int = Field(16, ge=1)
    """samples a network call, each process"""

    def arguments(self, kept: Sequence[int] | None = None) -> dict[str, Any]:
        """As keyword arguments of `DiffusersPolicy.sample`.

        Args:
            kept: only these steps of the schedule; needs `sigmas`.
        """
        size = {k: v for k, v in {"height": self.height, "width": self.width}.items() if v is not None}
        base = {"steps": self.steps, "guidance": self.guidance, "sigmas": self.sigmas}
        if kept is not None:
            assert self.sigmas is not None
            base |= {"steps": len(kept), "sigmas": [self.sigmas[k] for k in kept]}
        return base | {"batch_size": self.batch_size} | size


class RolloutSampling(Sampling):
    kernel: str = "flow_sde"
    eta: float = Field(0.7, ge=0)
    plan: Named = Named(name="all")
    share_start_noise: bool = False
    """the members of a group start from the same noise"""


class Evaluation(Sampling):
    prompts: str | None = None
    """file or shipped list of held-out prompts; null: no evaluation"""
    where: dict[str, list[str]] = {}
    """keep the prompts whose metadata has one of these values"""
    limit: int | None = Field(None, ge=1)
    """use this many prompts, spread evenly over the list"""
    pictures_per_prompt: int = Field(1, ge=1)
    every: int = Field(0, ge=0)
    """iterations between evaluations; 0: only before and after training"""
    seed: int = 1_000_000
    """of the first start noise"""
    rewards: list[Weighted] | None = None
    """default: those trained on"""
    save_pictures: int = Field(16, ge=0)


class Data(Section):
    prompts: str
    """a text file (a prompt a line), JSON lines with a 'prompt' key, or a list shipped with flowalign"""
    where: dict[str, list[str]] = {}


class Optimizer(Section):
    learning_rate: float = Field(3e-4, gt=0)
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """diffusers' get_scheduler"""
    warmup_updates: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(1e-4, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Budget(Section):
    """Training ends with the iteration that uses one of these up."""

    seconds: float | None = Field(None, gt=0)
    forwards: int | None = Field(None, ge=1)
    """samples the denoiser is evaluated on, in rollouts, completions and updates"""
    reward_calls: int | None = Field(None, ge=1)
    """pictures scored for training"""


class Training(Section):
    iterations: int = Field(ge=1)
    prompts_per_iteration: int = Field(ge=1)
    """over all processes"""
    group_size: int = Field(ge=2)
    """trajectories a prompt"""
    updates_per_iteration: int = Field(1, ge=1)
    micro_batch_size: int = Field(16, ge=1)
    """(sample, step) pairs a network call, each process; gradients accumulate over the calls"""
    optimizer: Optimizer = Optimizer()
    ema_decay: float | None = Field(None, gt=0, lt=1)
    seed: int = Field(0, ge=0)
    checkpoint_every: int = Field(10, ge=0)
    """iterations between checkpoints; 0: only at the end"""
    keep_checkpoints: int = Field(2, ge=1)
    previews: int = Field(4, ge=0, le=4)
    """held-out prompts whose denoising and group are saved at each evaluation, for the gallery"""
    budget: Budget = Budget()


class Config(Section):
    model: Model
    data: Data
    rewards: list[Weighted] = Field(min_length=1)
    """weighted sum; each has `name`, optional `weight`, and its own settings"""
    algorithm: Named
    rollout: RolloutSampling = RolloutSampling()
    evaluation: Evaluation = Evaluation()
    training: Training
    output: str = "runs"
    """folder that gets the run's folder"""
    name: str | None = None
    """of the run's folder, default from the configuration's file name and the seed"""
    trackers: list[str] = []
    """accelerate trackers: tensorboard, wandb, ..."""

    def build_algorithm(self) -> Any:
        """The algorithm with its settings checked."""
        kind = registry.resolve("algorithms", self.algorithm.name)
        return kind(parse(kind.Settings, self.algorithm.settings, "algorithm"))

    def build_plan(self) -> Any:
        """The plan, checked against the number of steps."""
        plan = registry.build("plans", self.rollout.plan.name, self.rollout.plan.settings, "rollout.plan")
        try:
            etas = plan.etas(self.rollout.steps, self.rollout.eta, 0, 0)
        except ValueError as error:
            raise ConfigError(f"rollout.plan: {error}") from error
        if not (etas > 0).any():
            raise ConfigError(
                f"rollout.plan: '{self.rollout.plan.name}' with {self.rollout.steps} steps and eta "
                f"{self.rollout.eta} has no stochastic step to learn from; raise rollout.steps or rollout.eta"
            )
        return plan

    def check(self, processes: int) -> None:
        """Everything that can be known to be wrong before a model loads."""
        algorithm = self.build_algorithm()
        algorithm.check(self)
        kernel = registry.resolve("kernels", self.rollout.kernel)
        try:
            check_eta(kernel, self.rollout.eta)
        except ValueError as error:
            raise ConfigError(f"rollout.eta: {error}") from error
        self.build_plan()
        for where, rewards in (("rewards", self.rewards), ("evaluation.rewards", self.evaluation.rewards or [])):
            for i, named in enumerate(rewards):
                registry.check("rewards", named.name, named.settings, f"{where}.{i}")
        for where, sampling in (("rollout", self.rollout), ("evaluation", self.evaluation)):
            if sampling.sigmas is not None and len(sampling.sigmas) != sampling.steps:
                raise ConfigError(
                    f"{where}.sigmas: {len(sampling.sigmas)} noise levels for {where}.steps={sampling.steps}; "
                    "give one a step, without the final 0"
                )
        algorithm.read(self.data)
        if self.evaluation.prompts is not None:
            Prompts.read(self.evaluation.prompts, self.evaluation.where)
        training = self.training
        if training.prompts_per_iteration % processes:
            up = -(-training.prompts_per_iteration // processes) * processes
            raise ConfigError(
                f"training.prompts_per_iteration: {training.prompts_per_iteration} groups cannot be split over "
                f"{processes} processes (groups stay whole); {up} would work"
            )
        items = algorithm.items(self)
        if items % training.updates_per_iteration:
            raise ConfigError(
                f"training.updates_per_iteration: the {items} {algorithm.unit} of a group cannot be split into "
                f"{training.updates_per_iteration} equal updates"
            )

    def dump(self) -> str:
        """The full configuration as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def recipe(name: str) -> Path:
    """The file of a recipe that comes with flowalign, e.g. 'tiny_sd3/flow_grpo'."""
    package = Path(__file__).parent
    # wheels carry configs/ inside the package, a checkout has it beside
    folders = [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]
    return folders[0] / f"{name}.yaml"


def parse(section: type[BaseModel], values: Any, where: str = "") -> Any:
    """Validate values as a section, turning pydantic's report into one line for people."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in ([where] if where else []) + list(first["loc"]))
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            known = _fields(section, [p for p in first["loc"][:-1] if isinstance(p, str)])
            raise ConfigError(f"{path}: unknown key '{key}'; {nearest(key, known)}") from error
        if first["type"] == "missing":
            raise ConfigError(f"{path}: this key is required") from error
        raise ConfigError(f"{path}: {first['msg']} (got {first['input']!r})") from error


def _fields(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Field names of the (sub)section that a path of keys leads to."""
    for key in path:
        annotation = section.model_fields[key].annotation
        options = [annotation, *typing.get_args(annotation)]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(section.model_fields)


def _read(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file, on top of those of the file it `extends`."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration at {path}") from error
    except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration: its top level must be keys and values")
    base = values.pop("extends", None)
    return values if base is None else _merge(_read(path.parent / str(base)), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Sections merge key by key; one that gives a name replaces the other whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both and "name" not in value else value
    return merged


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML configuration and apply `section.key=value` overrides.

    Raises:
        ConfigError: naming the file, the key, and the nearest valid one.
    """
    path = Path(path)
    values = _read(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"'{override}' is not of the form section.key=value")
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: '{parent}' is not a section")
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: '{text}' is not readable YAML: {' '.join(str(error).split())}") from error
    config = parse(Config, values)
    if config.name is None:
        config.name = f"{path.parent.name}-{path.stem}-seed{config.training.seed}"
    return config
