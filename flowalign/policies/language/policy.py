"""A policy over a transformers causal language model: tokens are its actions."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import TRAINED, Policy, repeated_blocks, torch_dtype
from flowalign.policies.language.chat import Chat, ChatTemplate, asked, chat
from flowalign.policies.language.continuous import generate_continuously
from flowalign.policies.language.decoding import Decoding, entropy_of
from flowalign.policies.language.head import RECOMPUTED, Head, Measure, gives_logits, instead_of_logits, token_scores
from flowalign.policies.language.packing import packed, tells_texts_apart
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.token_sampler import Guide, SeededSampler
from flowalign.runs.checkpoint import check_weights
from flowalign.runs.progress import report
from rewards import bind
from rewards.hub import hub, reason
from rewards.text.model import CausalModel

logger = logging.getLogger(__name__)
ATTENTION_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


class LanguagePolicy(Policy[TextRollout]):
    """A causal language model that is trained. `forwards` counts sequences: sampled, and scored again.

    Args:
        network: the model, loaded.
        tokenizer: its tokenizer.
        device: where it samples and trains.
        padding: side of the padding when log-probabilities are computed, or 'packed': texts follow each other in the
            place of most of it. All give the same numbers.
        chat: put prompts into the tokenizer's chat template, as a user's turn after `system`, or as their messages.
        template: a chat template in the place of the tokenizer's, as a text in Jinja.
        template_arguments: further arguments of the template, such as enable_thinking.
    """

    guide: Guide | None = None
    """Moves the logits that texts are drawn from, token by token."""
    noun: ClassVar[str] = "language model"
    networks: ClassVar[Any] = AutoModelForCausalLM
    readers: ClassVar[Any] = AutoTokenizer

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        padding: Literal["left", "right", "packed"] = "left",
        chat: bool = False,
        system: str | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(network.to(device), device)
        self.tokenizer, self.padding, self.chat, self.system = tokenizer, padding, chat, system
        self.template_arguments = dict(template_arguments or {})
        if template is not None:
            tokenizer.chat_template = template
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if chat and tokenizer.chat_template is None:
            raise ConfigError("model.chat: this tokenizer has no chat template; model.chat_template: FILE gives it one")
        self._head_is_last = gives_logits(network)
        if padding == "packed" and not tells_texts_apart(network):
            raise ConfigError("model.padding: this network cannot tell texts apart that follow each other; left works")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        **settings: Any,
    ) -> Self:
        """Load a model and its tokenizer or processor."""
        try:
            reader = cls.readers.from_pretrained(**hub(path))
            network = cls.networks.from_pretrained(**hub(path), dtype=torch_dtype(dtype))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no {cls.noun} at '{path}': {reason(error)}") from error
        return cls(network, reader, device, **settings)

    @property
    def lora_targets(self) -> list[str]:
        return ATTENTION_PROJECTIONS

    def add_lora(
        self, rank: int, alpha: float, targets: Sequence[str] | str | None = None, init: bool | str = True
    ) -> None:
        head = self.network.get_output_embeddings()
        linear = {_last(name) for name, m in self.network.named_modules() if isinstance(m, nn.Linear) and m is not head}
        super().add_lora(rank, alpha, targets, init)
        if isinstance(targets, str):
            return
        adapted = {_last(name) for name, m in self.network.named_modules() if isinstance(m, BaseTunerLayer)}
        missing = [name for name in targets or ATTENTION_PROJECTIONS if _last(name) not in adapted]
        if missing:
            logger.warning(
                "LoRA adapts %s alone, for the model has no %s; model.lora.targets: all-linear adapts %s too",
                ", ".join(sorted(adapted)),
                ", ".join(missing),
                ", ".join(sorted(linear - adapted)),
            )

    def checkpoint_gradients(self) -> None:
        # transformers' layers do it in training mode alone, in which they would drop out at random too
        for block in repeated_blocks(self.network):
            forward: Callable[..., Any] = block.forward
            block.forward = partial(_recomputed, forward)

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text."""
        configured = self.network.generation_config.eos_token_id or self.tokenizer.eos_token_id
        return configured if isinstance(configured, list) else [configured]

    @property
    def vocabulary(self) -> int:
        """Number of the network's logits."""
        return self.network.config.get_text_config().vocab_size

    @property
    def undrawn(self) -> list[int]:
        """Tokens that no text may have."""
        return []

    def encode(self, prompts: Sequence[str], room: int) -> tuple[Tensor, Tensor]:
        """Token ids [B, P], padded on the left, and their mask.

        Raises:
            ConfigError: a prompt and `room` tokens after it are longer than the model's context.
        """
        # the members of a group have one prompt
        begun = {id(prompt): self.begin(prompt) for prompt in {id(p): p for p in prompts}.values()}
        return self.padded([begun[id(prompt)] for prompt in prompts], prompts, room)

    def begin(self, prompt: str) -> list[int]:
        """Token ids of a prompt as the model gets it; of an empty one what begins a text, or else what ends one."""
        tokenizer, text = self.tokenizer, prompt
        if self.chat:
            messages = prompt.messages if isinstance(prompt, Chat) else [{"role": "user", "content": prompt}]
            text = self.chat_template.prompt(messages)
        ids = list(tokenizer(text, add_special_tokens=not self.chat).input_ids)
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return ids or [first]

    def _begin_with(self, prompt: str, record: Mapping[str, Any]) -> list[int]:
        return self.begin(chat(prompt, record))

    def padded(self, rows: Sequence[list[int]], prompts: Sequence[str], room: int) -> tuple[Tensor, Tensor]:
        """Rows of token ids as one tensor, padded on the left, and their mask; raises as `encode`."""
        self.check_room([len(row) for row in rows], prompts, room)
        width = max(map(len, rows))
        padding = self.tokenizer.pad_token_id
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=self.device)
        return ids, mask

    def check_room(self, lengths: Sequence[int], prompts: Sequence[str], room: int) -> None:
        """Refuse a prompt that with `room` tokens after it is longer than the model's context."""
        context = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        for length, prompt in zip(lengths, prompts, strict=True):
            if context is not None and length + room > context:
                raise ConfigError(
                    f"a prompt of {length} tokens and max_new_tokens={room} do not fit into the model's context of "
                    f"{context}: {prompt[:60]!r}"
                )

    def pictures(self, metadata: Sequence[Mapping[str, Any]]) -> list[list[Image]]:
        """[B] the pictures that each prompt shows; [] for a model that sees none."""
        return []

    def prompt_inputs(self, prompts: Sequence[str], pictures: Sequence[Sequence[Image]], room: int) -> dict[str, Any]:
        """The network's arguments for these prompts: `input_ids` and `attention_mask` [B, P], padded on the left, and
        whatever else it takes."""
        ids, mask = self.encode(prompts, room)
        return {"input_ids": ids, "attention_mask": mask.long()}

    def continued_inputs(
        self,
        prompts: Sequence[str],
        pictures: Sequence[Sequence[Image]],
        continuations: Sequence[list[int]],
        room: int,
    ) -> dict[str, Any]:
        """As `prompt_inputs`, of prompts that go on with given token ids."""
        rows = [self.begin(prompt) + tokens for prompt, tokens in zip(prompts, continuations, strict=True)]
        ids, mask = self.padded(rows, prompts, room)
        return {"input_ids": ids, "attention_mask": mask.long()}

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that prompts are put into."""
        ends = [self.tokenizer.decode([end]) for end in self.ends]
        return ChatTemplate(self._apply_template, ends, self.system, self.tools, self.template_arguments)

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of functions that the model may call."""
        return []

    @property
    def _apply_template(self) -> Callable[..., Any]:
        return self.tokenizer.apply_chat_template

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        batch_size: int = 64,
        continuous_batching: bool = False,
        metadata: Sequence[Mapping[str, Any]] = (),
        **decoding: Any,
    ) -> TextRollout:
        """Sample a completion of every prompt by the model's own `generate`.

        Args:
            seeds: B seeds of the draws.
            max_new_tokens: where a completion without an end is cut.
            continuous_batching: a completion that ends gives its row to the next prompt, by a loop in the place of
                `generate`; the texts are the same. Not for pictures.
            metadata: metadata of the prompts; a model that sees pictures is shown its 'image'.
            decoding: fields of `Decoding`, such as temperature.
        """
        rule, prompts = Decoding(**decoding), asked(prompts, metadata)
        rollouts, pictures = [], self.pictures(metadata)
        if continuous_batching:
            inputs = self.prompt_inputs(prompts, pictures, max_new_tokens)
            return generate_continuously(self, prompts, inputs, seeds, max_new_tokens, rule, batch_size)
        for i in range(0, len(prompts), batch_size):
            report(i, len(prompts))
            chunk = slice(i, i + batch_size)
            inputs = self.prompt_inputs(prompts[chunk], pictures[chunk], max_new_tokens)
            rollouts.append(self.generate(prompts[chunk], inputs, seeds[chunk], max_new_tokens, rule, pictures[chunk]))
        return TextRollout.cat(rollouts)

    def generate(
        self,
        prompts: Sequence[str],
        inputs: dict[str, Any],
        seeds: Sequence[int],
        length: int,
        decoding: Decoding,
        pictures: list[list[Image]],
    ) -> TextRollout:
        """Completions in one network call; `inputs` come from `prompt_inputs`."""
        ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"].bool()
        sampler = SeededSampler(seeds, length, decoding, prompt_mask, self.undrawn, self.guide)
        settings = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        with self._autocast(), without_own_settings(self._bare):
            sequences = self._bare.generate(  # type: ignore[operator]
                **inputs,
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
                # each process for itself: the weights are whole while texts are sampled
                synced_gpus=False,
            )
        self.forwards += len(prompts)
        tokens = sequences[:, ids.shape[1] :]
        is_end = torch.isin(tokens, torch.tensor(self.ends, device=tokens.device))
        mask = is_end.cumsum(1) - is_end.long() == 0
        return TextRollout(
            prompts=list(prompts),
            prompt_ids=ids,
            prompt_mask=prompt_mask,
            completion_ids=tokens.masked_fill(~mask, self.tokenizer.pad_token_id),
            mask=mask,
            log_prob=torch.stack(sampler.log_prob, 1).where(mask, 0),
            entropy=torch.stack(sampler.entropy, 1).where(mask, 0),
            ended=is_end.any(1),
            decoding=decoding,
            padding=self.tokenizer.pad_token_id,
            pictures=pictures,
        )

    @torch.no_grad()
    def last_logits(self, **inputs: Any) -> Tensor:
        """[B, V] logits of the token that follows; no others are computed. `inputs` are the network's."""
        network: Any = self._bare
        with self._autocast(), instead_of_logits(network.get_output_embeddings(), _at_the_end):
            logits: Tensor = network(**inputs).logits[:, -1]
        return logits

    def log_probs(
        self, rollout: TextRollout, rows: Tensor, measure: Measure = entropy_of, with_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the completions' tokens under the current weights, and a measure of the distributions.

        Args:
            rows: [N] of the rollout.
            measure: of each token's distribution; default its entropy.
            with_gradient: gradients flow through the measure too.

        Returns:
            Two [N, T] float32, 0 where the mask is False.
        """
        mask = rollout.mask[rows]

        def scores(hidden: Tensor, head: Head, tokens: Tensor, earlier: Tensor | None) -> Tensor:
            """[N, T, 2] in the place of logits."""
            rule = rollout.decoding
            sampled = token_scores(
                hidden,
                head,
                self.vocabulary,
                tokens,
                rule,
                before=earlier,
                undrawn=self.undrawn,
                measure=measure,
                with_gradient=with_gradient,
            )
            scored = torch.zeros(*mask.shape, 2, device=hidden.device)
            return scored.index_put(mask.nonzero(as_tuple=True), torch.stack(sampled, -1))

        scored = self.at_tokens(rollout, rows, scores)
        return scored[..., 0], scored[..., 1] if with_gradient else scored[..., 1].detach()

    def distributions(self, rollout: TextRollout, rows: Tensor) -> Tensor:
        """[M, V] float32 log-probabilities of all tokens where each of the M tokens of these rows was drawn.

        They are kept for a backward pass, so that the memory is of M V numbers.
        """

        def scores(hidden: Tensor, head: Head, tokens: Tensor, earlier: Tensor | None) -> Tensor:
            return rollout.decoding.log_probs(head(hidden), earlier, tokens, self.undrawn)

        return self.at_tokens(rollout, rows, scores)

    def errors(self, rollout: TextRollout, rows: Tensor, columns: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """([M, C] one-hot vectors of the M tokens of these rows less their distributions, [M, H] what the head got).

        Where a network changes what its head gives, as Gemma 2 does, the logits stand for what the head got.

        Args:
            columns: [C] ids of the tokens that are looked at.
            drawn: [M] the column of each drawn token.
        """

        def scores(hidden: Tensor, head: Head, tokens: Tensor, earlier: Tensor | None) -> Tensor:
            chance = rollout.decoding.log_probs(head(hidden), earlier, tokens, self.undrawn)[:, columns].exp()
            error = torch.nn.functional.one_hot(drawn, len(columns)) - chance
            return torch.cat([error, hidden.float()], 1)

        made = self.at_tokens(rollout, rows, scores)
        return made[:, : len(columns)], made[:, len(columns) :]

    def at_tokens(
        self, rollout: TextRollout, rows: Tensor, scores: Callable[[Tensor, Head, Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """What `scores` makes of what the output head gets where tokens were drawn.

        Args:
            scores: function of that [M, H], the head, the M tokens, and for a repetition penalty those before each.
        """
        prompt_mask, mask = rollout.prompt_mask[rows], rollout.mask[rows]
        ids = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], 1)
        attention = torch.cat([prompt_mask, rollout.present[rows]], 1)
        width, length = prompt_mask.shape[1], mask.shape[1]
        # the place of each token's predecessor, whose output predicts it
        before = torch.arange(width - 1, width + length - 1, device=ids.device).expand(len(rows), -1)
        if self.padding == "right":
            left = (~prompt_mask).sum(1, keepdim=True)
            order = (torch.arange(width + length, device=ids.device) + left) % (width + length)
            ids, attention, before = ids.gather(1, order), attention.gather(1, order), before - left
        texts, positions = mask.nonzero(as_tuple=True)
        drawn = before[texts, positions]
        earlier = None
        if rollout.decoding.repetition_penalty != 1:
            came = (torch.arange(width + length, device=ids.device) <= drawn[:, None]) & attention[texts]
            earlier = ids[texts].where(came, -1)
        tokens = rollout.completion_ids[rows][texts, positions]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": attention.long(), "use_cache": False}
        places = texts, drawn
        if self.padding == "packed":
            joined = packed(ids, attention)
            inputs = {"input_ids": joined.input_ids, "position_ids": joined.position_ids, "use_cache": False}
            places = joined.row[texts], joined.first[texts] + attention.cumsum(1)[texts, drawn] - 1
        else:
            inputs |= self.replay_inputs(rollout, rows, attention)

        self.forwards += len(rows)
        return self.at_places(inputs, places, lambda hidden, head: scores(hidden, head, tokens, earlier))

    def at_places(
        self, inputs: dict[str, Any], places: tuple[Tensor, Tensor], made: Callable[[Tensor, Head], Tensor]
    ) -> Tensor:
        """What `made` makes of what the output head gets [M, H] at places of the network's output, and of the head.

        Args:
            inputs: the network's arguments.
            places: rows and columns, [M] each.
        """

        def of_places(hidden: Tensor, head: Head) -> Tensor:
            return made(hidden[places], head)

        wrapped: nn.Module = self.model if torch.is_grad_enabled() else self._bare
        bare: Any = self.network if torch.is_grad_enabled() else self._bare
        with self._autocast():
            if not self._head_is_last:
                return of_places(wrapped(**inputs).logits, lambda logits: logits)
            with instead_of_logits(bare.get_output_embeddings(), of_places):
                output: Tensor = wrapped(**inputs).logits
                return output

    def replay_inputs(self, rollout: TextRollout, rows: Tensor, attention: Tensor) -> dict[str, Any]:
        """The network's arguments to score completions, besides tokens and their mask `attention`."""
        return {"position_ids": (attention.cumsum(1) - 1).clamp(min=0)}

    @torch.no_grad()
    def verify(self, rollout: TextRollout) -> float:
        """Compare log-probabilities on up to 8 completions."""
        rows = torch.arange(min(len(rollout), 8), device=self.device)
        forwards = self.forwards
        again, _ = self.log_probs(rollout, rows)
        self.forwards = forwards
        difference = float((again - rollout.log_prob[rows]).abs().max())
        tolerance = 1e-3 if self.compute_dtype == torch.float32 else 0.5
        if not difference <= tolerance:
            raise FlowalignError(
                f"log-probabilities of a forward pass differ from the sampled ones by {difference:.2g} "
                f"(at most {tolerance:g} is numerical noise)"
            )
        return difference

    def decode(self, rollout: TextRollout, batch_size: int = 64) -> list[str]:
        """The completions as texts, without special tokens."""
        rows = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.mask, strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def bind(self, reward: object) -> None:
        model = CausalModel(self.network, self.tokenizer, self._begin_with)
        model.snapshot = self.snapshot
        bind(reward, model)

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `from_pretrained` and peft load: the adapter, or the whole model; and the tokenizer."""
        self.network.save_pretrained(str(folder), state_dict=weights)
        self.tokenizer.save_pretrained(str(folder))

    def load(self, folder: str | Path) -> None:
        check_weights(folder)
        if (Path(folder) / "adapter_config.json").is_file():
            if TRAINED in getattr(self.network, "peft_config", {}):
                self.network.delete_adapter(TRAINED)
            self.read_lora(folder, TRAINED)
            self.lora = True
        else:
            loaded = type(self.network).from_pretrained(str(folder), dtype=self.dtype)
            self.network.load_state_dict(loaded.state_dict())

    def read_lora(self, path: str | Path, name: str) -> None:
        check_weights(path)
        self.network.load_adapter(str(path), name)


def _last(name: str) -> str:
    """A module's own name, without the modules that it is in."""
    return name.rpartition(".")[2]


def _at_the_end(hidden: Tensor, head: Head) -> Tensor:
    return head(hidden[:, -1:])


def _recomputed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> object:
    """A layer's output, its activations computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, **RECOMPUTED, **settings)


@contextlib.contextmanager
def without_own_settings(network: PreTrainedModel) -> Iterator[None]:
    """Within it `generate` takes nothing from the model's own generation_config, such as a repetition penalty."""
    settings, network.generation_config = network.generation_config, GenerationConfig()
    try:
        yield
    finally:
        network.generation_config = settings
