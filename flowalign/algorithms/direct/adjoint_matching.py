"""Adjoint matching (arXiv 2409.08861): regression onto the reward's gradient, carried back along the start's drift.

Rollouts are memoryless: their noise makes the finished sample independent of the start noise (`ddim` with eta 1, or
`flow_sde` with eta sqrt(2)). The lean adjoint a begins as -scale * grad r(x0) and is carried back by the start
weights' step alone, a_k = (d mean_start(x_k) / d x)' a_{k+1}. The loss of a step is

    || (mean - mean_start) / std + std * a ||^2

summed over elements. At its minimum the mean has moved by -std^2 a: samples follow exp(scale * r) times the start's.

Authors' code (microsoft/soc-fine-tuning-sd, am_trainer.py): scale 100, 50 steps, 4 of them a sample: half from the
first 60%, half from the rest; guidance 7.5 in rollouts only, since it makes adjoints explode.

Departures: they leave out elements of the largest losses, above a running mean of the 0.9 quantile. They take the
adjoint of the state that a step starts from, a_k, whose minimum is not the optimum: of a Gaussian with a linear reward,
in 10 steps of `ddim`, samples move by 0.300 times scale * gradient there, by 0.408, their variance, with a_{k+1}.
"""

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.direct import base
from flowalign.config import Config
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.window import GradientWindow, unwrapped
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed
from samplers.noise import generators

MEMORYLESS = {"ddim": 1.0, "flow_sde": 2**0.5}
"""Eta of each kernel that forgets the start noise."""
EARLY = 0.6
"""Share of the steps from which half of a sample's learned steps are drawn."""


class AdjointMatchingSettings(base.DirectSettings):
    scale: float = Field(100.0, ge=0)
    """Factor of the reward; larger ones move further from the start weights."""
    steps_per_sample: int = Field(4, ge=2)
    """Steps of a trajectory to learn from."""


@dataclass(kw_only=True)
class AdjointExperience(base.DirectExperience):
    adjoint: Tensor
    """[B, T, ...] adjoints of the states that steps end in."""
    guided: Rollout
    """The rollout as it was sampled; `rollout` has the same samples, whose steps are taken again without guidance."""


class AdjointMatching(base.DirectAlgorithm):
    """Adjoint matching: regression onto the reward's gradient, carried back to every step (arXiv 2409.08861)."""

    name = "adjoint_matching"
    Settings = AdjointMatchingSettings
    settings: AdjointMatchingSettings
    unit = "steps"
    idle = "the reward does not depend on the picture"
    uses_reference = True

    def check(self, config: Config) -> None:
        super().check(config)
        kernel, eta = config.rollout.kernel, config.rollout.eta
        if abs(MEMORYLESS.get(kernel, -1) - eta) > 1e-3:
            raise ConfigError(
                f"rollout.kernel: '{kernel}' with eta {eta:g} remembers the start noise, and adjoint matching would "
                "learn another distribution; kernel: ddim with eta: 1 works"
            )
        early = round(EARLY * int(config.noise()[1].sum()))
        if self.settings.steps_per_sample // 2 > early:
            raise ConfigError(f"algorithm.steps_per_sample: the schedule is too short for so many; {2 * early} works")

    def windows(self, steps: int) -> range:
        return range(1)

    def items(self, config: Config) -> int:
        return config.training.group_size * self.settings.steps_per_sample

    def experience(self, sampled: SampledPictures, record: None, processes: Processes) -> AdjointExperience:
        plain = super().experience(sampled, record, processes)
        policy, config = sampled.sampler.policy, sampled.sampler.config
        guided = plain.rollout
        conditions = guided.conditions.conditional(policy.family.unconditional)
        plain.rollout = replace(guided, guidance=(1.0,) * len(guided.guidance), conditions=conditions)
        rows = torch.arange(len(plain.batch), device=processes.device).split(config.training.micro_batch_size)
        results = [self.adjoint(policy, plain, samples) for samples in rows]
        adjoint, value = (torch.cat(column) for column in zip(*results, strict=True))
        metrics = plain.metrics | {"reward/mean": processes.gather(value).mean().item()}
        items = self.steps(plain).to(processes.device)
        return AdjointExperience(
            **vars(plain) | {"items": items, "metrics": metrics, "adjoint": adjoint, "guided": guided}
        )

    def verify(self, policy: DiffusersPolicy, experience: base.DirectExperience) -> None:
        assert isinstance(experience, AdjointExperience)
        policy.verify(experience.guided)

    def steps(self, experience: base.DirectExperience) -> Tensor:
        """[N, 2] (sample, step) to learn from: of every sample half early, half late."""
        noisy = experience.rollout.mask[0].nonzero()[:, 0].cpu()
        early, half = round(EARLY * len(noisy)), self.settings.steps_per_sample // 2
        items = []
        sources = generators([derive_seed(seed, 5) for seed in experience.batch.noise_seeds])
        for sample, source in enumerate(sources):
            begin = torch.randperm(early, generator=source)[:half]
            end = early + torch.randperm(len(noisy) - early, generator=source)[: self.settings.steps_per_sample - half]
            items += [(sample, int(noisy[index])) for index in [*begin, *end]]
        return torch.tensor(items)

    def adjoint(
        self, policy: DiffusersPolicy, experience: base.DirectExperience, samples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[N, T, ...] lean adjoints of these samples, and [N] their rewards."""
        window = GradientWindow(policy, experience.rollout, samples)
        x = window.state(window.last).requires_grad_()
        value = experience.score(samples, experience.finished(policy, x, samples)).value
        [a] = torch.autograd.grad(-self.settings.scale * value.sum(), x)
        adjoints = [a]
        for step in range(window.last - 1, 0, -1):
            x = window.state(step).requires_grad_()
            with policy.reference(), unwrapped(policy):
                [a] = torch.autograd.grad((window.transition(x, step).mean * a).sum(), x)
            adjoints.append(a)
        return torch.stack(adjoints[::-1], 1), value.detach()

    def losses(
        self, policy: DiffusersPolicy, experience: base.DirectExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, AdjointExperience)
        samples, steps = items.unbind(1)
        window = GradientWindow(policy, experience.rollout, samples)
        x = window.state(steps)
        transition = window.transition(x, steps)
        with torch.no_grad(), policy.reference():
            start = window.transition(x, steps)
        control = (transition.mean - start.mean) / transition.std
        wanted = -transition.std * experience.adjoint[samples, steps]
        loss = (control - wanted).square().flatten(1).sum(1)
        return loss, {
            "policy/control": control.square().flatten(1).sum(1),
            "policy/kl": control.square().flatten(1).mean(1) / 2,
        }
