"""A frozen language model that a policy's tokens are compared with."""

import torch
from torch import Tensor

from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.vision_language import VisionLanguagePolicy


class Teacher:
    """A second model of the same vocabulary.

    Args:
        path: folder, hub name, or name of a shipped model.
        student: the policy whose texts it reads.

    Raises:
        ConfigError: no such model, or one of other tokens.
    """

    def __init__(self, path: str, student: LanguagePolicy) -> None:
        if isinstance(student, VisionLanguagePolicy):
            self.policy: LanguagePolicy = VisionLanguagePolicy.from_pretrained(
                shipped(path), student.dtype, student.device, system=student.system
            )
        else:
            self.policy = LanguagePolicy.from_pretrained(
                shipped(path), student.dtype, student.device, padding=student.padding
            )
        if self.policy.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ConfigError(
                f"algorithm.teacher: the tokens of '{path}' are not the model's; a larger model of its family works"
            )

    @torch.no_grad()
    def log_probs(self, rollout: TextRollout, batch_size: int = 64) -> Tensor:
        """[B, T] log-probabilities of the rollout's tokens under the teacher, by the rollout's rule."""
        rows = torch.arange(len(rollout), device=self.policy.device).split(batch_size)
        return torch.cat([self.policy.log_probs(rollout, chunk)[0] for chunk in rows])
