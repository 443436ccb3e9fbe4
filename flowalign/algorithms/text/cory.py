"""CORY: two copies of the model answer one after the other, the second shown the first's text (after arXiv 2410.06101).

Rollout: the first half of a group, pioneers, answer the prompt; each of the others, observers, answers the prompt with
a pioneer's text in `template`. Credit: a pioneer and its observer earn the sum of both rewards, and each half of a
group is normalised by itself, since they answer different prompts. Loss: GRPO's, each text under the prompt that it
was sampled from.

After the abstract. Departures: both copies have one set of weights, which plays either role in every iteration, in the
place of two sets that change roles from time to time.
"""

from torch import Tensor

from flowalign.algorithms.text.halves import Halves, HalvesSettings


class CORYSettings(HalvesSettings):
    template: str = "{prompt}\n\nAnother answer: {pioneer}\n\n{prompt}"
    """Prompt of an observer; names in braces are the prompt, the pioneer's text, and keys of the metadata."""


class CORY(Halves):
    """CORY: half of a group answers, the other half answers knowing those answers, for a common reward."""

    name = "cory"
    Settings = CORYSettings
    settings: CORYSettings

    def credited(self, reward: Tensor, second: Tensor, group: Tensor) -> Tensor:
        return shared(reward, second, group)


def shared(reward: Tensor, second: Tensor, group: Tensor) -> Tensor:
    """Rewards where the k-th of a group's first half and the k-th of its second both earn their sum.

    Args:
        reward: [B].
        second: [B] bool.
        group: [B] integers.
    """
    changed = reward.clone()
    for number in group.unique().tolist():
        pioneers = ((group == number) & ~second).nonzero()[:, 0]
        watching = ((group == number) & second).nonzero()[:, 0]
        changed[pioneers] = changed[watching] = reward[pioneers] + reward[watching]
    return changed
