"""InPO: preferences at the noise that the model itself takes a picture for (arXiv 2503.18454).

The loss is Diffusion-DPO's (2311.12908), but a picture's noise is not drawn: the current weights, without guidance,
walk the picture up the ODE (DDIM inversion), and the noise is what that says of the state it reaches. So the error is
about the trajectory by which the model would make this very picture. Levels are points of the rollout's schedule,
whose steps the inversion takes.

Departures: the network is asked at the level that a state has, the authors at the next one; no random term on the way
(the authors add a tenth of DDIM's, and call it optional).
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, gains, judged
from flowalign.config import Named
from flowalign.core.step_losses import preference_loss
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy
from flowalign.rollouts.pictures import DiffusionSampler


class InPOSettings(PairSettings):
    levels: Named = Named(name="schedule")
    """Name in `flowalign list levels`, with its settings but their number, which is `training.group_size`."""
    beta: float = Field(5000.0, gt=0)
    """Factor of the squared error's mean over elements; published: 5000."""


class InPO(PairMatching):
    """InPO: preferences at the noise that inverting the picture gives (arXiv 2503.18454)."""

    name = "inpo"
    Settings = InPOSettings
    settings: InPOSettings
    compares = frozenset({"reference"})

    def pairs(self, sampler: DiffusionSampler, batch: Batch) -> base.MatchingExperience:
        experience = super().pairs(sampler, batch)
        clean, level_index = experience.clean, experience.level_index[:, 0]
        rows, members = torch.arange(len(level_index), device=level_index.device), sampler.config.training.group_size
        # the members of a line have one picture
        pictures = rows[::members].split(sampler.config.rollout.batch_size)
        states = torch.cat([inverted(sampler.policy, clean, x0) for x0 in pictures])
        experience.noise = clean.noise_of(rows, level_index, states[rows // members, level_index])[:, None]
        return experience

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_gain, rejected_gain = gains(points)
        logit = self.settings.beta / 2 * (chosen_gain - rejected_gain)
        return preference_loss(logit), judged(logit, chosen_gain, rejected_gain)


@torch.no_grad()
def inverted(policy: DiffusersPolicy, clean: CleanSamples, samples: Tensor) -> Tensor:
    """[N, K, ...] the states at all levels from which the ODE leads to these samples, by Euler steps upwards."""
    x0 = x = clean.x0[samples]
    levels = torch.arange(len(clean.sigmas), device=x0.device)
    states = x0.new_empty(len(x0), len(levels), *x0.shape[1:])
    sigma = clean.sigmas[-1]
    for level in reversed(levels):
        to = clean.sigmas[level]
        if level == levels[-1]:
            # at 0 the network knows nothing: the noise that it sees in the sample at the lowest level
            noise = x0 + (1 - to) * evaluate(policy, clean, samples, level, x0)
            x = (1 - to) * x0 + to * noise
        else:
            x = x + (to - sigma) * evaluate(policy, clean, samples, level + 1, x)
        states[:, level], sigma = x, to
    return states


def evaluate(policy: DiffusersPolicy, clean: CleanSamples, samples: Tensor, level: Tensor, x: Tensor) -> Tensor:
    """[N, ...] the velocity at states of these samples at a level."""
    return policy.velocity_of(clean, clean.noised_by(samples, level.expand(len(samples)), x), x).float()
