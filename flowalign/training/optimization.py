"""What moves weights, by reinforcement and by examples: gradients in micro-batches, AdamW, its rate, and an average."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowalign.config.sections import Optimizer
from flowalign.training.memory import make_optimizer


class Optimization:
    """Parameters and how they are moved; on one process.

    Args:
        groups: parameters by name. An optimizer's step does not mix two groups: sharded parameters and whole ones.
        settings: of AdamW and its learning rate.
        updates: optimizer steps of the whole training, for the learning rate's schedule.
        ema_decay: of the average of the weights; None: there is none.
        ema_every: updates from one averaging to the next.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, nn.Parameter]],
        settings: Optimizer,
        updates: int,
        device: torch.device,
        ema_decay: float | None = None,
        ema_every: int = 1,
    ) -> None:
        self.settings, self.updates, self.ema_every = settings, updates, ema_every
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        self.optimizer = make_optimizer([list(group.values()) for group in groups if group], settings, device)
        schedule = get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup_updates, num_training_steps=updates
        )
        self._factor = schedule.lr_lambdas[0]
        self.local_parameters = self.parameters
        """the part of each parameter on this process, in the same memory"""
        self.ema = EMAModel(self.local_parameters.values(), ema_decay) if ema_decay else None

    def set_learning_rate(self, update: int) -> float:
        """The schedule's, for the step of this number."""
        rate = self.settings.learning_rate * self._factor(update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def backward(
        self,
        losses: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
        items: Tensor,
        total: float,
        micro_batch_size: int,
    ) -> dict[str, Tensor]:
        """Gradients of the sum of the items' losses over `total`, in micro-batches.

        Returns:
            the sums of the named values that `losses` returns, and of the losses themselves as `loss`.
        """
        self.optimizer.zero_grad()
        parts = items.split(micro_batch_size)
        sums: dict[str, Any] = {}
        for i, part in enumerate(parts):
            with self._accumulated(last=i == len(parts) - 1):
                loss, values = losses(part)
                self._backpropagate(loss.sum() / total)
            for name, value in {**values, "loss": loss}.items():
                sums[name] = sums.get(name, 0) + value.detach().sum()
        return sums

    def step(self) -> Tensor:
        """Clip the gradients, step, forget them, and move the average; returns the gradients' norm before clipping."""
        norm = self._step()
        if self.ema is not None:
            self._average(self.ema)
        return norm

    def _average(self, ema: EMAModel) -> None:
        """Count an update, by which the decay rises to its value, and average the weights at every `ema_every`-th."""
        if (ema.optimization_step + 1) % self.ema_every:
            ema.optimization_step += 1
        else:
            ema.step(self.local_parameters.values())

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)

    def _step(self) -> Tensor:
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _accumulated(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Within it gradients are added to the earlier micro-batches'; `last` is an update's last micro-batch."""
        return contextlib.nullcontext()

    def _backpropagate(self, loss: Tensor) -> None:
        loss.backward()
