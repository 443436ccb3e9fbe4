"""Updates of weights: gradients in micro-batches, AdamW with its learning rate, and an average of the weights."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
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
"""Skipped updates in a row after which the training ends with an error."""


class LossScale:
    """Factor of losses in the backward pass, since small gradients would be 0 in float16.

    The rule is torch.amp.GradScaler's: it is halved when gradients are not finite, and doubled after `patience` updates
    whose gradients are.
    """

    patience = 2000

    def __init__(self) -> None:
        self.value, self.finite = 2.0**16, 0

    def learn(self, finite: bool) -> None:
        """Adapt the factor after an update, by whether its gradients were finite."""
        self.finite = self.finite + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.finite == self.patience:
            self.value, self.finite = self.value * 2, 0


class Optimization:
    """Parameters with their optimizer, on one process.

    Args:
        groups: parameters by name. An optimizer's step does not mix two groups: sharded parameters and whole ones.
        settings: settings of AdamW and its learning rate.
        updates: number of optimizer steps of the whole training, for the learning rate's schedule.
        ema_decay: decay of the average of the weights; None: there is no average.
        ema_every: updates from one averaging to the next.
        half: True if the backward pass is in float16.
        host: keep the average in the host's memory, and move it to the device only for its updates.
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
        """Device where an average in the host's memory is updated."""
        self.scale = LossScale() if half else None
        self.skipped = 0
        """Number of updates in a row, up to the last one, that were skipped since gradients were not finite."""
        self.moved = 0
        """Number of updates since the start of this process that changed the weights."""
        self._loss = torch.zeros(())
        """Loss of the last update."""

    def set_learning_rate(self, update: int) -> float:
        """Set the learning rate of this optimizer step by the schedule, and return it."""
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
        visiting: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
    ) -> dict[str, Tensor]:
        """Compute the gradients of the sum of the items' losses, divided by `total`, in micro-batches.

        Args:
            weights: [N] weights of the items in every sum; default 1.
            visiting: function that yields the micro-batches, each when what its losses read is on the device.

        Returns:
            the sums of the named values that `losses` returns, and of the losses themselves as `loss`.
        """
        self.optimizer.zero_grad()
        chunks = items.split(micro_batch_size)
        chunk_weights = [None] * len(chunks) if weights is None else weights.split(micro_batch_size)
        sums: dict[str, Any] = {}
        for i, (chunk, weight) in enumerate(zip(visiting(chunks), chunk_weights, strict=True)):
            with self._accumulated(last=i == len(chunks) - 1):
                loss, values = losses(chunk)
                if weight is not None:
                    loss = loss * weight
                    values = {name: value * weight for name, value in values.items()}
                (loss.sum() / total * (self.scale.value if self.scale else 1)).backward()
            for name, value in {**values, "loss": loss}.items():
                sums[name] = sums.get(name, 0) + value.detach().sum()
        self._loss = sums["loss"]
        return sums

    def step(self) -> Tensor:
        """Clip the gradients, step, clear them, and update the average; return the gradients' norm before clipping.

        The update is skipped if the norm is not finite: one such gradient would make every weight NaN.

        Raises:
            FlowalignError: `MOST_SKIPPED` updates in a row were skipped.
        """
        if self.scale:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= self.scale.value
        norm = self._clip()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # waits for the device, once per update
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
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
        """Raise FlowalignError if all updates of this process were skipped."""
        if self.skipped and not self.moved:
            raise FlowalignError(
                f"nothing was learned: all {self.skipped} updates were skipped, since losses or gradients are not "
                "finite; what helps: a lower training.optimizer.learning_rate, model.dtype: float32, a reward within "
                "bounds; float16 needs a few updates to find its scale"
            )

    def _average(self, ema: EMAModel) -> None:
        """Count an update, since the decay grows with them, and average the weights at every `ema_every`-th."""
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

    def _skip(self, norm: Tensor) -> None:
        self.skipped += 1
        what = "the losses" if not torch.isfinite(self._loss) else "the gradients of finite losses"
        if self.scale and self.scale.value >= 1 and torch.isfinite(self._loss):
            # only the factor made them too large for float16
            return
        if self.skipped >= MOST_SKIPPED:
            raise FlowalignError(
                f"{MOST_SKIPPED} updates in a row were skipped: {what} are not finite (their norm is {norm.item()}); "
                "what helps: a lower training.optimizer.learning_rate, model.dtype: float32, a reward within bounds"
            )
        if self.skipped == 1:
            logger.warning("an update was skipped: %s are not finite (their norm is %s)", what, norm.item())

    def _accumulated(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which gradients are added to earlier micro-batches'; `last`: this is an update's last one."""
        return contextlib.nullcontext()
