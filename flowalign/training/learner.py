"""The update: gradients of an experience in micro-batches, the optimizer's steps, and the average of the weights."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowalign.actors.base import Actor
from flowalign.algorithms.base import Algorithm, Experience
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from flowalign.training.distributed.sharding import Sharding, like, restore, unsynced, whole
from flowalign.training.memory import make_optimizer, while_it_fits
from samplers import derive_seed


class Learner:
    """What is trained, and how a run's configuration moves it.

    Args:
        algorithm: whose losses; it may have networks of its own, which train beside the policy.
        actor: acts with the policy that is trained, among the other processes.
        sharding: how the policy's network is spread in shards, None where every process has it whole.
    """

    def __init__(self, algorithm: Algorithm, actor: Actor, sharding: Sharding | None = None) -> None:
        self.algorithm, self.actor, self.sharding = algorithm, actor, sharding
        self.policy: Any = actor.policy
        self.config: Any = actor.config
        self.accelerator = actor.accelerator
        training = self.config.training
        self.modules = algorithm.modules(self.policy)
        own = {f"{name}.{key}": p for name, m in self.modules.items() for key, p in m.named_parameters()}
        self.parameters = self.policy.trainable() | own
        # apart: an optimizer's step does not mix sharded parameters with whole ones
        groups = [list(p.values()) for p in (self.policy.trainable(), own) if p]
        self.optimizer = make_optimizer(groups, training.optimizer, self.accelerator.device)
        self.updates = training.iterations * training.updates_per_iteration
        """optimizer steps of the whole training, where no budget ends it before"""
        schedule = get_scheduler(
            training.optimizer.schedule,
            self.optimizer,
            num_warmup_steps=training.optimizer.warmup_updates,
            num_training_steps=self.updates,
        )
        self.learning_rate_factor = schedule.lr_lambdas[0]
        self.in_copies = sharding is None
        """every process has the network whole, and can use it by itself"""
        self.held = self.parameters
        """what this process holds of each parameter, in the same memory"""
        self.ema = EMAModel(self.held.values(), training.ema_decay) if training.ema_decay else None

    # Updates

    def learn(self, experience: Experience, iteration: int, done: float) -> dict[str, float]:
        """All updates of an iteration.

        Args:
            done: share of the training that came before, for the learning rate's schedule.

        Returns:
            the means of what the updates measured, over all processes.
        """
        sums: dict[str, list[Tensor]] = defaultdict(list)
        for i, items in enumerate(self.chunks(experience, iteration)):
            rate = self.learning_rate_factor(round(done * self.updates) + i)
            rate *= self.config.training.optimizer.learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            for name, value in self.update(experience, items).items():
                sums[name].append(value)
        metrics = {name: self.actor.gather(torch.stack(values)).mean().item() for name, values in sums.items()}
        return metrics | {"learning_rate": rate}

    def chunks(self, experience: Experience, iteration: int) -> Iterator[Tensor]:
        """The items of each update: every group gives an equal, random share of its own to each."""
        training = self.config.training
        groups = list(dict.fromkeys(experience.batch.group))
        items = experience.items.unflatten(0, (len(groups), -1))
        orders = []
        for number in groups:
            generator = torch.Generator().manual_seed(derive_seed(training.seed, iteration, number, 2))
            orders.append(torch.randperm(items.shape[1], generator=generator))
        order = torch.stack(orders).to(items.device)
        items = items.gather(1, order[..., None].expand_as(items))
        for chunk in items.chunk(training.updates_per_iteration, dim=1):
            yield chunk.flatten(0, 1)

    def update(self, experience: Experience, items: Tensor) -> dict[str, Tensor]:
        """One optimizer step on the mean loss of these items over all processes; means of what the loss measured."""
        total = len(items)
        items = self._with_gradient(experience, items)
        backward = partial(self._backward, experience, items, total)
        single = self.accelerator.num_processes == 1
        totals = while_it_fits(self.config, "training", "micro_batch_size", backward, lambda: single)
        self._share_own_gradients()
        norm = self._step()
        if self.ema is not None:
            self.ema.step(self.held.values())
        means = {name: value / len(items) for name, value in totals.items()}
        return means | {"policy/gradient_norm": torch.as_tensor(norm, device=self.accelerator.device)}

    def _step(self) -> Tensor | float:
        """Clip the gradients, step, and forget them; returns their norm before clipping."""
        norm = self.accelerator.clip_grad_norm_(self.parameters.values(), self.config.training.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _backward(self, experience: Experience, items: Tensor, total: int) -> dict[str, Tensor]:
        """Gradients of the items' loss over `total`, in micro-batches; the sums of the values for the metrics."""
        self.optimizer.zero_grad()
        parts = items.split(self.config.training.micro_batch_size)
        totals: dict[str, Tensor] = {}
        for i, part in enumerate(parts):
            with self._accumulated(last=i == len(parts) - 1):
                loss, values = self.algorithm.losses(self.policy, experience, part)
                self._backpropagate(loss.sum() / total)
            for name, value in {**values, "policy/loss": loss}.items():
                totals[name] = totals.get(name, 0) + value.detach().sum()
        return totals

    def _accumulated(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Within it gradients are added up on each process, and with the last micro-batch's over processes."""
        return contextlib.nullcontext() if last else unsynced(self.accelerator, self.policy.model)

    def _backpropagate(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

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
        keep = max(1, self.actor.maximum(int(useful.sum())))
        # stable: the useful ones first, each part in its random order
        return items[torch.argsort(~useful, stable=True)[:keep]]

    # Weights

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the policy has its averaged weights, where there is an EMA."""
        if self.ema is None:
            yield
            return
        self.ema.store(self.held.values())
        self.ema.copy_to(self.held.values())
        try:
            yield
        finally:
            self.ema.restore(self.held.values())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it a process can use the network without the others, with averaged weights where there is an EMA."""
        with self.averaged(), self._gathered():
            yield
            self.accelerator.wait_for_everyone()

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Within it the policy can sample; all processes enter and leave together.

        A language model has its weights whole: how often it is called for a text depends on the text.
        """
        return self._gathered() if self.config.medium == "text" else contextlib.nullcontext()

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Within it every process has all weights of the policy's network."""
        return self.sharding.gathered(self.policy.network) if self.sharding else contextlib.nullcontext()

    def whole_weights(self) -> dict[str, Tensor] | None:
        """The averaged weights of a network in shards, whole, to save; None where the network has them itself."""
        if self.sharding is None:
            return None
        with self.averaged():
            weights, trained = self.policy.network.state_dict(), self.policy.trainable()
            if self.policy.lora:
                weights = {name: value for name, value in weights.items() if name in trained}
            return whole(weights, keep=self.accelerator.is_main_process)

    # Checkpoints

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Whole tensors and JSON of what is trained, on the main process; all call it together."""
        moments, rest = optimizer_tensors(self.optimizer.state_dict())
        tensors: dict[str, dict[str, Tensor]] = {"trainable": {**self.parameters}, "optimizer": moments}
        state = {"optimizer": rest}
        if self.ema is not None:
            tensors["ema"] = dict(zip(self.parameters, self.ema.shadow_params, strict=True))
            state["ema_steps"] = self.ema.optimization_step
        main = self.accelerator.is_main_process
        return {name: whole(entries, keep=main) for name, entries in tensors.items()}, state

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.load_weights(tensors, state)
        moments = optimizer_state(tensors["optimizer"], state["optimizer"])
        parameters = list(self.parameters.values())
        for index, values in moments["state"].items():
            values |= {key: like(value, parameters[index]) for key, value in values.items()}
        self.optimizer.load_state_dict(moments)

    def load_weights(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """The trained weights of a checkpoint, and their average."""
        restore(self.parameters, tensors["trainable"])
        if self.ema is not None:
            self.ema.optimization_step = state["ema_steps"]
            for name, shadow in zip(self.parameters, self.ema.shadow_params, strict=True):
                shadow.copy_(like(tensors["ema"][name], shadow))
