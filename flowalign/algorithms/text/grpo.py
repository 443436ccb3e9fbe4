"""GRPO for language models (arXiv 2402.03300).

Rollout: a group of completions of each prompt. Credit: each reward less its group's mean, over its standard deviation.
Loss: PPO's clip, with DAPO's mean over all tokens of an iteration as in TRL, and without KL. Its relatives differ by
the names of these parts alone: Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and others are recipes in
configs/tiny_lm.
"""

from flowalign.algorithms.text.base import LanguageAlgorithm


class GRPO(LanguageAlgorithm):
    """GRPO on a language model's tokens, its advantage, loss and aggregation by name (arXiv 2402.03300)."""

    name = "grpo"
    opens_masks = True
