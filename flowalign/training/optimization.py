"""What moves weights, by reinforcement and by examples: gradients in micro-batches, AdamW, its rate, and an average."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowalign.config.sections import Optimizer
from flowalign.errors import FlowalignError
from flowalign.training.memory import make_optimizer

logger = logging.getLogger(__name__)

MOST_SKIPPED = 5
"""Updates in a row that may be skipped before the training ends."""


class LossScale:
    """What losses are multiplied by before the backward pass, since small gradients would be 0 in float16.

    By the rule of torch.amp.GradScaler: halved by gradients that are not finite, doubled after `patience` that were.
    """

    patience = 2000

    def __init__(self) -> None:
        self.value, self.finite = 2.0**16, 0

    def learn(self, finite: bool) -> None:
        """Told of every update whether its gradients were finite."""
        self.finite = self.finite + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.finite == self.patience:
            self.value, self.finite = self.value * 2, 0


class Optimization:
    """Parameters and how they are moved; on one process.

    Args:
        groups: parameters by name. An optimizer's step does not mix two groups: sharded parameters and whole ones.
        settings: of AdamW and its learning rate.
        updates: optimizer steps of the whole training, for the learning rate's schedule.
        ema_decay: of the average of the weights; None: there is none.
        ema_every: updates from one averaging to the next.
        half: the backward pass is in float16.
        host: the average stays in the host's memory, and visits the device to move.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, nn.Parameter]],
        settings: Optimizer,
        updates: int,
        device: torch.device,
        ema_decay: float | None = None,
        ema_every: int = 1,
        half: bool = False,
        host: bool = False,
    ) -> None:
        self.settings, self.updates, self.ema_every = settings, updates, ema_every
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        self.optimizer = make_optimizer([list(group.values()) for group in groups if group], settings, device)
        schedule = get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup_updates, num_training_steps=updates
        )
        self._factor = schedule.lr_lambdas[0]
        self.local_parameters = self.parameters
        """Shard of each parameter on this process, in the same memory."""
        self.ema = EMAModel(self.local_parameters.values(), ema_decay) if ema_decay else None
        if self.ema is not None and host:
            self.ema.to("cpu")
        self._visits = device if host else None
        """Device that the average visits to be moved."""
        self.scale = LossScale() if half else None
        self.skipped = 0
        """Updates in a row, up to the last one, that moved nothing because of gradients that were not finite."""
        self.moved = 0
        """Updates since the start of this process that moved the weights."""
        self._loss = torch.zeros(())
        """Loss of the last update."""

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
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Gradients of the sum of the items' losses over `total`, in micro-batches.

        Args:
            weights: [N] of the items in every sum; default 1.

        Returns:
            the sums of the named values that `losses` returns, and of the losses themselves as `loss`.
        """
        self.optimizer.zero_grad()
        parts = items.split(micro_batch_size)
        shares = [None] * len(parts) if weights is None else weights.split(micro_batch_size)
        sums: dict[str, Any] = {}
        for i, (part, share) in enumerate(zip(parts, shares, strict=True)):
            with self._accumulated(last=i == len(parts) - 1):
                loss, values = losses(part)
                if share is not None:
                    loss = loss * share
                    values = {name: value * share for name, value in values.items()}
                self._backpropagate(loss.sum() / total * (self.scale.value if self.scale else 1))
            for name, value in {**values, "loss": loss}.items():
                sums[name] = sums.get(name, 0) + value.detach().sum()
        self._loss = sums["loss"]
        return sums

    def step(self) -> Tensor:
        """Clip the gradients, step, forget them, and move the average; returns the gradients' norm before clipping.

        Nothing moves where the norm is not finite: one such gradient would make every weight NaN.

        Raises:
            FlowalignError: that happened `MOST_SKIPPED` times in a row.
        """
        norm = self._step()
        # waits for the device, once an update
        finite = bool(torch.isfinite(norm))
        if self.scale:
            self.scale.learn(finite)
        if not finite:
            self._skip(norm)
            return norm
        self.skipped = 0
        self.moved += 1
        if self.ema is not None:
            self._average(self.ema)
        return norm

    def check_moved(self) -> None:
        """Raises FlowalignError where all updates of this process were skipped."""
        if self.skipped and not self.moved:
            raise FlowalignError(
                f"nothing was learned: all {self.skipped} updates were skipped, since losses or gradients are not "
                "finite; what helps: a lower training.optimizer.learning_rate, model.dtype: float32, a reward within "
                "bounds; float16 needs a few updates to find its scale"
            )

    def _average(self, ema: EMAModel) -> None:
        """Count an update, by which the decay rises to its value, and average the weights at every `ema_every`-th."""
        if (ema.optimization_step + 1) % self.ema_every:
            ema.optimization_step += 1
            return
        if self._visits is not None:
            ema.to(self._visits)
        ema.step(self.local_parameters.values())
        if self._visits is not None:
            ema.to("cpu")

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)

    def _step(self) -> Tensor:
        if self.scale:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= self.scale.value
        norm = self._clip()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _skip(self, norm: Tensor) -> None:
        self.skipped += 1
        what = "the losses" if not torch.isfinite(self._loss) else "the gradients of finite losses"
        if self.scale and self.scale.value >= 1 and torch.isfinite(self._loss):
            # too large for float16 as they were multiplied, not by themselves
            return
        if self.skipped >= MOST_SKIPPED:
            raise FlowalignError(
                f"{MOST_SKIPPED} updates in a row were skipped: {what} are not finite (their norm is {norm.item()}); "
                "what helps: a lower training.optimizer.learning_rate, model.dtype: float32, a reward within bounds"
            )
        if self.skipped == 1:
            logger.warning("an update was skipped: %s are not finite (their norm is %s)", what, norm.item())

    def _accumulated(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Within it gradients are added to the earlier micro-batches'; `last` is an update's last micro-batch."""
        return contextlib.nullcontext()

    def _backpropagate(self, loss: Tensor) -> None:
        loss.backward()
