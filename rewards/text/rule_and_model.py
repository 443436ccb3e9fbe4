"""A rule as far as it is sure, and a reward model for the rest."""

from collections.abc import Sequence

from torch import Tensor

from rewards.base import Metadata, Reward
from rewards.compose import Composition


class RuleAndModel(Composition):
    """c times a rule's verdict plus 1 - c times a reward model's score, c being how sure the rule is (hybrid rewards,
    arXiv 2510.05283, after the abstract).

    The paper adds whether instructions are followed, and a penalty of the length: more terms of a `weighted_sum`, such
    as `text_format` and `soft_length`.

    Args:
        rule: a verifier in [0, 1].
        model: a reward model in [0, 1], such as `text_score` within `rescaled`, or a judge.
        confidence: a reward in [0, 1] that says how sure the rule is, such as `answer_confidence` or `frequency`, or a
            number.
    """

    def __init__(self, rule: Reward, model: Reward, confidence: Reward | float = 0.5) -> None:
        given = [] if isinstance(confidence, int | float) else [confidence]
        super().__init__([rule, model, *given], "rule_and_model")
        self.fixed = float(confidence) if isinstance(confidence, int | float) else None
        if self.fixed is not None and not 0 <= self.fixed <= 1:
            raise ValueError("rule_and_model: a confidence from 0 to 1")

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        sure = values[2].clamp(0, 1) if self.fixed is None else self.fixed
        return sure * values[0] + (1 - sure) * values[1]
