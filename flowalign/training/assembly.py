"""The components of a run, checked and put together."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from flowalign import registry
from flowalign.algorithms.base import Algorithm
from flowalign.config import BaseConfig, Config, kind_of
from flowalign.config.rewards import build_reward
from flowalign.data.by_size import BySize
from flowalign.data.selection.base import Selection
from flowalign.data.sizes import rows_by_size
from flowalign.errors import ConfigError
from flowalign.policies.base import Policy
from flowalign.rollouts.draw import parts_of
from flowalign.rollouts.engine import RolloutEngine
from flowalign.rollouts.groups import Groups
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampler
from flowalign.rollouts.scoring import Scorer
from flowalign.rollouts.store import allocator
from flowalign.runs.checkpoint import Checkpoints, fitting
from flowalign.runs.lock import locked
from flowalign.search.sampler import SearchSampler
from flowalign.settings import parse
from flowalign.training.building import (
    build_accelerator,
    build_policy,
    build_sampler,
    check_device,
    check_media,
    check_sound,
    check_trackers,
    leave_out_cudnn_attention,
    make_trainable,
    share_tokens,
)
from flowalign.training.distributed.sharding import distribute
from flowalign.training.engines.trainside import Trainside
from flowalign.training.given import recorded
from flowalign.training.learner import Learner
from flowalign.training.resuming import check_resumable
from flowalign.training.workers.ahead import Ahead
from flowalign.training.workers.fleet import Fleet
from rewards import Reward, as_reward, spec_of

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Components:
    """All components of a run that a trainer works with."""

    config: BaseConfig
    folder: Path
    """Folder of the run."""
    accelerator: Accelerator
    checkpoints: Checkpoints
    checkpoint: Path | None
    """Checkpoint from which the run continues."""
    algorithm: Algorithm
    policy: Policy
    processes: Processes
    scorer: Scorer
    sampler: Sampler
    groups: Groups
    learner: Learner
    engine: RolloutEngine
    """Engine that samples for this process."""
    ahead: Ahead
    """Draws of the iterations that the engine has begun."""


def assemble(
    config: BaseConfig | dict[str, Any],
    policy: Policy | None,
    reward: Reward | Callable[..., Sequence[float]] | None,
    resume: bool,
) -> Components:
    """Check a configuration and build its components; the arguments are those of `Trainer`."""
    config = parse(kind_of(config), config) if isinstance(config, dict) else config
    config = recorded(config, policy, reward)
    folder = Path(config.output) / (config.name or "run")
    leave_out_cudnn_attention()
    check_trackers(config.trackers)
    accelerator = build_accelerator(
        log_with=config.trackers or None,
        project_dir=str(folder),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.training.timeout))],
    )
    config.check(accelerator.num_processes)
    checkpoints = Checkpoints(folder / "checkpoints", config.training.keep_checkpoints)
    checkpoint = _resumed(config, folder, checkpoints, accelerator, resume)
    algorithm, reward = _algorithm_and_reward(config, policy, reward, accelerator)
    # workers load the model at the same time
    workers = config.rollout.workers
    fleet = None if workers is None else Fleet(config, workers, accelerator.device, accelerator.num_processes)
    policy = policy or build_policy(config, accelerator.device)
    check_device(policy, accelerator.device)
    make_trainable(policy, config.model, algorithm.uses_reference or config.rollout.weights == "reference")
    sharding = distribute(policy, config, accelerator)
    processes = Processes(accelerator, config.model.context_parallel if isinstance(config, Config) else None)
    policy.bind(reward)
    sampler, scorer = build_sampler(config, policy, spec_of(reward).needs), Scorer(reward, processes)
    if isinstance(sampler, DiffusionSampler):
        sampler.scorer = scorer
        if config.rollout.search is not None:
            sampler.search = SearchSampler(config.rollout.search, sampler, scorer)
        sampler.allocate = allocator(sampler.config.rollout.store, folder)
    sampler.overlaps = overlaps(config, algorithm, reward)
    without_context_parallel = share_tokens(policy, processes)
    groups = _groups(config, algorithm, sampler, scorer, processes)
    engine = _engine(fleet, algorithm, sampler, processes, folder)
    policy.expect(groups.coming)
    fetches = sampler.allocate is not None
    learner = Learner(config, algorithm, policy, processes, sharding, without_context_parallel, fetches)
    return Components(
        config=config,
        folder=folder,
        accelerator=accelerator,
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        algorithm=algorithm,
        policy=policy,
        processes=processes,
        scorer=scorer,
        sampler=sampler,
        groups=groups,
        learner=learner,
        engine=engine,
        ahead=Ahead(engine, groups, config.rollout.staleness, config.training.iterations),
    )


def _algorithm_and_reward(
    config: BaseConfig,
    policy: Policy | None,
    reward: Reward | Callable[..., Sequence[float]] | None,
    accelerator: Accelerator,
) -> tuple[Algorithm, Reward]:
    """Build and check the algorithm and the reward before the model, which may take minutes to load."""
    if config.rollout.workers is not None and policy is not None:
        raise ConfigError(
            "rollout.workers: they load the model themselves, and this one was handed over in Python; give its "
            "folder or hub name as model.path"
        )
    torch.manual_seed(config.training.seed)
    check_sound(config, policy)
    reward = build_reward(config.rewards) if reward is None else as_reward(reward)
    check_media(reward, config.model)
    torch.manual_seed(config.training.seed)
    algorithm: Algorithm = config.build_algorithm()
    algorithm.check_reward(reward, config)
    _check_parts(config, reward)
    if accelerator.is_main_process:
        _warn_of_unused(config, algorithm)
    return algorithm, reward


def _groups(config: BaseConfig, algorithm: Algorithm, sampler: Sampler, scorer: Scorer, processes: Processes) -> Groups:
    prompts = config.data.kept(algorithm.read(config.data))
    chosen = config.data.selection

    def build() -> Selection:
        return cast(Selection, registry.build("selections", chosen.name, chosen.settings, "data.selection"))

    several = config.model.kind == "pictures" and len(rows_by_size(prompts.metadata)) > 1
    # shuffled prompts know sizes, where every iteration has as many groups
    plain = chosen.name == "shuffled" and config.data.dynamic_sampling is None
    selection = BySize(build, prompts) if several and not plain else build()
    return Groups(prompts, selection, sampler, scorer, processes, algorithm.branches(config))


def _engine(
    fleet: Fleet | None, algorithm: Algorithm, sampler: Sampler, processes: Processes, folder: Path
) -> RolloutEngine:
    """The engine of this process: the workers that were started, servers, or the process itself."""
    if fleet is not None:
        fleet.policy = sampler.policy
        return fleet
    served = sampler.config.rollout.engine.served(sampler.config.model.kind)
    if served is None:
        return Trainside(algorithm, sampler)
    kind, settings = served
    engine: RolloutEngine = kind(settings, algorithm, sampler, processes, folder)
    return engine


def _resumed(
    config: BaseConfig, folder: Path, checkpoints: Checkpoints, accelerator: Accelerator, resume: bool
) -> Path | None:
    """The checkpoint from which the run continues; None at its beginning."""
    if checkpoints.all() and not resume:
        raise ConfigError(f"{folder} already holds a run; --resume goes on with it, name=... starts another")
    with locked(folder) if folder.is_dir() and accelerator.is_main_process else nullcontext():
        checkpoint = checkpoints.newest() if resume else None
    if checkpoint is not None:
        with fitting(checkpoint):
            check_resumable(checkpoints.state(checkpoint)["config"], config)
    elif resume and accelerator.is_main_process:
        logger.warning("nothing to resume: %s holds no checkpoint; the run starts at its beginning", folder)
    return checkpoint


def _check_parts(config: BaseConfig, reward: Reward) -> None:
    """Refuse rewards that cannot score parts of an iteration, or the kinds of samples that workers send."""
    for i, named in enumerate(config.rewards):
        if named.name.startswith(registry.GIVEN):
            continue
        for kind, settings in registry.with_settings(named.name, named.settings):
            weights = settings.get("weights") if getattr(kind, "asks_snapshots", False) else None
            if weights is not None and weights not in config.training.snapshots:
                raise ConfigError(
                    f"rewards.{i}: no snapshot is called '{weights}'; "
                    f"training.snapshots={{{weights}: {{decay: 0.99}}}} makes it"
                )
            if weights is not None and parts_of(config) > 1:
                raise ConfigError(
                    f"rewards.{i}: it swaps the model's weights for those of '{weights}' while texts are sampled; "
                    "rollout.overlap=1 without workers works"
                )
    workers, needs = config.rollout.workers, spec_of(reward).needs
    if parts_of(config) > 1 and spec_of(reward).kind == "set":
        key = "overlap" if workers is None else "workers"
        raise ConfigError(
            f"rollout.{key}: the reward '{reward.name}' looks at all pictures of an iteration at once, so they "
            f"cannot be scored in parts; {key}: {1 if workers is None else '{count: 1}'} works"
        )
    unsent = sorted(needs & {"latents", "sound"})
    if workers is not None and unsent:
        raise ConfigError(
            f"rollout.workers: they send pictures, videos and texts, and the reward '{reward.name}' needs "
            f"{' and '.join(unsent)}; without workers it works"
        )


def overlaps(config: BaseConfig, algorithm: Algorithm | type[Algorithm], reward: Reward) -> bool:
    """Whether parts are scored while others are sampled although no setting says so."""
    rollout, spec = config.rollout, spec_of(reward)
    shared = isinstance(config, Config) and config.model.context_parallel.degree > 1
    free = rollout.overlap is None and rollout.workers is None and rollout.search is None and not shared
    # what draws more than whole trajectories puts other network batches together in parts
    return free and {"overlap", "served"} <= algorithm.combines and spec.off_device and spec.kind != "set"


def _warn_of_unused(config: BaseConfig, algorithm: Algorithm) -> None:
    """Warn about settings that the method does not use."""
    unused, why = algorithm.without_effect(config)
    if unused:
        logger.warning("%s has no effect: %s %s", ", ".join(unused), config.algorithm.name, why)
