"""Agreement in the place of a right answer, across questions that mean the same."""

from collections import Counter
from collections.abc import Sequence

import torch

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, groups, score, spec_of
from rewards.text.checks import needed
from rewards.text.shape import Majority


class CoMajority(Majority):
    """1 where a text gives the answer that most texts of its question's other wordings give (Co-Reward, arXiv
    2508.00410, and the authors' code): no right answer needed, and harder to agree on something wrong than `majority`.

    All wordings must be in one iteration: the selection `together` by the same key brings them. A text whose question
    has no other wording gets 0.

    Args:
        pattern: as of `majority`.
        key: key of the metadata that a question's wordings share.
    """

    name = "co_majority"
    spec = Spec(frozenset({"text", "prompt", "metadata"}), "set")

    def __init__(self, pattern: str | None = None, key: str = "pair") -> None:
        super().__init__(pattern)
        self.key = key

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        question = needed(self.name, self.key, prompts, metadata)
        answers = [self._answer(text) for text in samples]
        value, alone = torch.zeros(len(samples)), torch.zeros(len(samples))
        labels: dict[tuple[str, str], str] = {}
        for i, wording in enumerate(zip(question, prompts, strict=True)):
            if wording not in labels:
                others = [j for j, name in enumerate(question) if name == wording[0] and prompts[j] != wording[1]]
                votes = Counter(answers[j] for j in others if answers[j])
                labels[wording] = votes.most_common(1)[0][0] if votes else ""
            value[i] = float(answers[i] == labels[wording] != "")
            alone[i] = float(not labels[wording])
        return Scores(value, {"unlabelled": alone})


class Borda(Majority):
    """1 where a text gives the answer that wins its group's vote, in which surer texts have more votes.

    The text at place r of G by another reward has (G - r + 1)^power votes (Borda voting by self-certainty, arXiv
    2502.18581). With power 0 it is `majority`; the larger the power, the nearer to the answer of the best text alone.

    Args:
        reward: what ranks the texts of a group; the paper's is `self_certainty`.
        pattern: as of `majority`.
    """

    spec = Spec(frozenset({"text", "prompt", "metadata"}), "group")

    def __init__(self, reward: Reward, power: float = 0.5, pattern: str | None = None) -> None:
        super().__init__(pattern)
        if power < 0:
            raise ValueError("borda: power is 0 or more")
        self.reward: Reward = as_reward(reward)
        self.power = power
        self.name = f"borda({self.reward.name})"
        spec = spec_of(self.reward)
        self.spec = Spec(self.spec.needs | spec.needs, "group", deterministic=spec.deterministic)

    def bind(self, model: object) -> None:
        """Hand the model that is trained on."""
        bind(self.reward, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        sure = score(self.reward, samples, prompts, metadata).value
        answers, value = [self._answer(text) for text in samples], torch.zeros(len(samples))
        for members in groups(prompts, metadata):
            votes: Counter[str] = Counter()
            order = sorted(members, key=lambda i: -sure[i].item())
            for rank, i in enumerate(order):
                if answers[i]:
                    votes[answers[i]] += (len(members) - rank) ** self.power
            if votes:
                winner = votes.most_common(1)[0][0]
                value[members] = torch.tensor([float(answers[i] == winner) for i in members])
        return Scores(value, {self.reward.name: sure})
