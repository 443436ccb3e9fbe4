"""A policy over a masked language model: a text is opened from masks in steps, and every opening is an action.

The discrete flow from a masked source with the linear schedule, as of arXiv 2605.09291 and its code: in a step of
length h = 1 / K from time t a masked position jumps with chance 1 - exp(-h / (1 - t)), at the last step with chance 1,
and then becomes the token x with the model's probability p(x) of x given the whole text with its masks. A jump to x so
has the chance jump * p(x), to stay 1 - jump. Only p depends on weights: in every ratio the schedule cancels, a position
that stays has the ratio 1, and the recorded log-probability is log p(x) alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding, entropy_of
from flowalign.policies.language.head import Head
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.token_sampler import draw, uniforms

Order = Literal["rates", "confidence"]


class MaskedPolicy(LanguagePolicy):
    """A masked language model (ModernBERT, BERT, ...) that writes by discrete diffusion, as LLaDA does.

    Every text has `max_new_tokens` positions, and all of them are actions, those after its end too: they were context
    of the others. What is decoded stops at the end.

    Args:
        network: the model, loaded.
        tokenizer: its tokenizer, which has a token for masks.
        device: where it samples and trains.
        steps: K steps from masks to a text.
        order: 'rates', each position jumps by itself, as of the flow; 'confidence', LLaDA's low-confidence remasking
            (arXiv 2502.09992): as many positions a step as fit, those whose drawn tokens are the most probable. Which
            ones then depends on the weights, and ratios take it as given.
        chat: as of `LanguagePolicy`, with `chat_settings`.
    """

    noun: ClassVar[str] = "masked language model"
    networks: ClassVar[Any] = AutoModelForMaskedLM

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        steps: int = 8,
        order: Order = "rates",
        chat: bool = False,
        **chat_settings: Any,
    ) -> None:
        if tokenizer.mask_token_id is None:
            raise ConfigError("model.diffusion: this model's tokenizer has no token for masks; ModernBERT's has one")
        super().__init__(network, tokenizer, device, chat=chat, **chat_settings)
        self.steps, self.order = steps, order

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text; BERT's is called a separator."""
        tokens = self.tokenizer
        return [tokens.sep_token_id if tokens.eos_token_id is None else tokens.eos_token_id]

    @property
    def undrawn(self) -> list[int]:
        return [self.tokenizer.mask_token_id]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str],
        inputs: dict[str, Any],
        seeds: Sequence[int],
        length: int,
        decoding: Decoding,
        pictures: list[list[Image]],
    ) -> TextRollout:
        """Texts from masks, in as many network calls as there are steps that open a position."""
        shape = len(prompts), length
        # one number a position for its order, and one a step for its token
        chance = uniforms(seeds, (1 + self.steps) * length).view(len(prompts), -1, length).to(self.device)
        completion = torch.full(shape, self.tokenizer.mask_token_id, device=self.device)
        log_prob, entropy = torch.zeros(2, *shape, device=self.device)
        step = torch.full(shape, self.steps, device=self.device)
        if self.order == "rates":
            step = opening_steps(chance[:, 0], self.steps)
        rollout = TextRollout(
            prompts=list(prompts),
            prompt_ids=inputs["input_ids"],
            prompt_mask=inputs["attention_mask"].bool(),
            completion_ids=completion,
            mask=torch.ones(shape, dtype=torch.bool, device=self.device),
            log_prob=log_prob,
            entropy=entropy,
            ended=torch.zeros(len(prompts), dtype=torch.bool, device=self.device),
            decoding=decoding,
            padding=self.tokenizer.pad_token_id,
            pictures=pictures,
            step=step,
        )
        every = torch.arange(len(prompts), device=self.device)
        for k in range(self.steps):
            count = length // self.steps + (k < length % self.steps)
            asked = step == k if self.order == "rates" else step == self.steps
            if not asked.any() or (self.order == "confidence" and count == 0):
                continue
            texts, positions = asked.nonzero(as_tuple=True)
            log_probs = self._at_states(
                rollout,
                every,
                torch.full_like(every, k),
                (texts, positions),
                lambda hidden, head: decoding.log_probs(head(hidden), undrawn=self.undrawn),
            )
            token = draw(log_probs, chance[texts, 1 + k, positions], decoding)
            # what is not opened now is masked in the next state, and drawn again
            completion[asked] = token
            log_prob[asked] = log_probs.gather(-1, token[:, None])[:, 0]
            entropy[asked] = entropy_of(log_probs)
            if self.order == "confidence":
                surest = log_prob.masked_fill(~asked, -torch.inf).topk(count).indices
                step.scatter_(1, surest, k)
        rollout.ended = self._is_end(completion).any(1)
        return rollout

    def at_tokens(
        self, rollout: TextRollout, rows: Tensor, scores: Callable[[Tensor, Head, Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """As of `LanguagePolicy`, each token in the state that it was opened in: a text for each of its steps."""
        texts, positions = rollout.mask[rows].nonzero(as_tuple=True)
        tokens = rollout.completion_ids[rows][texts, positions]
        taken = torch.stack([texts, rollout.step[rows][texts, positions]], 1)
        states, state = taken.unique(dim=0, return_inverse=True)
        text, step = states.unbind(1)
        return self._at_states(
            rollout, rows[text], step, (state, positions), lambda hidden, head: scores(hidden, head, tokens, None)
        )

    def _at_states(
        self,
        rollout: TextRollout,
        rows: Tensor,
        step: Tensor,
        places: tuple[Tensor, Tensor],
        made: Callable[[Tensor, Head], Tensor],
    ) -> Tensor:
        """What `made` makes of what the output head gets [M, H] at positions of texts as they were before steps.

        Args:
            rows: [S] of the rollout.
            step: [S]; positions that were opened in it or later are masked.
            places: [M] numbers of states, and [M] positions.
        """
        later = rollout.step[rows] >= step[:, None]
        ids = rollout.completion_ids[rows].masked_fill(later, self.tokenizer.mask_token_id)
        attention = torch.cat([rollout.prompt_mask[rows], rollout.mask[rows]], 1)
        inputs = {
            "input_ids": torch.cat([rollout.prompt_ids[rows], ids], 1),
            "attention_mask": attention.long(),
            **self.replay_inputs(rollout, rows, attention),
        }
        self.forwards += len(rows)
        state, position = places
        return self.at_places(inputs, (state, rollout.prompt_ids.shape[1] + position), made)

    def _is_end(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.ends, device=tokens.device))

    def decode(self, rollout: TextRollout, batch_size: int = 64) -> list[str]:
        """The texts up to their first end, without special tokens."""
        before = self._is_end(rollout.completion_ids).cumsum(1) == 0
        return super().decode(replace(rollout, mask=rollout.mask & before), batch_size)

    def bind(self, reward: object) -> None:
        """Lend the model to no reward: they ask for the chance of a token after those before it."""


def opening_steps(chance: Tensor, steps: int) -> Tensor:
    """The step in which each position jumps, from a uniform number for each: [...] -> [...] integers in [0, steps).

    It is the number of steps that a position stays masked: with chance exp(-1 / (K - k)) in step k, h = 1 / K times the
    rate 1 / (1 - t) at t = k / K, and never in the last.
    """
    stays = (-1 / torch.arange(steps, 0, -1, dtype=torch.float64)).exp()
    stays[-1] = 0
    return (chance[..., None] < stays.cumprod(0).to(chance)).sum(-1)
