"""How many texts a prompt deserves: the model says itself whether another attempt would do better (arXiv 2410.02725).

After a text comes a question, and the probability of one token is the answer: would it do better if it began again?
`lines_of` makes the texts that teach it to say so, for `text_sft`. `adaptive_best_of_n` samples on only where it would,
and `pruned_best_of_n` gives up the beginnings that are least sure. Nothing else scores the texts. After the abstract
and the introduction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from rewards.text.model import CausalModel
from samplers import derive_seed

QUESTION = "\n\nWould you do better if you started over? (Yes or No) "


@dataclass(frozen=True)
class SelfEvaluation:
    """A model that is asked whether a text, or its beginning, would be better if it were begun again."""

    model: CausalModel
    question: str = QUESTION
    better: str = "Yes"
    """Answer that another attempt would be better; its first token counts."""
    same: str = "No"
    """Answer that it would not; its first token counts."""

    def sure(self, prompts: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]] = ()) -> Tensor:
        """[N] probability that no attempt would do better, of the two answers."""
        records = metadata or [{} for _ in prompts]
        contexts = [
            self.model.begin(prompt, record) + self.model.tokens(text + self.question)
            for prompt, text, record in zip(prompts, texts, records, strict=True)
        ]
        answers = [self.model.tokens(answer)[0] for answer in (self.same, self.better)]
        found = [logits[-1, answers].softmax(0)[0] for logits, _ in self.model.logits(contexts, [[]] * len(contexts))]
        return torch.stack(found).cpu()


def lines_of(
    evaluation: SelfEvaluation, prompts: Sequence[str], texts: Sequence[Sequence[str]], rewards: Tensor
) -> list[dict[str, str]]:
    """Lines for `text_sft` that teach the answer: each text of a prompt against the next one, which is another attempt.

    Args:
        texts: n texts of each prompt.
        rewards: [Q, n] of them. A text that is as good as the other attempt needs no other.
    """
    lines = []
    for prompt, group, row in zip(prompts, texts, rewards.tolist(), strict=True):
        for i, text in enumerate(group):
            better = row[(i + 1) % len(group)] > row[i]
            answer = evaluation.better if better else evaluation.same
            lines.append({"prompt": prompt + text + evaluation.question, "completion": answer})
    return lines


@dataclass(frozen=True)
class Chosen:
    """The text of a prompt that was kept."""

    text: str
    sure: float
    """Probability that no attempt would do better."""
    samples: int
    """Texts that were drawn for it."""


def adaptive_best_of_n(
    policy: LanguagePolicy,
    evaluation: SelfEvaluation,
    prompts: Sequence[str],
    *,
    most: int,
    enough: float,
    temperatures: Sequence[float] = (1.0,),
    seed: int = 0,
    metadata: Sequence[Mapping[str, Any]] = (),
    **sampling: Any,
) -> list[Chosen]:
    """The surest text of each prompt, of which further ones are drawn until one is sure enough.

    Args:
        most: largest number of texts of a prompt.
        enough: probability in [0, 1] that ends it; above 1 it is best of n.
        temperatures: of the first, the second, ... text; the last one is that of all others.
        sampling: of `LanguagePolicy.sample`, such as max_new_tokens.
    """
    best: list[Chosen | None] = [None] * len(prompts)
    waiting = list(range(len(prompts)))
    for number in range(most):
        temperature = temperatures[min(number, len(temperatures) - 1)]
        asked, records = [prompts[i] for i in waiting], [metadata[i] for i in waiting] if metadata else []
        seeds = [derive_seed(seed, i, number) for i in waiting]
        rollout = policy.sample(asked, seeds, metadata=records, temperature=temperature, **sampling)
        texts = policy.decode(rollout)
        for i, text, sure in zip(waiting, texts, evaluation.sure(asked, texts, records).tolist(), strict=True):
            before = best[i]
            if before is None or sure > before.sure:
                best[i] = Chosen(text, sure, number + 1)
            else:
                best[i] = replace(before, samples=number + 1)
        waiting = [i for i in waiting if (chosen := best[i]) is not None and chosen.sure < enough]
        if not waiting:
            break
    return [chosen for chosen in best if chosen is not None]


def pruned_best_of_n(
    policy: LanguagePolicy,
    evaluation: SelfEvaluation,
    prompt: str,
    *,
    count: int,
    at: int,
    keep: int,
    max_new_tokens: int,
    seed: int = 0,
    **decoding: Any,
) -> Chosen:
    """The surest of the texts of one prompt whose first `at` tokens were among the `keep` surest beginnings.

    Args:
        count: beginnings that are drawn.
    """
    prompts = [prompt] * count
    seeds = [derive_seed(seed, number) for number in range(count)]
    begun = policy.sample(prompts, seeds, max_new_tokens=at, **decoding)
    kept = evaluation.sure(prompts, policy.decode(begun)).topk(keep).indices
    texts = _finished(policy, begun[kept], [derive_seed(seed, count + int(i)) for i in kept], max_new_tokens - at)
    sure = evaluation.sure([prompt] * keep, texts)
    best = int(sure.argmax())
    return Chosen(texts[best], float(sure[best]), count)


def _finished(policy: LanguagePolicy, begun: TextRollout, seeds: Sequence[int], room: int) -> list[str]:
    """Texts that go on from beginnings; those that ended are as they are."""
    texts = policy.decode(begun)
    going = [i for i, ended in enumerate(begun.ended.tolist()) if not ended]
    if going:
        tokens = [begun.completion_ids[i][begun.mask[i]].tolist() for i in going]
        prompts = [begun.prompts[i] for i in going]
        inputs = policy.continued_inputs(prompts, [], tokens, room)
        more = policy.generate(prompts, inputs, [seeds[i] for i in going], room, begun.decoding, [])
        for i, first, rest in zip(going, tokens, policy.decode(more), strict=True):
            texts[i] = policy.tokenizer.decode(first, skip_special_tokens=True) + rest
    return texts
