"""The updates of an iteration: chunks of an experience, gradients over processes, and copies of the weights."""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.algorithms import policy_gradient
from flowalign.algorithms.base import Algorithm, Experience
from flowalign.algorithms.policy_gradient import PolicyGradient
from flowalign.config.sections import BaseConfig, Subsample
from flowalign.core.subsampling import inclusion, subsample
from flowalign.errors import FlowalignError
from flowalign.policies.base import Policy
from flowalign.policies.settings import Role, Snapshot
from flowalign.policies.snapshots import Snapshots
from flowalign.rollouts.processes import Processes
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from flowalign.runs.progress import report
from flowalign.training.distributed.sharding import Sharding, like, restore, unsynced, whole
from flowalign.training.memory import make_optimizer, while_it_fits
from flowalign.training.optimization import Optimization
from flowalign.training.visits import visiting
from samplers import derive_seed

logger = logging.getLogger(__name__)

NO_ADVANTAGE = 0.01
"""Largest mean size of a sample's advantages that rounding alone may cause."""
NO_MOVE = 1e-12
"""Norm below which a gradient is too small, compared with AdamW's epsilon, to move any weight."""
ALIKE = (
    "the rewards of every group are all alike (reward/zero_spread is 1); what helps: harder or easier prompts, a "
    "larger training.group_size"
)
NO_GRADIENT = "the gradient is 0 (policy/gradient_norm): all advantages are 0, or"
IDLE = {
    "reward/zero_spread": {"pictures": f"{ALIKE}, or rollout.share_start_noise: false", "text": ALIKE},
    "policy/gradient_norm": {
        "pictures": f"{NO_GRADIENT} no step draws noise (rollout.kernel, rollout.plan)",
        "text": f"{NO_GRADIENT} no text ends in time to count (rollout.max_new_tokens, algorithm.mask_truncated)",
    },
}
"""Causes and remedies of an iteration that taught nothing, by metric and kind of sample."""


