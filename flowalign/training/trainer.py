"""The training loop: collect experience, update, measure, save; the same for every algorithm."""

import contextlib
import logging
import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from flowalign import registry
from flowalign.algorithms.base import Experience
from flowalign.config import kind_of
from flowalign.data import Prompts
from flowalign.errors import ConfigError, FlowalignError
from flowalign.files import write_atomically
from flowalign.policies.base import Policy
from flowalign.policies.experts import check_processes
from flowalign.sections import BaseConfig, Named, Weighted, parse
from flowalign.training.checkpoint import (
    Checkpoints,
    optimizer_state,
    optimizer_tensors,
    restore,
)
from flowalign.training.evaluation import Evaluated, evaluate
from flowalign.training.groups import Groups
from flowalign.training.medium import MEDIA
from flowalign.training.memory import make_optimizer, out_of_memory
from flowalign.training.metrics import MetricsFile
from flowalign.training.pulse import Pulse
from flowalign.training.sharding import Sharding, like, unsynced, whole
from flowalign.training.watch import NOTHING_SEEN, Panel, judge, watched
from rewards import Reward, WeightedSum, advance, as_reward, spec_of
from samplers import derive_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST = re.compile("gloo|nccl|connection|timed? ?out", re.IGNORECASE)
"""in the communication libraries' errors when a process is gone or late"""


def build_policy(config: BaseConfig, device: torch.device | str = "cpu") -> Any:
    """Load the model of a configuration, without anything trainable yet."""
    return MEDIA[config.medium].policy(config, device)


def build_rewards(named: Sequence[Named], where: str = "rewards") -> list[Reward]:
    """Configured rewards, each of which gives one value a sample."""
    rewards = []
    for i, entry in enumerate(named):
        rewards.append(as_reward(registry.build("rewards", entry.name, entry.settings, f"{where}.{i}")))
        if spec_of(rewards[-1]).kind == "pairwise":
            raise ConfigError(f"{where}.{i}: '{entry.name}' compares pairs; wrap it in 'win_rate'")
    return rewards


def build_reward(named: Sequence[Weighted], where: str = "rewards") -> Reward:
    """The weighted sum of configured rewards; a single one of weight 1 stays itself."""
    rewards, weights = build_rewards(named, where), [entry.weight for entry in named]
    return rewards[0] if weights == [1.0] else WeightedSum(rewards, weights)


