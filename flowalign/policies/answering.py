"""A reward of texts that is the reward of what a frozen language model writes under them: prompts and critiques."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowalign.data import shipped
from flowalign.policies.language.policy import LanguagePolicy
from rewards import Reward, RewardError, Scores, Spec, as_reward, score, spec_of
from rewards.vision import pick_device

FIELD = re.compile(r"\{(\w+)\}")


class Answered:
    """The reward of a frozen language model's most probable answer to a prompt that contains the text.

    A text may be a prompt that is looked for (RLPrompt, arXiv 2205.12548: the task's score under it; its
    stabilisation is left out), or a critique of a draft (stage II of Critique-RL: `less: draft` takes the draft's own
    reward off, so that a critique earns what the refinement gained). After the abstracts.

    Args:
        model: folder or hub name of a language model, or a shipped one.
        reward: reward of the answers, with the metadata of the prompt; pointwise.
        template: what the model is asked: `{text}`, `{prompt}` and keys of the metadata.
        less: key of the metadata with a text whose own reward is taken off.
        chat: put the question into the model's chat template.
        max_new_tokens: where an answer is cut.
    """

    def __init__(
        self,
        model: str,
        reward: Reward,
        template: str = "{text}\n{prompt}",
        less: str | None = None,
        chat: bool = False,
        max_new_tokens: int = 256,
        batch_size: int = 32,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: str = "auto",
    ) -> None:
        self.reward: Reward = as_reward(reward)
        spec = spec_of(self.reward)
        if "text" not in spec.needs or spec.kind != "pointwise":
            raise ValueError(f"answered: '{self.reward.name}' does not score each text alone (pointwise)")
        if "{text}" not in template:
            raise ValueError("answered: template has {text} where the text is to stand")
        self.model = LanguagePolicy.from_pretrained(shipped(model), dtype, pick_device(device), chat=chat)
        self.model.network.requires_grad_(False)
        self.template, self.less = template, less
        self.arguments: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "temperature": 0.0,
        }
        self.name = f"answered({self.reward.name})"
        self.spec = Spec(frozenset({"text", "prompt", "metadata"}), deterministic=spec.deterministic)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        asked = [self._asked(*row) for row in zip(samples, prompts, metadata, strict=True)]
        different = list(dict.fromkeys(asked))
        rollout = self.model.sample(different, [0] * len(different), **self.arguments)
        written = dict(zip(different, self.model.decode(rollout), strict=True))
        answers = [written[question] for question in asked]
        scores = score(self.reward, answers, prompts, metadata)
        replies = [{"answer": answer} for answer in answers]
        if self.less is None:
            return Scores(scores.value, {self.reward.name: scores.value}, weight=scores.weight, replies=replies)
        drafts = [str(self._of(self.less, prompt, record)) for prompt, record in zip(prompts, metadata, strict=True)]
        before = score(self.reward, drafts, prompts, metadata).value
        parts = {self.reward.name: scores.value, "before": before}
        return Scores(scores.value - before, parts, weight=scores.weight, replies=replies)

    def _asked(self, text: str, prompt: str, record: Mapping[str, Any]) -> str:
        known = dict(record) | {"text": text, "prompt": prompt}
        return FIELD.sub(lambda field: str(self._of(field[1], prompt, known)), self.template)

    def _of(self, key: str, prompt: str, record: Mapping[str, Any]) -> Any:
        if key not in record:
            raise RewardError(f"reward '{self.name}': the metadata of the prompt {prompt!r} has no '{key}'")
        return record[key]
