"""Diffusion-DPO for flow models: learn from pairs that people chose between (arXiv 2311.12908).

Loss: -log sigmoid of how much more the policy's error than the reference's fell on the chosen picture than on the
rejected one. For a flow model it is the error of the velocity (Flow-DPO, arXiv 2501.13918, with constant beta, which
its authors found better than beta (1 - t)^2), for a DDPM the error of the noise.

Levels, stratified over a pair's members, are uniform before the pipeline's shift, as in the method's own code, or
`levels: {name: logit_normal}`, as SD3 was trained (2403.03206) and as Flow-GRPO's authors run DPO on it.
"""

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, gains, judged
from flowalign.core.step_losses import preference_loss


class DPOSettings(PairSettings):
    beta: float = Field(2000.0, gt=0)
    """Factor of the squared error's mean over elements; published: SD1.5 2000, SDXL 5000; Flow-GRPO for SD3 100."""


class DPO(PairMatching):
    """Diffusion-DPO: preferences between pictures, without a reward or rollouts (arXiv 2311.12908, 2501.13918)."""

    name = "dpo"
    Settings = DPOSettings
    settings: DPOSettings
    compares = frozenset({"reference"})

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_gain, rejected_gain = gains(points)
        logit = self.settings.beta / 2 * (chosen_gain - rejected_gain)
        return preference_loss(logit), judged(logit, chosen_gain, rejected_gain)