class Trainer:
    """Trains a policy with the algorithm of a configuration.

    Args:
        config: a `Config` or `TextConfig`, or its keys and values as a dictionary.
        policy: default the configuration's model.
        reward: a reward or any function (samples, prompts) -> list of floats; default the configuration's.
        resume: go on from the newest whole checkpoint of the run's folder.
        progress: show a progress bar.
    """

    def __init__(
        self,
        config: BaseConfig | dict[str, Any],
        policy: Policy | None = None,
        reward: Any = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        self.config: Any = parse(kind_of(config), config) if isinstance(config, dict) else config
        config = self.config
        self.medium = MEDIA[config.medium]
        self.folder = Path(config.output) / (config.name or "run")
        self.accelerator = Accelerator(
            # without it processes of torchrun on a machine without accelerators would not find each other
            cpu=not torch.accelerator.is_available(),
            log_with=config.trackers or None,
            project_dir=str(self.folder),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.training.timeout))],
        )
        config.check(self.accelerator.num_processes)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.training.keep_checkpoints)
        if self.checkpoints.all() and not resume:
            raise ConfigError(f"{self.folder} already holds a run; --resume goes on with it, name=... starts another")
        self.progress = progress and self.accelerator.is_main_process

        training = config.training
        torch.manual_seed(training.seed)
        self.algorithm = config.build_algorithm()
        self.policy: Any = policy or build_policy(config, self.accelerator.device)
        if config.model.lora is not None:
            lora = config.model.lora
            self.policy.add_lora(lora.rank, lora.alpha, lora.targets, lora.init)
        else:
            if self.algorithm.uses_reference:
                self.policy.keep_reference()
            self.policy.train_all()
        if config.model.gradient_checkpointing:
            self.policy.checkpoint_gradients()
        if getattr(self.config.model, "compile", False):
            self.policy.compile()
        self.sharding = Sharding.configured(self.accelerator.device)
        self._spread()
        reward = build_reward(config.rewards) if reward is None else as_reward(reward)
        if getattr(self.config.rollout, "overlap", 1) > 1 and spec_of(reward).kind == "set":
            raise ConfigError(
                f"rollout.overlap: the reward '{reward.name}' looks at all pictures of an iteration at once, so they "
                "cannot be scored in parts; overlap: 1 works"
            )
        self.actor: Any = self.medium.actor(config, self.policy, reward, self.accelerator)
        self.eval_reward = (
            build_reward(config.evaluation.rewards, "evaluation.rewards") if config.evaluation.rewards else reward
        )
        watchers = build_rewards(config.evaluation.panel, "evaluation.panel")
        self.panel = Panel(self.eval_reward, watchers, reward, self.folder, self.accelerator.process_index)
        self.policy.bind(self.panel)
        self.verdict = NOTHING_SEEN
        self.prompts = config.data.kept(self.algorithm.read(config.data))
        selection = config.data.selection
        self.selection = registry.build("selections", selection.name, selection.settings, "data.selection")
        self.groups = self.actor.groups = Groups(config, self.prompts, self.selection, self.actor)

        self.modules = self.algorithm.modules(self.policy)
        own = {f"{name}.{key}": p for name, m in self.modules.items() for key, p in m.named_parameters()}
        self.parameters = self.policy.trainable() | own
        settings = training.optimizer
        # apart: an optimizer's step does not mix sharded parameters with whole ones
        groups = [list(p.values()) for p in (self.policy.trainable(), own) if p]
        self.optimizer = make_optimizer(groups, settings, self.accelerator.device)
        self.updates = training.iterations * training.updates_per_iteration
        """optimizer steps of the whole training, where no budget ends it before"""
        schedule = get_scheduler(
            settings.schedule,
            self.optimizer,
            num_warmup_steps=settings.warmup_updates,
            num_training_steps=self.updates,
        )
        self.learning_rate_factor = schedule.lr_lambdas[0]
        self.ema = EMAModel(self.parameters.values(), training.ema_decay) if training.ema_decay else None

        self.iteration = 0
        self.resumed = False
        """a checkpoint was found to go on from"""
        self.seconds = 0.0
        """spent in iterations so far"""
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.evaluations = MetricsFile(self.folder / "evaluations.jsonl")
        self.pulse: Pulse | None = None
        if resume:
            self._resume()

    def _spread(self) -> None:
        """Copies of the network on every process, or shards of it."""
        check_processes(self.policy.network, self.accelerator.num_processes)
        if self.sharding is None:
            self.policy.model = self.accelerator.prepare(self.policy.network)
            return
        if self.config.medium == "text":
            raise ConfigError("language models are trained in whole copies, not in shards: launch without FSDP")
        if self.config.model.base_bits is not None:
            raise ConfigError("model.base_bits: quantised weights are not put in shards; null works, or whole copies")
        if self.config.training.optimizer.bits == 8:
            raise ConfigError("training.optimizer.bits: moments in shards are not quantised; 32 works")
        self.sharding.shard(self.policy.network)
        if self.policy._reference is not None:
            self.sharding.shard(self.policy._reference)

    # The loop

    def train(self) -> None:
        """Run the remaining iterations; evaluates before, in between as configured, and after.

        Raises:
            FlowalignError: another process is gone, or did not come in time; says where each was.
        """
        processes = self.accelerator.num_processes
        try:
            self._train() if processes == 1 else self._train_together()
        except torch.OutOfMemoryError as error:
            raise FlowalignError(out_of_memory(self.config, processes)) from error

    def _train_together(self) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        world = self.accelerator.process_index, self.accelerator.num_processes
        self.pulse = Pulse(store, *world, self.config.training.patience)
        try:
            self._train()
        except RuntimeError as error:
            if not LOST.search(str(error)):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise FlowalignError(
                f"process {world[0]} lost another one ({reason}). {self.pulse.others()}. --resume goes on from the "
                "run's last checkpoint; training.timeout is how long processes wait for each other"
            ) from error
        finally:
            self.pulse.stop()

    def _at(self, place: str) -> None:
        if self.pulse is not None:
            self.pulse.at(f"iteration {self.iteration}, {place}")

    def _train(self) -> None:
        training, evaluation = self.config.training, self.config.evaluation
        if self.accelerator.is_main_process:
            self._write_description()
        if self.config.trackers:
            self.accelerator.init_trackers("flowalign", config=_flat(self.config.model_dump(mode="json")))
        watching = bool(evaluation.panel)
        if not self.resumed:
            self.evaluate()
            if watching:
                self.save()
        spent = any(limit is not None for limit in training.budget.model_dump().values())
        bar = tqdm(
            initial=self.iteration,
            # how many iterations a budget lasts is not known
            total=None if spent else training.iterations,
            disable=not self.progress,
            desc=self.config.name,
        )
        done = self.done()
        while done < 1 and not self._hacked():
            begin = time.perf_counter()
            metrics = self._iterate()
            self.seconds += time.perf_counter() - begin
            self.iteration += 1
            done = self.done()
            last = done >= 1
            self._log(metrics)
            shown = {self.algorithm.headline: f"{metrics[self.algorithm.headline]:.3f}"}
            bar.set_postfix(shown | ({"budget": f"{done:.0%}"} if spent else {}))
            bar.update()
            evaluates = last or (evaluation.every and self.iteration % evaluation.every == 0)
            if evaluates:
                self.evaluate()
            due = training.checkpoint_every and self.iteration % training.checkpoint_every == 0
            # where the watch may call an evaluation the last good one, its weights must be there
            if last or due or (evaluates and watching):
                self.save()
            if last:
                break
        bar.close()
        if self._hacked():
            self._return_to_good()
        self.export()
        if self.config.trackers:
            self.accelerator.end_training()

    def done(self) -> float:
        """Share of training that is done: of the iterations, or of the budget where that is further.

        The same on every process, though each counts its own work.
        """
        budget = self.config.training.budget
        used = {"seconds": self.seconds, "forwards": self.policy.forwards, "reward_calls": self.actor.reward_calls}
        everyone = {k: self.actor.gather(torch.tensor([float(n)], device=self.actor.device)) for k, n in used.items()}
        shares = [self.iteration / self.config.training.iterations]
        if budget.seconds is not None:
            shares.append(everyone["seconds"].max().item() / budget.seconds)
        if budget.forwards is not None:
            shares.append(everyone["forwards"].sum().item() / budget.forwards)
        if budget.reward_calls is not None:
            shares.append(everyone["reward_calls"].sum().item() / budget.reward_calls)
        return max(shares)

    def _iterate(self) -> dict[str, float]:
        training = self.config.training
        # Stateless randomness: a resumed iteration draws what the uninterrupted one would have drawn.
        torch.manual_seed(derive_seed(training.seed, self.iteration, self.accelerator.process_index))
        batch = self.groups.draw(self.iteration)
        done = self.done()
        self.algorithm.progress(done)
        advance(self.actor.reward, done)
        self._at("sampling and scoring")
        experience = self._fitting("rollout", "batch_size", partial(self.algorithm.collect, self.actor, batch))
        if self.iteration == 0:
            self.algorithm.verify(self.policy, experience)
        self.groups.learn(experience)
        self._at("update")
        begin = time.perf_counter()
        sums: dict[str, list[Tensor]] = defaultdict(list)
        for i, items in enumerate(self._updates(experience)):
            rate = training.optimizer.learning_rate * self.learning_rate_factor(round(done * self.updates) + i)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self._update(experience, items, sums)
        metrics = dict(experience.metrics)
        for name, values in sums.items():
            metrics[name] = self.actor.gather(torch.stack(values)).mean().item()
        metrics |= {"forwards": self.policy.forwards, "reward_calls": self.actor.reward_calls}
        metrics["learning_rate"] = rate
        metrics["seconds/update"] = time.perf_counter() - begin
        return metrics

    def _updates(self, experience: Experience) -> Iterator[Tensor]:
        """The items of each update: every group gives an equal, random share of its own to each."""
        training = self.config.training
        groups = list(dict.fromkeys(experience.batch.group))
        items = experience.items().unflatten(0, (len(groups), -1))
        orders = []
        for number in groups:
            generator = torch.Generator().manual_seed(derive_seed(training.seed, self.iteration, number, 2))
            orders.append(torch.randperm(items.shape[1], generator=generator))
        order = torch.stack(orders).to(items.device)
        items = items.gather(1, order[..., None].expand_as(items))
        for chunk in items.chunk(training.updates_per_iteration, dim=1):
            yield chunk.flatten(0, 1)

    def _update(self, experience: Experience, items: Tensor, sums: dict[str, list[Tensor]]) -> None:
        """One optimizer step on the mean loss of these items over all processes."""
        total = len(items)
        items = self._with_gradient(experience, items)
        totals = self._fitting("training", "micro_batch_size", partial(self._backward, experience, items, total))
        self._share_own_gradients()
        norm = self.accelerator.clip_grad_norm_(self.parameters.values(), self.config.training.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.step(self.parameters.values())
        for name, value in totals.items():
            sums[name].append(value / len(items))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        sums["policy/gradient_norm"].append(torch.as_tensor(norm, device=self.accelerator.device))

    def _backward(self, experience: Experience, items: Tensor, total: int) -> dict[str, Tensor]:
        """Gradients of the items' loss over `total`, in micro-batches; the sums of the values for the metrics."""
        self.optimizer.zero_grad()
        parts = items.split(self.config.training.micro_batch_size)
        totals: dict[str, Tensor] = {}
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            wait = contextlib.nullcontext() if last else unsynced(self.accelerator, self.policy.model)
            with wait:
                loss, values = self.algorithm.losses(self.policy, experience, part)
                self.accelerator.backward(loss.sum() / total)
            for name, value in {**values, "policy/loss": loss}.items():
                totals[name] = totals.get(name, 0) + value.detach().sum()
        return totals

    def _fitting(self, section: str, key: str, work: Callable[[], T]) -> T:
        """Do the work; while the device's memory runs out, halve this batch size and begin again.

        On several processes, where the others would wait in the middle of theirs, the error goes on.
        """
        settings = getattr(self.config, section)
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                size = getattr(settings, key, 1)
                if size == 1 or self.accelerator.num_processes > 1:
                    raise
                setattr(settings, key, size // 2)
                logger.warning("out of memory with %s.%s %d; going on with %d", section, key, size, size // 2)
            # outside: the exception held what the failed attempt had allocated
            torch.cuda.empty_cache()

    def _share_own_gradients(self) -> None:
        """Average over processes the gradients of the algorithm's own networks, which no wrapper does."""
        for module in self.modules.values() if self.accelerator.num_processes > 1 else ():
            for parameter in module.parameters():
                parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def _with_gradient(self, experience: Experience, items: Tensor) -> Tensor:
        """Leave out items that teach nothing, such as actions of zero advantage, unless the loss has other terms.

        Every process keeps the same number, at least one, so that collective operations match.
        """
        useful = None if self.algorithm.uses_reference else experience.useful(items)
        if useful is None:
            return items
        keep = max(1, self.actor.largest(int(useful.sum())))
        # stable: the useful ones first, each part in its random order
        return items[torch.argsort(~useful, stable=True)[:keep]]

    # Evaluation

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the policy has its averaged weights, where there is an EMA."""
        if self.ema is None:
            yield
            return
        self.ema.store(self.parameters.values())
        self.ema.copy_to(self.parameters.values())
        try:
            yield
        finally:
            self.ema.restore(self.parameters.values())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it a process can use the network without the others, with averaged weights where there is an EMA."""
        gathered = self.sharding.gathered(self.policy.network) if self.sharding else contextlib.nullcontext()
        with self.averaged(), gathered:
            yield
            self.accelerator.wait_for_everyone()

    def evaluate(self) -> Evaluated | None:
        """Score the held-out prompts, and append the means to evaluations.jsonl."""
        settings = self.config.evaluation
        if settings.prompts is None:
            return None
        prompts = Prompts.of(settings)
        self._at("evaluation")
        advance(self.panel, self.done())
        with self.averaged():
            result = evaluate(
                self.policy,
                self.panel,
                prompts,
                settings,
                settings.per_prompt,
                settings.seed,
                self.accelerator,
            )
        line: dict[str, Any] = {"iteration": self.iteration}
        with self._alone():
            if self.accelerator.is_main_process:
                line |= self.algorithm.measure(self.actor)
                if self.config.training.previews:
                    self.medium.look(self.actor, self.algorithm, self.config, prompts, self.folder, self.iteration)
        if self.accelerator.is_main_process:
            for label, row in result.means(by="category").items():
                # statistics of every category would be many, and say little
                line |= {f"{label}/{n}": v for n, v in row.items() if label == "all" or not n.startswith("statistics/")}
            self.evaluations.append(self._watched(line, result))
            samples = result.samples()
            count = min(settings.saved, len(samples))
            spread = torch.linspace(0, len(samples) - 1, count).round().int().tolist() if count else []
            self.medium.keep([samples[row] for row in spread], self.folder, self.iteration, self.eval_reward)
        if self.config.trackers:
            self.accelerator.log({f"evaluation/{n}": v for n, v in result.means()["all"].items()}, step=self.iteration)
        return result

    def _watched(self, line: dict[str, Any], result: Evaluated) -> dict[str, Any]:
        """The line of an evaluation with what the watch on reward hacking says of it."""
        if not self.config.evaluation.panel:
            return line
        line, self.verdict = watched(
            line, result.value, result.parts, self.evaluations.read(), self.config.evaluation.watch
        )
        if self.verdict.message:
            logger.warning("iteration %d: reward hacking? %s", self.iteration, self.verdict.message)
        return line

    def _hacked(self) -> bool:
        """Whether the watch ends the run: the main process's word, for all."""
        stop = self.config.evaluation.watch.action == "stop"
        return bool(self.actor.largest(stop and self.verdict.status == "hacked"))

    def _return_to_good(self) -> None:
        """Load the weights of the last good evaluation."""
        good = self.checkpoints.until(self.actor.largest(self.verdict.last_good))
        assert good is not None, "a checkpoint is saved with every evaluation that is watched"
        self._load_weights(*self.checkpoints.load(good))
        if self.accelerator.is_main_process:
            logger.warning(
                "stopped at iteration %d: %s; the run's result has the weights of %s. To train on from those, delete "
                "the checkpoints after it and --resume; to train on from the newest, evaluation.watch.action=warn",
                self.iteration,
                self.verdict.message,
                good,
            )

    # Saving

    def save(self) -> None:
        """Write a checkpoint that a resumed run continues from: bit for bit on as many processes."""
        self._at("checkpoint")
        moments, rest = optimizer_tensors(self.optimizer.state_dict())
        tensors: dict[str, dict[str, Tensor]] = {"trainable": {**self.parameters}, "optimizer": moments}
        if self.ema is not None:
            tensors["ema"] = dict(zip(self.parameters, self.ema.shadow_params, strict=True))
        main = self.accelerator.is_main_process
        tensors = {name: whole(entries, keep=main) for name, entries in tensors.items()}
        adapted, extra = self.actor.state()
        replayed, groups = self.groups.state()
        tensors |= adapted | replayed
        state = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "optimizer": rest,
            "actor": extra,
            "groups": groups,
        }
        if self.ema is not None:
            state["ema_steps"] = self.ema.optimization_step
        good = self.verdict.last_good if self.config.evaluation.panel else None
        weights = self._weights() if self.policy.lora else None
        if main:
            self.checkpoints.save(self.iteration, tensors, state, partial(self._export_lora, weights), good)
        self.accelerator.wait_for_everyone()

    def _export_lora(self, weights: dict[str, Tensor] | None, folder: Path) -> None:
        if self.policy.lora:
            with self.averaged():
                self.policy.save(folder, weights)

    def export(self) -> None:
        """Write the result for plain diffusers or transformers: `lora/`, an adapter, or `model/`, the whole network."""
        weights = self._weights()
        if self.accelerator.is_main_process:
            with self.averaged():
                self.policy.save(self.folder / ("lora" if self.policy.lora else "model"), weights)
        self.accelerator.wait_for_everyone()

    def _weights(self) -> dict[str, Tensor] | None:
        """The averaged weights of a network in shards, whole, to save; None where the network has them itself."""
        if self.sharding is None:
            return None
        with self.averaged():
            weights, trained = self.policy.network.state_dict(), self.policy.trainable()
            if self.policy.lora:
                weights = {name: value for name, value in weights.items() if name in trained}
            return whole(weights, keep=self.accelerator.is_main_process)

    def _resume(self) -> None:
        found = self.checkpoints.all()
        if found:
            tensors, state = self.checkpoints.load(found[-1])
            self.iteration, self.resumed = state["iteration"], True
            self._load_weights(tensors, state)
            self.actor.load_state(tensors, state["actor"])
            self.seconds = state["seconds"]
            self.groups.load_state(tensors, state["groups"])
            moments = optimizer_state(tensors["optimizer"], state["optimizer"])
            parameters = list(self.parameters.values())
            for index, values in moments["state"].items():
                values |= {key: like(value, parameters[index]) for key, value in values.items()}
            self.optimizer.load_state_dict(moments)
        if self.accelerator.is_main_process and self.folder.is_dir():
            self.metrics.keep_before(self.iteration)
            # the evaluation at the checkpoint's own iteration came before the checkpoint
            self.evaluations.keep_before(self.iteration + bool(found))
            lines = [line for line in self.evaluations.read() if "watch" in line]
            if lines:
                self.verdict = judge([line["watch"] for line in lines], self.config.evaluation.watch)

    def _load_weights(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """The trained weights of a checkpoint, and their average."""
        restore(self.parameters, tensors["trainable"])
        if self.ema is not None:
            self.ema.optimization_step = state["ema_steps"]
            for name, shadow in zip(self.parameters, self.ema.shadow_params, strict=True):
                shadow.copy_(like(tensors["ema"][name], shadow))

    def _write_description(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "config.yaml", self.config.dump())
        packages = ("flowalign", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")
        description = {name: version(name) for name in packages}
        description |= {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if self.accelerator.device.type == "cuda" else "cpu",
            "processes": self.accelerator.num_processes,
        }
        write_atomically(self.folder / "versions.yaml", yaml.safe_dump(description, sort_keys=False))

    def _log(self, metrics: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.metrics.append({"iteration": self.iteration - 1, **metrics})
        if self.config.trackers:
            self.accelerator.log(metrics, step=self.iteration)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as 'section.key', for trackers that take plain values only."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
