"""A policy over a model that writes and draws: tokens of words and of pictures are actions of one policy.

T2I-R1 (arXiv 2505.00703) trains both levels of reasoning by GRPO on the finished picture: first a plan in words, then
the picture's tokens. The model is Emu3 (arXiv 2409.18869), whose pictures are tokens of the text's vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.head import Head
from flowalign.policies.language.policy import LanguagePolicy, without_own_settings
from flowalign.policies.language.rollout import TextRollout, right_padded
from flowalign.policies.language.token_sampler import SeededSampler

Draw = tuple[int, float, float]
"""A token, its log-probability, and the entropy of the distribution it was drawn from."""
FREE = -1
"""In the text of a picture: a token of the picture, which is drawn."""


class UnifiedPolicy(LanguagePolicy):
    """Emu3: a plan of up to `thinking` words' tokens, then a picture of `height` x `width` tokens.

    A completion is the plan, the token that begins a picture, and the picture's text: its size, its rows, its ends.
    A grammar says which tokens may come where, so that a log-probability is that of the draw among these; a token that
    has to come has log-probability 0. Picture tokens are drawn with classifier-free guidance, u + guidance (c - u) of
    the logits c after the prompt and the plan and u after an empty prompt. Log-probabilities are those of the guided
    distribution: it is the one that the tokens come from, so that the first ratio is 1, and its gradient flows through
    both rows. Scoring keeps the logits of all tokens.

    Args:
        network: an `Emu3ForConditionalGeneration`.
        tokenizer: its tokenizer, which knows Emu3's tokens around pictures by name.
        device: where it samples and trains.
        height, width: of a picture, in tokens.
        thinking: most tokens of the plan; 0 draws at once.
        instruction: text after the prompt that asks for a plan.
        guidance: 1 for none.
    """

    noun: ClassVar[str] = "unified model"
    networks: ClassVar[Any] = AutoModelForImageTextToText

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        height: int = 8,
        width: int = 8,
        thinking: int = 0,
        instruction: str = "",
        guidance: float = 1.0,
    ) -> None:
        if not hasattr(network, "decode_image_tokens"):
            raise ConfigError("model.draws: this model draws no pictures; Emu3ForConditionalGeneration does")
        super().__init__(network, tokenizer, device)
        self.height, self.width, self.thinking, self.guidance = height, width, thinking, guidance
        self.instruction = instruction

    @property
    def untrained(self) -> tuple[str, ...]:
        """What makes pictures of the codes."""
        return ("model.vqmodel.",)

    @cached_property
    def visual(self) -> Tensor:
        """[V] bool: the tokens of pictures."""
        names = self.network.config.vocabulary_map
        codes = [number for name, number in names.items() if name.startswith("<|visual token")]
        return torch.zeros(self.vocabulary, dtype=torch.bool).index_fill(0, torch.tensor(codes), True).to(self.device)

    @cached_property
    def words(self) -> Tensor:
        """[V] bool: the tokens of a plan, and the one that ends it and begins a picture."""
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.boi_token_id}
        return ~self.visual.index_fill(0, torch.tensor(sorted(special), device=self.device), True)

    @cached_property
    def picture(self) -> list[int]:
        """A picture's tokens after the one that begins it; FREE where they are drawn."""
        tokens = self.tokenizer
        size = tokens(f"{self.height}*{self.width}", add_special_tokens=False).input_ids
        rows = [*[FREE] * self.width, tokens.eol_token_id] * self.height
        return [*size, tokens.image_wrapper_token_id, *rows, tokens.eof_token_id, tokens.eoi_token_id, *self.ends[:1]]

    def begin(self, prompt: str) -> list[int]:
        return super().begin(f"{prompt} {self.instruction}" if self.thinking and prompt else prompt)

    def check_length(self, length: int) -> None:
        """Refuse a largest length that is not that of a plan and a picture."""
        needed = self.thinking + 1 + len(self.picture)
        if length != needed:
            raise ConfigError(
                f"max_new_tokens={length}: a plan of up to {self.thinking} tokens and a picture of {self.height} x "
                f"{self.width} are {needed}; rollout.max_new_tokens={needed} works"
            )

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str],
        inputs: dict[str, Any],
        seeds: Sequence[int],
        length: int,
        decoding: Decoding,
        pictures: list[list[Image.Image]],
    ) -> TextRollout:
        """Plans, then pictures, each by the model's own `generate`."""
        self.check_length(length)
        if decoding.repetition_penalty != 1:
            raise ConfigError("rollout.repetition_penalty: a picture repeats its tokens; 1.0 works")
        begins = self.tokenizer.boi_token_id
        plans = self._plans(inputs, seeds, length, decoding)
        # a plan that was cut, or of no tokens, has its end given
        plans = [plan if plan and plan[-1][0] == begins else [*plan, (begins, 0.0, 0.0)] for plan in plans]
        rows = [self.begin(prompt) + [draw[0] for draw in plan] for prompt, plan in zip(prompts, plans, strict=True)]
        if self.guidance != 1:
            rows += [[*self.begin(""), begins]] * len(prompts)
        ids, mask = self.padded(rows, [*prompts] * (len(rows) // len(prompts)), len(self.picture))
        sampler = PictureSampler(self, seeds, length, decoding, mask)
        drawn = self._drawn({"input_ids": ids, "attention_mask": mask.long()}, sampler, len(self.picture))
        whole = [plan + picture for plan, picture in zip(plans, drawn, strict=True)]
        tokens, log_prob, entropy = zip(*(zip(*row, strict=True) for row in whole), strict=True)
        return TextRollout(
            prompts=list(prompts),
            prompt_ids=inputs["input_ids"],
            prompt_mask=inputs["attention_mask"].bool(),
            completion_ids=right_padded(tokens, self.tokenizer.pad_token_id, self.device),
            mask=right_padded([[True] * len(row) for row in whole], False, self.device),
            log_prob=right_padded(log_prob, 0.0, self.device),
            entropy=right_padded(entropy, 0.0, self.device),
            ended=torch.ones(len(whole), dtype=torch.bool, device=self.device),
            decoding=decoding,
            padding=self.tokenizer.pad_token_id,
            pictures=pictures,
        )

    def _plans(self, inputs: dict[str, Any], seeds: Sequence[int], length: int, decoding: Decoding) -> list[list[Draw]]:
        """A plan for each row, with the token that ends it if it was drawn."""
        if self.thinking == 0:
            return [[] for _ in seeds]
        never = (~self.words).nonzero()[:, 0].tolist()
        sampler = SeededSampler(seeds, length, decoding, inputs["attention_mask"].bool(), never)
        drawn, begins = self._drawn(inputs, sampler, self.thinking, self.tokenizer.boi_token_id), []
        for row in drawn:
            tokens = [draw[0] for draw in row]
            end = self.tokenizer.boi_token_id
            begins.append(row[: tokens.index(end) + 1] if end in tokens else row)
        return begins

    def _drawn(
        self, inputs: dict[str, Any], sampler: SeededSampler, length: int, end: int | None = None
    ) -> list[list[Draw]]:
        settings = GenerationConfig(
            max_new_tokens=length, do_sample=False, eos_token_id=end, pad_token_id=self.tokenizer.pad_token_id
        )
        with self._autocast(), without_own_settings(self._bare):
            made = self._bare.generate(  # type: ignore[operator]
                **inputs,
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
                synced_gpus=False,
            )
        self.forwards += len(made)
        log_prob, entropy = torch.stack(sampler.log_prob, 1), torch.stack(sampler.entropy, 1)
        tokens = made[: len(log_prob), inputs["input_ids"].shape[1] :]
        rows = zip(tokens.tolist(), log_prob.tolist(), entropy.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]

    def guided(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Logits of a picture's tokens, [N, V] each; -inf for all others."""
        logits = unconditional + self.guidance * (conditional - unconditional)
        return logits.masked_fill(~self.visual, -torch.inf)

    def at_tokens(
        self, rollout: TextRollout, rows: Tensor, scores: Callable[[Tensor, Head, Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """As of `LanguagePolicy`, of logits after guidance and grammar."""
        some = rollout[rows.tolist()]
        tokens = some.completion_ids[some.mask]
        free, given = self._roles(some)
        both = some if self.guidance == 1 else TextRollout.cat([some, self._without_prompt(some)])

        def of_both(hidden: Tensor, head: Head, _: Tensor, __: Tensor | None) -> Tensor:
            logits = head(hidden).float()
            plain, count = logits[: len(tokens)], int(free.sum())
            without = plain[free] if self.guidance == 1 else logits[len(tokens) :].unflatten(0, (len(some), -1))
            if self.guidance != 1:
                drawn = torch.tensor([False] + [token == FREE for token in self.picture], device=logits.device)
                without = without[:, drawn].flatten(0, 1)
            assert len(without) == count, "a picture has all of its tokens"
            plain = plain.masked_fill(~self.words, -torch.inf).index_put((free,), self.guided(plain[free], without))
            only = torch.full_like(plain, -torch.inf).scatter(-1, tokens[:, None], 0.0)
            return scores(plain.where(~given[:, None], only), lambda same: same, tokens, None)

        return super().at_tokens(both, torch.arange(len(both), device=self.device), of_both)

    def _roles(self, rollout: TextRollout) -> tuple[Tensor, Tensor]:
        """[M] bool each, of a rollout's tokens: one of a picture that was drawn; one that had to come."""
        ids, mask = rollout.completion_ids, rollout.mask
        begins = (ids == self.tokenizer.boi_token_id).int().argmax(1, keepdim=True)
        after = torch.arange(ids.shape[1], device=ids.device) - begins
        roles = torch.tensor([0, *(1 if token == FREE else 2 for token in self.picture)], device=ids.device)
        role = roles[after.clamp(0, len(self.picture))]
        # the end of a plan that was cut
        role = role.masked_fill((after == 0) & (begins == self.thinking), 2)
        return (role == 1)[mask], (role == 2)[mask]

    def _without_prompt(self, rollout: TextRollout) -> TextRollout:
        """The same pictures after an empty prompt and no plan."""
        count, length = len(rollout), 1 + len(self.picture)
        pictures = [row[on][-length:] for row, on in zip(rollout.completion_ids, rollout.mask, strict=True)]
        ids, mask = self.padded([self.begin("")] * count, [""] * count, length)
        present = torch.ones(count, length, dtype=torch.bool, device=self.device)
        return replace(
            rollout,
            prompt_ids=ids,
            prompt_mask=mask,
            completion_ids=torch.stack(pictures),
            mask=present,
            log_prob=present.float(),
            entropy=present.float(),
            turn=torch.empty(0),
        )

    @torch.no_grad()
    def decode(self, rollout: TextRollout, batch_size: int = 64) -> list[Any]:
        """The pictures, by the model's own decoder."""
        length, network = len(self.picture) - self.picture.index(FREE), cast(Any, self._bare)
        pictures: list[Image.Image] = []
        rows = [row[on][-length:] for row, on in zip(rollout.completion_ids, rollout.mask, strict=True)]
        for i in range(0, len(rows), batch_size):
            some = torch.stack(rows[i : i + batch_size])
            pixels = network.model.decode_image_tokens(some, height=self.height, width=self.width)
            values = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
            pictures += [Image.fromarray(value) for value in values.cpu().numpy()]
        return pictures

    def plans(self, rollout: TextRollout) -> list[str]:
        """The words before each picture."""
        length = 1 + len(self.picture)
        rows = [row[on][:-length].tolist() for row, on in zip(rollout.completion_ids, rollout.mask, strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


class PictureSampler(SeededSampler):
    """Draws a picture's tokens from the guided distribution; below the rows with prompts may stand those without."""

    def __init__(
        self, policy: UnifiedPolicy, seeds: Sequence[int], length: int, decoding: Decoding, mask: Tensor
    ) -> None:
        super().__init__(seeds, length, decoding, mask)
        # the first draws were the plan's
        self.draws = self.draws[:, policy.thinking :]
        self.policy = policy

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count, token = len(self.draws), self.policy.picture[len(self.log_prob)]
        # float32 before the difference, as when they are scored
        conditional, unconditional = scores[:count].float(), scores[-count:].float()
        if token == FREE:
            logits = self.policy.guided(conditional, unconditional)
        else:
            logits = torch.full_like(conditional, -torch.inf)
            logits[:, token] = 0.0
        drawn = super().__call__(input_ids[:count], logits)
        return drawn.repeat(len(scores) // count, 1)
