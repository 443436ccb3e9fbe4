"""Rewards from how probable a language model finds a text, or the right answer after it."""

import re
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from rewards.base import Metadata, Scores, Spec
from rewards.text.model import AsksModel
from rewards.text.process import likelihood_reward, self_aligned, self_certainty
from rewards.text.verifiers import answers

_NEEDS = frozenset({"text", "prompt", "metadata"})


class RLPR(AsksModel):
    """The mean probability of the right answer's tokens in the place of the text's own answer (RLPR, arXiv 2506.18254).

    Args:
        model: default the one that is trained, as published.
        key: key of the answer in the metadata.
        pattern: a regular expression whose first group is the text's answer, its last match counting; a text without
            one gets 0. Default: the right answer comes after the whole text.
        lead: comes before the answer where there is no pattern.
        debias: take off the answer's probability right after the prompt, and keep the rest within [0, 1].
    """

    name = "rlpr"

    def __init__(
        self,
        model: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        lead: str = "\nAnswer: ",
        debias: bool = True,
    ) -> None:
        super().__init__(model)
        self.key, self.lead, self.debias = key, lead, debias
        self.pattern = re.compile(pattern, re.DOTALL) if pattern else None
        self.spec = Spec(_NEEDS, deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = answers(self.name, prompts, metadata, self.key)
        before = [self._before(text) for text in samples]
        model = self.model
        tokens = [model.tokens(answer) for answer in right]
        begun = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        log_probs, mask = model.log_probs(
            [start + model.tokens(text or "") for start, text in zip(begun, before, strict=True)], tokens
        )
        without: Tensor | None = None
        if self.debias:
            lead = model.tokens("" if self.pattern else self.lead)
            without, _ = model.log_probs([start + lead for start in begun], tokens)
        value = likelihood_reward(log_probs, mask, without)
        return Scores(value.where(torch.tensor([text is not None for text in before]), 0))

    def _before(self, text: str) -> str | None:
        """The text up to where its right answer comes."""
        if self.pattern is None:
            return text + self.lead
        matches = list(self.pattern.finditer(text))
        return text[: matches[-1].start(1)] if matches else None


class SelfAligned(AsksModel):
    """Fall of a text's perplexity by its prompt (SAR, arXiv 2509.05489), in [-1, 1].

    Short texts that are about the prompt get most. It is meant to be added to a verifier's reward, 0.2 to 1; an empty
    text gets 0.

    Args:
        model: default the one that is trained, as published.
    """

    name = "self_aligned"

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model)
        self.spec = Spec(frozenset({"text", "prompt"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        texts = [model.tokens(text) for text in samples]
        begun = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        conditioned, mask = model.log_probs(begun, texts)
        alone, _ = model.log_probs([model.nothing] * len(texts), texts)
        return Scores(self_aligned(conditioned, alone, mask))


class SelfCertainty(AsksModel):
    """Mean over a text's tokens of KL(uniform || model) (arXiv 2502.18581; INTUITOR, 2505.19590): no answers needed.

    The end token is not among them; an empty text gets 0.

    Args:
        model: default the one that is trained; INTUITOR finds a frozen one easier to fool.
    """

    name = "self_certainty"

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model)
        self.spec = Spec(frozenset({"text", "prompt"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        contexts = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        texts = [model.tokens(text) for text in samples]
        values = [
            self_certainty(log_probs[None], torch.ones(1, len(log_probs), dtype=torch.bool))
            for log_probs, _ in model.distributions(contexts, texts)
        ]
        return Scores(torch.cat(values))


class CriticalEntropy(AsksModel):
    """Mean entropy, in nats, of the tokens with which a text's critical words begin, such as "wait": how open it was
    there whether to think again (Skywork-R1V3, arXiv 2507.06167; after the abstract).

    It is meant for `evaluation.panel`, by which `evaluation.watch` can choose the checkpoint; it is no reward to train
    on. Texts without a critical word get 0; `words` counts them.

    Args:
        words: critical words, wherever they stand, in any case.
        model: folder or hub name of a frozen model; default the one that is trained, as published.
    """

    name = "critical_entropy"

    def __init__(
        self,
        words: Sequence[str] = ("wait", "alternatively", "however", "but", "hmm", "let me"),
        model: str | None = None,
    ) -> None:
        super().__init__(model)
        if not words:
            raise ValueError("critical_entropy: name at least one word")
        listed = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        self.words = re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE)
        self.spec = Spec(frozenset({"text", "prompt"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        contexts = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        distributions = model.distributions(contexts, [model.tokens(text) for text in samples])
        value, count = torch.zeros(len(samples)), torch.zeros(len(samples))
        for row, (text, (log_probs, _)) in enumerate(zip(samples, distributions, strict=True)):
            ends, starts = model.ends(text), [match.start() for match in self.words.finditer(text)]
            tokens = [bisect_right(ends, start) for start in starts]
            if tokens:
                chosen = log_probs[tokens]
                value[row], count[row] = -(chosen.exp() * chosen).sum(-1).mean(), len(tokens)
        return Scores(value, {"words": count})