def parameter_groups(policy: Policy, modules: Mapping[str, nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Trained parameters by name: the policy's, and those of further modules."""
    named = [(f"{name}.{key}", p) for name, module in modules.items() for key, p in module.named_parameters()]
    return [policy.trainable(), {name: parameter for name, parameter in named if parameter.requires_grad}]


class Learner(Optimization):
    """Updates a policy's weights by its experience, by a configuration's settings, together with other processes.

    Args:
        algorithm: gives the losses; it may have networks of its own, which train together with the policy.
        policy: the policy in training.
        processes: this process, among the others.
        sharding: sharding of the policy's network; None if every process has it whole.
        without_context_parallel: context in which a process uses the networks without those that share its samples.
        fetches: trajectories wait on the host, and each micro-batch copies what it reads to the device.
    """

    def __init__(
        self,
        config: BaseConfig,
        algorithm: Algorithm,
        policy: Policy,
        processes: Processes,
        sharding: Sharding | None = None,
        without_context_parallel: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        fetches: bool = False,
    ) -> None:
        self.config, self.algorithm, self.policy, self.processes = config, algorithm, policy, processes
        self.sharding, self.accelerator = sharding, processes.accelerator
        self.without_context_parallel, self.fetches = without_context_parallel, fetches
        training = self.config.training
        self.modules = {**self.policy.companions, **algorithm.modules(self.policy)}
        updates = training.iterations * training.updates
        groups = parameter_groups(self.policy, self.modules)
        average = training.ema_decay, training.ema_every
        half = self.config.model.compute_dtype == "float16"
        host = training.offload_copies
        super().__init__(groups, training.optimizer, updates, self.accelerator.device, *average, half, host)
        self.replicated = sharding is None
        """True if every process has the whole network, and can use it by itself."""
        self._warned: set[str] = set()
        """Metrics that a warning has named already."""
        self.shown_weights: str = self.config.evaluation.weights or ("policy" if self.ema is None else "ema")
        """Name of the weights that are evaluated and saved."""
        self.replays, self.tolerance = self._comparison()
        self.roles = algorithm.roles
        self._keep_snapshots()
        self.role_optimizers = {name: self._role_optimizer(role, groups) for name, role in self.roles.items()}
        self.head_start = max((role.alone for role in self.roles.values()), default=0)
        """Number of updates at the start that move only the other sets of weights."""

    def _role_optimizer(self, role: Role, groups: Sequence[dict[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Optimizer of another set of weights, which are put into the same parameters for their updates."""
        changes = {"learning_rate": role.learning_rate, "betas": role.betas}
        settings = self.settings.model_copy(update={key: value for key, value in changes.items() if value is not None})
        return make_optimizer([list(group.values()) for group in groups if group], settings, self.accelerator.device)

    @property
    def sampling_weights(self) -> str:
        """Name of the weights that draw the next samples to learn from."""
        return self.config.rollout.weights or self.algorithm.sampling_weights

    def _comparison(self) -> tuple[bool, float | None]:
        """Whether ratios refer to a replay, and how far a server's log-probabilities may be from it, in clip ranges.

        The second is None where flowalign samples itself, and where samples are drawn by earlier weights.
        """
        setting, algorithm = self.config.training.old_log_prob, self.algorithm
        if not isinstance(algorithm, PolicyGradient):
            return False, None
        served = self.config.rollout.engine.served(self.config.model.kind)
        ahead = self.config.rollout.staleness > 0
        replays = setting == "replayed" or (setting is None and algorithm.replays_old(self.config))
        return replays, None if served is None or ahead else served[1].mismatch

    def _keep_snapshots(self) -> None:
        """Make the named copies of the weights: the algorithm's, and those of the configuration."""
        roles = dict.fromkeys(self.roles, Snapshot(decay=1.0))
        settings = {**self.algorithm.snapshots, **roles, **self.config.training.snapshots}
        host = self.config.training.offload_copies
        refresh = None if self.sharding is None else self._refresh
        self.snapshots = Snapshots(self.local_parameters, settings, refresh, host)
        self.policy.snapshots = self.snapshots

    def _refresh(self) -> None:
        """React to new values of the parameters: drop gathered copies of shards."""
        if self.sharding is not None:
            self.sharding.reshard(self.policy.network)

    def learn(self, experience: Experience, iteration: int, progress: float) -> dict[str, float]:
        """Do all updates of an iteration.

        Args:
            progress: share of the training so far, for the learning rate's schedule.

        Returns:
            means of the updates' metrics, over all processes, without the updates that were skipped; and the seconds.
        """
        begin = time.perf_counter()
        sums: dict[str, list[Tensor]] = defaultdict(list)
        skipped = 0
        updates = iteration * self.config.training.updates
        chunks = list(self.chunks(experience, iteration))
        mismatch = self.mismatch(experience, chunks[: self.config.training.updates_per_iteration])
        for i, items in enumerate(chunks):
            report(i + 1, len(chunks))
            rate = self.set_learning_rate(round(progress * self.updates) + i)
            measured = self._update_roles(experience, items) if self.roles else {}
            if updates >= self.head_start:
                seed = derive_seed(self.config.training.seed, iteration, i, self.processes.row, 7)
                measured |= self.update(experience, items, seed=seed)
            if self.snapshots.settings:
                self.snapshots.follow("update", updates + 1, updates)
            updates += 1
            skipped += self.skipped > 0
            for name, value in measured.items() if not self.skipped else ():
                sums[name].append(value)
        if self.snapshots.settings:
            self.snapshots.follow("iteration", iteration + 1, updates)
        metrics = {name: self.processes.gather(torch.stack(values)).mean().item() for name, values in sums.items()}
        if skipped:
            metrics["policy/skipped_updates"] = skipped
        self._warn_if_idle(experience, experience.metrics | metrics, iteration)
        return metrics | mismatch | {"learning_rate": rate, "seconds/update": time.perf_counter() - begin}

    def mismatch(self, experience: Experience, chunks: Sequence[Tensor]) -> dict[str, float]:
        """Difference of log-probabilities between a replay before any update and the sampling.

        With `training.old_log_prob: replayed` all items are replayed, in the batches of the updates, and ratios
        refer to this replay from then on; otherwise only a few items are, which costs little.

        Args:
            chunks: the items of each update of a pass.

        Returns:
            the mean size of the log-ratios over all processes, of all actions and of each step.
        """
        algorithm, keep = self.algorithm, self.replays
        if not isinstance(algorithm, PolicyGradient) or not isinstance(experience, policy_gradient.ActionExperience):
            return {}
        if not keep and self.sampling_weights != "policy":
            # other weights sampled, so that the difference is not due to rounding
            return {}
        chunks = [self._with_gradient(experience, items) for items in chunks] if keep else [algorithm.few(experience)]
        forwards = self.policy.forwards

        def replay() -> list[Tensor]:
            ratios = []
            for chunk in (chunk for items in chunks for chunk in items.split(self.config.training.micro_batch_size)):
                # with gradients, as in an update: without them a network may round differently
                with self._accumulated(last=False):
                    ratios.append(algorithm.replay(self.policy, experience, chunk, keep))
            return ratios

        alone = self.accelerator.num_processes == 1
        size = torch.cat(while_it_fits(self.config, "training", "micro_batch_size", replay, lambda: alone)).abs()
        if not keep:
            # a measurement is not counted as training
            self.policy.forwards = forwards
        sums = torch.stack([size.nansum(0), (~size.isnan()).sum(0)])[None]
        totals, counts = self.processes.gather(sums).sum(0).tolist()
        means = {k: total / count for k, (total, count) in enumerate(zip(totals, counts, strict=True)) if count}
        if not means:
            return {}
        if not keep:
            self._warn_if_coarse(means)
        if self.tolerance is not None and self.sampling_weights == "policy":
            self._check_engine(means, self.tolerance)
        steps = {f"policy/mismatch/{k}": mean for k, mean in means.items()} if len(totals) > 1 else {}
        return {"policy/mismatch": sum(totals) / sum(counts)} | steps

    def _check_engine(self, means: Mapping[int, float], tolerance: float) -> None:
        """Refuse to learn from servers whose log-probabilities are far from a replay's by the weights that sampled."""
        assert isinstance(self.algorithm, PolicyGradient)
        clip_range, step = self.algorithm.clip_range, max(means, key=lambda k: means[k])
        if clip_range is not None and not means[step] <= tolerance * clip_range:
            raise FlowalignError(
                f"log-probability: those of {self.config.rollout.engine.name} are {means[step]:.2g} from the replay's "
                f"on average at step {step}, {means[step] / clip_range:.2g} times the clip range of {clip_range:g}; "
                "what helps: the engine's network in model.dtype or float32, or a larger rollout.engine.mismatch"
            )

    def _warn_if_coarse(self, means: Mapping[int, float]) -> None:
        """Warn once if rounding alone brings ratios near the clip range."""
        assert isinstance(self.algorithm, PolicyGradient)
        clip_range, worst = self.algorithm.clip_range, max(means.values())
        if clip_range is None or worst <= clip_range / 2 or "policy/mismatch" in self._warned:
            return
        if self.config.rollout.staleness:
            # earlier weights sampled, which the ratios correct
            return
        self._warned.add("policy/mismatch")
        if self.accelerator.is_main_process:
            logger.warning(
                "before any update log-ratios are %.2g on average (policy/mismatch), by rounding in %s alone, and the "
                "clip range is %g; what helps: training.old_log_prob: replayed, or model.dtype: float16 or float32",
                worst,
                self.config.model.compute_dtype,
                clip_range,
            )

    def _warn_if_idle(self, experience: Experience, metrics: Mapping[str, float], iteration: int) -> None:
        """Warn once for each reason why an iteration taught nothing, and say what would help."""
        outcome, name = experience.outcome(), ""
        if metrics.get("reward/zero_spread") == 1 and outcome is not None:
            # in some methods, such as NGRPO, groups of equal rewards have advantages
            name = "" if self.processes.maximum(bool((outcome[1] > NO_ADVANTAGE).any())) else "reward/zero_spread"
        norm = metrics.get("policy/gradient_norm", 1.0)
        if not name and norm < NO_MOVE:
            name = "policy/gradient_norm"
        if name and name not in self._warned and self.accelerator.is_main_process:
            why = IDLE[name][self.config.model.kind]
            if name == "policy/gradient_norm" and self.algorithm.idle:
                why = f"the gradient is {norm:.2g} (policy/gradient_norm): {self.algorithm.idle}"
            logger.warning("iteration %d taught nothing: %s", iteration, why)
        self._warned.add(name)

    def chunks(self, experience: Experience, iteration: int) -> Iterator[Tensor]:
        """Yield the items of each update: in every pass an equal, random share of every group's items."""
        training = self.config.training
        groups = list(dict.fromkeys(experience.batch.group))
        items = experience.items.unflatten(0, (len(groups), -1))
        for number in range(training.passes):
            orders = []
            for group in groups:
                seed = derive_seed(training.seed, iteration, group, 2, *([number] if number else []))
                generator = torch.Generator().manual_seed(seed)
                orders.append(torch.randperm(items.shape[1], generator=generator))
            order = torch.stack(orders).to(items.device)
            mixed = items.gather(1, order[..., None].expand_as(items))
            for chunk in mixed.chunk(training.updates_per_iteration, dim=1):
                yield chunk.flatten(0, 1)

    def _update_roles(self, experience: Experience, items: Tensor) -> dict[str, Tensor]:
        """Update the algorithm's other sets of weights on these items."""
        measured: dict[str, Tensor] = {}
        optimizer, average = self.optimizer, self.ema
        for name, role in self.roles.items():
            self.optimizer, self.ema = self.role_optimizers[name], None
            factor = optimizer.param_groups[0]["lr"] / self.settings.learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] = factor * (role.learning_rate or self.settings.learning_rate)
            with self.snapshots.trained(name):
                for number in range(role.updates):
                    redrawn = self.algorithm.redrawn(experience, number)
                    values = self.update(redrawn, items, partial(self.algorithm.role_losses, name))
            measured |= {key.replace("policy/", f"{name}/"): value for key, value in values.items()}
        self.optimizer, self.ema = optimizer, average
        return measured

    def update(
        self, experience: Experience, items: Tensor, losses: Callable[..., Any] | None = None, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Do one optimizer step on the mean loss of these items over all processes; return its metrics.

        Arguments and metrics are as in `differentiate`.
        """
        means = self.differentiate(experience, items, losses, seed)
        return means | {"policy/gradient_norm": self.step().to(self.accelerator.device)}

    def differentiate(
        self, experience: Experience, items: Tensor, losses: Callable[..., Any] | None = None, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Compute the gradients of the mean loss of these items over all processes; return its metrics.

        Args:
            losses: function of the losses; default the algorithm's.
            seed: seed of the random share of the items with `training.subsample`; None takes all.

        Returns:
            this process's part of the metrics, whose mean over processes is the mean over all items.
        """
        total = self._total(experience, items)
        items, weights = self._with_gradient(experience, items), None
        if seed is not None and self.config.training.subsample is not None:
            items, weights = self._subsampled(experience, items, self.config.training.subsample, seed)
        weights, count = self._shares(experience, items, weights)
        visits = partial(visiting, self.algorithm, experience) if self.fetches and losses is None else iter
        losses = partial(losses or self.algorithm.losses, self.policy, experience)

        def backward() -> dict[str, Tensor]:
            return self.backward(losses, items, total, self.config.training.micro_batch_size, weights, visits)

        alone = self.accelerator.num_processes == 1
        sums = while_it_fits(self.config, "training", "micro_batch_size", backward, lambda: alone)
        sums["policy/loss"] = sums.pop("loss")
        if self.accelerator.num_processes > 1:
            self._share_own_gradients()
        self.policy.drop_unused()
        return {name: value / count for name, value in sums.items()}

    def gradient(
        self, experience: Experience, items: Tensor, losses: Callable[..., Any] | None = None, most: int | None = None
    ) -> Tensor:
        """[D] the gradient of the mean loss of these items, on the CPU and before it is clipped; no weight changes.

        Args:
            losses: function of the losses; default the algorithm's.
            most: take this many of the parameters, evenly spread; default all.
        """
        self.differentiate(experience, items, losses)
        scale = self.scale.value if self.scale else 1.0
        stride = 1 if most is None else -(-sum(parameter.numel() for parameter in self.parameters.values()) // most)
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters.values()
        ]
        sparse = torch.cat([gradient.flatten()[::stride].float().cpu() for gradient in gradients])
        self.optimizer.zero_grad()
        return sparse / scale

    def _clip(self) -> Tensor:
        # accelerate's function adds up the norms of sharded and of whole parameters
        return self.accelerator.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)

    def _accumulated(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which gradients are added up on each process, and with the last micro-batch over processes."""
        if last:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.policy.model) if self.replicated else unsynced(self.policy.model)

    def _share_own_gradients(self) -> None:
        """Average the gradients of further networks over processes, which no wrapper does for them."""
        for module in self.modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    # each of the processes that share samples has the whole gradient, so that it counts repeatedly
                    parameter.grad = self.accelerator.reduce(parameter.grad, "mean") / self.processes.columns

    def _total(self, experience: Experience, items: Tensor) -> float:
        """Divisor of the sum of the items' losses: the number of items, or the mean over processes of those that count.

        Each of the processes that share samples has a part of the gradient, and the mean over processes is taken.
        """
        counted, columns = experience.counted(items), self.processes.columns
        if counted is None:
            return len(items) / columns
        mean = self.processes.gather(counted.sum()[None]).float().mean().item()
        # 1 where nothing counts, and the sum is 0
        return (mean or 1.0) / columns

    def _with_gradient(self, experience: Experience, items: Tensor) -> Tensor:
        """Leave out items that teach nothing, such as actions of zero advantage, unless the loss has other terms.

        Every process keeps the same number, at least one, so that collective operations match.
        """
        useful = self._useful(experience, items)
        if useful is None:
            return items
        keep = max(1, self.processes.maximum(int(useful.sum())))
        # stable: useful items come first, and both kinds stay in their random order
        return items[torch.argsort(~useful, stable=True)[:keep]]

    def _useful(self, experience: Experience, items: Tensor) -> Tensor | None:
        """[N] bool: the items that teach something; None: all."""
        counted = experience.counted(items)
        if counted is not None or self.algorithm.uses_reference:
            return counted
        return experience.useful(items)

    def _shares(
        self, experience: Experience, items: Tensor, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | int]:
        """[N] weights of the items in sums of metrics and losses, None: 1; and their sum, averaged over processes.

        Useless items, which a process keeps to have as many as the others, weigh 0. If no process has a useful item,
        they weigh 1.
        """
        useful = self._useful(experience, items)
        if weights is None and useful is None:
            return None, len(items)
        weights = torch.ones(len(items), device=items.device) if weights is None else weights
        wanted = weights if useful is None else weights * useful
        of_all, of_wanted = self.processes.gather(torch.stack([weights.sum(), wanted.sum()])[None]).mean(0)
        nothing = of_wanted == 0
        # a share of the items may be none at all
        count = torch.where(nothing, of_all, of_wanted).clamp(min=torch.finfo(weights.dtype).tiny)
        return torch.where(nothing, weights, wanted), count

    def _subsampled(
        self, experience: Experience, items: Tensor, settings: Subsample, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Draw some of the items, the same number on every process, with their weights."""
        size = experience.size(items) if settings.by == "advantage" else torch.ones(len(items), device=items.device)
        probability = inclusion(size, settings.share, 0.5 if settings.by == "advantage" else 0.0)
        weights = subsample(probability, torch.Generator().manual_seed(seed))
        keep = max(1, self.processes.maximum(int(weights.count_nonzero())))
        first = torch.argsort(weights == 0, stable=True)[:keep]
        return items[first], weights[first]

    def weights(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy has the weights of this name: policy, reference, ema, or a snapshot's."""
        if name == "policy":
            return contextlib.nullcontext()
        if name == "reference":
            return self.policy.reference()
        return self._ema_weights() if name == "ema" else self.policy.snapshot(name)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy has the weights to show and to save: by default the average, if there is one."""
        return self.weights(self.shown_weights)

    @contextlib.contextmanager
    def _ema_weights(self) -> Iterator[None]:
        assert self.ema is not None, "the configuration was checked"
        self.ema.store(self.local_parameters.values())
        self.ema.copy_to(self.local_parameters.values())
        try:
            yield
        finally:
            self.ema.restore(self.local_parameters.values())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which a process can use the network without the others, with the weights to show."""
        with self.averaged(), self._gathered(), self.without_context_parallel():
            yield
            self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Context in which the policy can sample, with the weights that draw samples to learn from."""
        with self.weights(self.sampling_weights), self.usable():
            yield

    def usable(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy can sample; all processes enter and leave together.

        A language model has whole weights there, since the number of its calls depends on the text.
        """
        return self._gathered() if self.config.model.kind == "text" else contextlib.nullcontext()

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Context in which every process has all weights of the policy's network."""
        return self.sharding.gathered(self.policy.network) if self.sharding else contextlib.nullcontext()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Gather the weights to show of a sharded network, for saving; None if the network is not sharded."""
        if self.sharding is None:
            return None
        with self.averaged():
            weights, trained = self.policy.network.state_dict(), self.policy.trainable()
            if self.policy.lora:
                weights = {name: value for name, value in weights.items() if name in trained}
            return whole(weights, keep=self.accelerator.is_main_process)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Whole tensors and JSON of the trained state, on the main process; all processes call this together."""
        moments, extra = optimizer_tensors(self.optimizer.state_dict())
        tensors: dict[str, dict[str, Tensor]] = {"trainable": {**self.parameters}, "optimizer": moments}
        state = {"optimizer": extra}
        if self.ema is not None:
            tensors["ema"] = dict(zip(self.parameters, self.ema.shadow_params, strict=True))
            state["ema_steps"] = self.ema.optimization_step
        for name, copies in self.snapshots.weights.items():
            tensors[f"snapshot_{name}"] = dict(zip(self.parameters, copies, strict=True))
        for name, optimizer in self.role_optimizers.items():
            tensors[f"optimizer_{name}"], state[f"optimizer_{name}"] = optimizer_tensors(optimizer.state_dict())
        if self.scale:
            state["loss_scale"] = vars(self.scale)
        main = self.accelerator.is_main_process
        return {name: whole(entries, keep=main) for name, entries in tensors.items()}, state

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.load_weights(tensors, state)
        optimizers = {"optimizer": self.optimizer}
        optimizers |= {f"optimizer_{name}": optimizer for name, optimizer in self.role_optimizers.items()}
        parameters = list(self.parameters.values())
        for name, optimizer in optimizers.items():
            moments = optimizer_state(tensors[name], state[name])
            for index, values in moments["state"].items():
                values |= {key: like(value, parameters[index]) for key, value in values.items()}
            optimizer.load_state_dict(moments)
        if self.scale and "loss_scale" in state:
            vars(self.scale).update(state["loss_scale"])

    def load_weights(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Load the trained weights of a checkpoint, their average and their snapshots."""
        restore(self.parameters, tensors["trainable"])
        if self.ema is not None:
            self.ema.optimization_step = state["ema_steps"]
            for name, shadow in zip(self.parameters, self.ema.shadow_params, strict=True):
                shadow.copy_(like(tensors["ema"][name], shadow))
        for name, copies in self.snapshots.weights.items():
            if f"snapshot_{name}" not in tensors:
                self.snapshots.reset(name)
                continue
            for key, copy in zip(self.parameters, copies, strict=True):
                copy.copy_(like(tensors[f"snapshot_{name}"][key], copy))
