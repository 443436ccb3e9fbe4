"""A reward of texts that is the reward of their pictures: reinforcement learning of a prompt rewriter.

PromptEnhancer (arXiv 2509.04545) trains a rewriter by GRPO on the score of the pictures that a frozen generator makes
of its texts, each judged by the user's own prompt and not by the rewritten one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from PIL.Image import Image

from flowalign.data import shipped
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from rewards import Reward, RewardError, Scores, Spec, as_reward, score, spec_of
from rewards.compose import WeightedSum
from rewards.vision import pick_device


class Rendered:
    """The reward of the picture that a frozen pipeline makes of a text.

    The picture's start noise comes from metadata["seed"], which all members of a group share, so that their pictures
    differ by their texts alone; texts that are alike are rendered once. Its judge is asked about the request:
    the prompt that was to be rewritten, or what `judged_by` names.

    Departure from arXiv 2509.04545: the judge is any reward of pictures, in the place of their AlignEvaluator.

    Args:
        generator: folder or hub name of a diffusers pipeline, or a shipped one.
        reward: reward of pictures, pointwise or of groups.
        judged_by: key of the metadata with the text that the judge is given; default the request itself.
        pattern: a regular expression whose first group, at its last match, is the rewritten prompt, where a text also
            reasons; a text without a match is rendered as the empty prompt. Default the whole text.
        dtype, encode: of the pipeline, as in a configuration's `model`.
        steps, guidance, sigmas, height, width: of sampling by the ODE.
        batch_size: pictures a network call.
        device: device of the pipeline; 'auto' is the process's GPU.
    """

    def __init__(
        self,
        generator: str,
        reward: Reward,
        judged_by: str | None = None,
        pattern: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        encode: dict[str, Any] | None = None,
        steps: int = 20,
        guidance: float = 1.0,
        sigmas: list[float] | None = None,
        height: int | None = None,
        width: int | None = None,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        self.reward: Reward = as_reward(reward)
        spec = spec_of(self.reward)
        if "image" not in spec.needs:
            raise ValueError(f"picture: '{self.reward.name}' does not score pictures")
        self.name = f"picture({self.reward.name})"
        self.spec = Spec(frozenset({"text", "prompt", "metadata"}), spec.kind, deterministic=spec.deterministic)
        self.judged_by = judged_by
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self.sampling = Sampling(
            steps=steps, guidance=guidance, sigmas=sigmas, height=height, width=width, batch_size=batch_size
        )
        where = pick_device(device)
        self.generator = DiffusersPolicy.from_pretrained(shipped(generator), dtype, where, encode_options=encode)

    def prompt(self, text: str) -> str:
        """The rewritten prompt in a text."""
        if self.pattern is None:
            return text.strip()
        prompts = self.pattern.findall(text)
        return str(prompts[-1]).strip() if prompts else ""

    def render(self, texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[Image]:
        """The picture of each text."""
        wanted = [(self.prompt(text), int(record["seed"])) for text, record in zip(texts, metadata, strict=True)]
        different = list(dict.fromkeys(wanted))
        prompts, seeds = zip(*different, strict=True)
        pictures = dict(zip(different, self.generator.make(prompts, seeds, self.sampling), strict=True))
        return [pictures[each] for each in wanted]

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        judged = list(prompts)
        if self.judged_by is not None:
            for i, record in enumerate(metadata):
                if self.judged_by not in record:
                    raise RewardError(
                        f"reward '{self.name}': the metadata of the prompt {prompts[i]!r} has no '{self.judged_by}', "
                        "by which its picture is to be judged"
                    )
                judged[i] = record[self.judged_by]
        return score(self.reward, self.render(samples, metadata), judged, metadata)


def renderer(reward: object) -> Rendered | None:
    """The reward of pictures behind a reward of texts, alone or in a weighted sum, if there is one."""
    rewards = reward.rewards if isinstance(reward, WeightedSum) else [reward]
    return next((each for each in rewards if isinstance(each, Rendered)), None)
