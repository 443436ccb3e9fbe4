"""Rewards from what a text makes probable, or from two likelihoods of one text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rewards.base import Metadata, Scores, Spec
from rewards.text.model import AsksModel, CausalModel, refuse_pictures
from rewards.text.steps import as_steps
from rewards.text.verifiers import answers

_NEEDS = frozenset({"text", "prompt", "metadata"})
PLEASED = ("Thank you, that is exactly what I needed.", "Great, that helps a lot!")
ANNOYED = ("That does not answer my question.", "This is wrong.")


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """[N] means over a row's tokens, 0 for a row without any."""
    return values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)


class FollowUp(AsksModel):
    """How probable it is that the user goes on pleased, rather than annoyed (FLR, arXiv 2409.13948).

    The mean log-probability of the pleased remarks' tokens after prompt and text, less that of the annoyed ones where
    there are some. The paper makes pairs of a model's texts by it for DPO: `online_text_dpo` does. The remarks here are
    our own.

    Args:
        model: default the one that is trained.
        pleased, annoyed: remarks of the user after the text.
        lead: comes before the remark, as the model's dialogues have it.
    """

    name = "follow_up"

    def __init__(
        self,
        model: str | None = None,
        pleased: Sequence[str] = PLEASED,
        annoyed: Sequence[str] = ANNOYED,
        lead: str = "\nUser: ",
    ) -> None:
        super().__init__(model)
        if not pleased:
            raise ValueError("follow_up: at least one remark of a pleased user")
        self.pleased, self.annoyed, self.lead = list(pleased), list(annoyed), lead
        self.spec = Spec(frozenset({"text", "prompt"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        remarks = [*self.pleased, *self.annoyed]
        contexts = [
            model.begin(prompt, record) + model.tokens(text + self.lead)
            for text, prompt, record in zip(samples, prompts, metadata, strict=True)
            for _ in remarks
        ]
        values, mask = model.log_probs(contexts, [model.tokens(remark) for _ in samples for remark in remarks])
        means = row_means(values, mask).view(len(samples), len(remarks))
        pleased = means[:, : len(self.pleased)].mean(1)
        annoyed = means[:, len(self.pleased) :].mean(1) if self.annoyed else torch.zeros(len(samples))
        return Scores(pleased - annoyed, {"pleased": pleased})


class DensityRatio:
    """log p_strong(text) - log p_weak(text) after the prompt, the strong model being the better aligned one (CDR, arXiv
    2411.02481).

    The customised ratio puts criteria and examples before the strong model's prompt, so that the ratio is about what is
    wanted: `instruction`. The sum is over tokens; `per_token` takes the mean.

    Args:
        strong, weak: folders or hub names; a DPO-trained model and the one that it was trained from, or two sizes.
        instruction: text before the prompt of both, where `{prompt}` stands for it.
    """

    name = "density_ratio"
    spec = Spec(frozenset({"text", "prompt"}))

    def __init__(self, strong: str, weak: str, instruction: str = "{prompt}", per_token: bool = False) -> None:
        if "{prompt}" not in instruction:
            raise ValueError("density_ratio: instruction has {prompt} where the prompt is to stand")
        self.strong, self.weak = CausalModel.load(strong), CausalModel.load(weak)
        self.instruction, self.per_token = instruction, per_token

    def bind(self, model: CausalModel) -> None:
        """Refuse a model in training that sees pictures."""
        refuse_pictures(self.name, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        columns = []
        for model in (self.strong, self.weak):
            asked = [self.instruction.replace("{prompt}", prompt) for prompt in prompts]
            begun = [model.begin(prompt, record) for prompt, record in zip(asked, metadata, strict=True)]
            values, mask = model.log_probs(begun, [model.tokens(text) for text in samples])
            columns.append(row_means(values, mask) if self.per_token else values.where(mask, 0).sum(1))
        strong, weak = columns
        return Scores(strong - weak, {"strong": strong, "weak": weak})


def endogenous(logits: Tensor, tokens: Tensor, alpha: float = 1.0) -> Tensor:
    """Reward of each token that the inverse soft Bellman operator finds in a model's logits (arXiv 2506.23235).

    The logits are Q(s, a) of a soft-optimal policy and V(s) = alpha log sum exp(Q(s, .) / alpha), so that r(s_t, a_t) =
    Q(s_t, a_t) - V(s_t+1), without discount; the last token, after which nothing comes, keeps its Q.

    Args:
        logits: [A + 1, V] at each token and after the last.
        tokens: [A].

    Returns:
        [A]
    """
    chosen = logits[:-1].gather(-1, tokens[:, None].to(logits.device))[:, 0]
    value = alpha * (logits / alpha).logsumexp(-1)
    following = value[1:].clone()
    following[-1:] = 0
    return chosen - following


class Endogenous(AsksModel):
    """The reward that a model trained on texts holds in its logits, token by token (arXiv 2506.23235): no labels
    needed.

    Logits are Q-values up to a constant of the context, which only a model trained by maximum likelihood as a whole
    makes meaningful; the paper proves it for inverse RL. Each token is a step.

    Args:
        model: default the one that is trained; the paper scores with a frozen one.
        alpha: temperature of the soft value.
        per_token: the mean over the text's tokens in the place of the sum.
    """

    name = "endogenous"

    def __init__(self, model: str | None = None, alpha: float = 1.0, per_token: bool = False) -> None:
        super().__init__(model)
        if not alpha > 0:
            raise ValueError("endogenous: alpha above 0")
        self.alpha, self.per_token = alpha, per_token
        self.spec = Spec(frozenset({"text", "prompt"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        contexts = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        texts = [model.tokens(text) for text in samples]
        rows = [endogenous(logits, tokens, self.alpha).cpu() for logits, tokens in model.logits(contexts, texts)]
        if self.per_token:
            rows = [row / max(1, len(row)) for row in rows]
        values = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        steps = as_steps([model.ends(text) for text in samples], values)
        return Scores(values.sum(1), steps=steps)


class Foretold(AsksModel):
    """How much more probable a thought makes what comes next than an average of the weights finds it without (RLP,
    arXiv
    2510.01265).

    The text is the thought, the metadata's `answer` what follows in the document: `flowalign prompts segments` cuts
    documents so. mean log p(next | prompt, thought) under the current weights - mean log p(next | prompt) under those
    of a snapshot that follows slowly.

    Args:
        weights: name of the snapshot in `training.snapshots`, e.g. {slow: {decay: 0.999}}; null: the current weights.
        model: a frozen model in the place of the trained one.
        key: key of what comes next in the metadata.
        lead: comes between thought and document.
    """

    name = "foretold"
    asks_snapshots = True

    def __init__(
        self, weights: str | None = None, model: str | None = None, key: str = "answer", lead: str = "\n"
    ) -> None:
        super().__init__(model)
        self.weights, self.key, self.lead = weights, key, lead
        self.spec = Spec(_NEEDS, deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        following = [model.tokens(answer) for answer in answers(self.name, prompts, metadata, self.key)]
        begun = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        thought = [start + model.tokens(text + self.lead) for start, text in zip(begun, samples, strict=True)]
        told = row_means(*model.log_probs(thought, following))
        lead = model.tokens(self.lead)
        with model.under(self.weights):
            untold = row_means(*model.log_probs([start + lead for start in begun], following))
        return Scores(told - untold, {"told": told})
