"""A reward of how a text answers: after long reasoning, or at once."""

import re
from collections.abc import Sequence

import torch

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, groups, score, spec_of


class AdaptiveMode:
    """A verifier's reward, more where the text reasons long on a hard prompt, or is short on an easy one.

    A prompt is easy where at least `easy` of its group is right. Right texts of the mode that does not suit the prompt
    get `unsuited` times their reward (after the abstract of Adaptive Deep Reasoning, arXiv 2505.20101; without its loss
    on the logits of the first token, which sets the mode).

    Args:
        reward: the verifier; from 1/2 on is right.
        long: a regular expression that a text of the long mode matches at its beginning.
    """

    def __init__(self, reward: Reward, long: str = r"\s*<think>", easy: float = 0.5, unsuited: float = 0.5) -> None:
        if not 0 < easy <= 1 or not 0 <= unsuited <= 1:
            raise ValueError("adaptive_mode: easy in (0, 1], unsuited in [0, 1]")
        self.reward: Reward = as_reward(reward)
        self.long, self.easy, self.unsuited = re.compile(long), easy, unsuited
        self.name = f"adaptive_mode({self.reward.name})"
        spec = spec_of(self.reward)
        self.spec = Spec(spec.needs | {"text", "prompt", "metadata"}, "group", deterministic=spec.deterministic)

    def bind(self, model: object) -> None:
        """Hand the model that is trained on."""
        bind(self.reward, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        verdict = score(self.reward, samples, prompts, metadata).value
        long = torch.tensor([self.long.match(text) is not None for text in samples])
        easy = torch.zeros(len(samples), dtype=torch.bool)
        for members in groups(prompts, metadata):
            easy[members] = bool((verdict[members] >= 0.5).float().mean() >= self.easy)
        value = verdict.where(long != easy, self.unsuited * verdict)
        return Scores(value.where(verdict >= 0.5, verdict), {self.reward.name: verdict, "long": long.float()})
