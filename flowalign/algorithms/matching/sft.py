"""Supervised fine-tuning: the model's own training objective on pictures or videos of the data.

The error is in the pipeline's own kind of prediction: the velocity for flow models (arXiv 2210.02747), the
noise or of v for diffusion models (2006.11239, 2202.00512). Levels are uniform before the pipeline's shift, or
`levels: logit_normal`, as SD3 was trained (2403.03206).
"""

from torch import Tensor

from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.targets import TargetMatching


class SFT(TargetMatching):
    """Supervised fine-tuning on pictures or videos of the data, as the model was trained."""

    name = "sft"

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        return points.error, {}
