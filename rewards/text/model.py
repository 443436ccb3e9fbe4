"""A causal language model that rewards ask how probable a text is."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import RewardError
from rewards.hub import hub, reason
from rewards.vision import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pictured:
    """A prompt that shows pictures, and the token ids after it."""

    prompt: str
    pictures: list[Image]
    after: list[int] = field(default_factory=list)

    def __add__(self, tokens: list[int]) -> "Pictured":
        return replace(self, after=self.after + tokens)


Context = list[int] | Pictured
"""Beginning of a text: token ids, or a prompt with pictures."""


class CausalModel:
    """A model and its tokenizer, asked without gradients.

    Args:
        network: a causal language model of transformers.
        tokenizer: its tokenizer, a fast one.
        begin: token ids of a prompt with its metadata as the model gets it; default the tokenizer's, with its special
            tokens.
        batch_size: texts a call.
    """

    sees_pictures = False
    snapshot: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
    """Context in which the network has the weights of a named snapshot; None of a model that is not trained."""
    processor: Any = None
    """Processor of a model that sees pictures."""

    def __init__(
        self,
        network: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        begin: Callable[[str, Mapping[str, Any]], list[int]] | None = None,
        batch_size: int = 32,
    ) -> None:
        self.network, self.tokenizer, self.batch_size = network, tokenizer, batch_size
        self._begin = begin or (lambda prompt, record: tokenizer(prompt).input_ids)

    @classmethod
    def load(cls, path: str, device: str = "auto") -> "CausalModel":
        """A frozen model from a folder or the hub, in its own precision; on a CPU in float32.

        Raises:
            ValueError: there is none.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        target = pick_device(device)
        try:
            network = AutoModelForCausalLM.from_pretrained(
                **hub(path), dtype="float32" if target.type == "cpu" else "auto"
            )
            tokenizer = AutoTokenizer.from_pretrained(**hub(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"no language model at '{path}': {reason(error)}") from error
        return cls(network.to(target).requires_grad_(False).eval(), tokenizer)

    def under(self, weights: str | None) -> contextlib.AbstractContextManager[None]:
        """Context in which the network has the weights of a snapshot (`training.snapshots`); None: those of now."""
        if weights is None:
            return contextlib.nullcontext()
        if self.snapshot is None:
            raise RewardError(f"there is no snapshot '{weights}': this language model is not trained")
        return self.snapshot(weights)

    def begin(self, prompt: str, record: Mapping[str, Any]) -> Context:
        """A prompt as the model gets it, `record` being its metadata."""
        return self._begin(prompt, record)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text that continues another."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def ends(self, text: str) -> list[int]:
        """Number of characters up to the end of each token."""
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        return [end for _, end in offsets]

    @property
    def nothing(self) -> list[int]:
        """Tokens before a text without a prompt."""
        first = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if first is None else first]

    def distributions(self, contexts: Sequence[Context], texts: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """([A, V] float32 log-probabilities that the tokens [A] of a text were drawn from, those tokens), each in turn.

        Args:
            contexts: what comes before each text, at least one token.
            texts: token ids; one without any has A = 0.
        """
        for logits, text in self.logits(contexts, texts):
            yield logits[:-1].log_softmax(-1).cpu(), text

    def logits(self, contexts: Sequence[Context], texts: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """([A + 1, V] float32 logits at each token of a text and after its last, the text's tokens [A]), each in
        turn."""
        for start in range(0, len(texts), self.batch_size):
            chunk = slice(start, start + self.batch_size)
            inputs, begins = self.inputs(contexts[chunk], texts[chunk])
            with torch.no_grad():
                logits = self.network(**inputs, use_cache=False).logits
            for row, (begin, text) in enumerate(zip(begins, texts[chunk], strict=True)):
                yield logits[row, begin - 1 : begin + len(text)].float(), torch.tensor(text, dtype=torch.long)

    def states(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        ends: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """[K, D] float32 states of the last layer where the first so many characters of each text end, on the CPU; of
        a text
        without tokens those at its prompt's last."""
        contexts = [self.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        tokens, found = [self.tokens(text) for text in texts], []
        for start in range(0, len(texts), self.batch_size):
            chunk = slice(start, start + self.batch_size)
            inputs, begins = self.inputs(contexts[chunk], tokens[chunk])
            with torch.no_grad():
                hidden = self.network(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]
            for row, (begin, text, cut) in enumerate(zip(begins, texts[chunk], ends[chunk], strict=True)):
                starts = [0, *self.ends(text)[:-1]] if text else []
                places = [begin - 1 + sum(place < end for place in starts) for end in cut]
                found.append(hidden[row, places].float().cpu())
        return found

    def inputs(self, contexts: Sequence[Any], texts: Sequence[list[int]]) -> tuple[dict[str, Any], list[int]]:
        """The network's arguments, and the place of each text's first token among its row's."""
        device, padding = self.network.device, self.tokenizer.pad_token_id or 0
        rows = [context + text for context, text in zip(contexts, texts, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        return {"input_ids": ids, "attention_mask": mask}, [len(context) for context in contexts]

    def continued(self, contexts: Sequence[list[int]], most: int, temperature: float = 0.0, seed: int = 0) -> list[str]:
        """A continuation of each context, without special tokens; temperature 0 takes the most probable tokens.

        Args:
            contexts: token ids; none with pictures.
            most: largest number of tokens of a continuation.
        """
        from rewards.judges.local import Gumbel

        device, found = self.network.device, []
        padding = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        for start in range(0, len(contexts), self.batch_size):
            chunk = contexts[start : start + self.batch_size]
            width = max(map(len, chunk))
            ids = torch.tensor([[padding] * (width - len(row)) + row for row in chunk], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chunk], device=device)
            drawn = []
            if temperature > 0:
                # each batch has its own stream of random numbers
                generator = torch.Generator(device).manual_seed(seed * 2**20 + start)
                drawn = [Gumbel(temperature, generator)]
            with torch.no_grad():
                tokens = self.network.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=most,
                    logits_processor=drawn,
                    pad_token_id=padding,
                )
            found += self.tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
        return list(found)

    def log_probs(self, contexts: Sequence[Context], texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """[N, A] log-probabilities of the texts' tokens after their contexts, padded on the right, and their mask."""
        rows = [log_probs.gather(-1, text[:, None])[:, 0] for log_probs, text in self.distributions(contexts, texts)]
        width = max(map(len, rows))
        values = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
        return values, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def refuse_pictures(name: str, model: CausalModel) -> None:
    """Raise RewardError where the model in training sees pictures, as a frozen model that reads texts would not."""
    if model.sees_pictures:
        raise RewardError(
            f"reward '{name}': its frozen model reads texts alone, and model.images shows pictures; "
            "rewards that ask the model in training see them"
        )


class AsksModel:
    """A reward that asks a language model: a frozen one, or by default the one that is trained.

    Args:
        model: folder or hub name of a frozen one.
    """

    name: str

    def __init__(self, model: str | None = None) -> None:
        self.frozen = model is not None
        self._model = None if model is None else CausalModel.load(model)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, where no frozen one was named.

        Raises:
            RewardError: prompts show pictures, which a frozen model would not see.
        """
        if self.frozen:
            refuse_pictures(self.name, model)
        else:
            self._model = model

    @property
    def model(self) -> CausalModel:
        if self._model is None:
            raise RewardError(
                f"reward '{self.name}' asks the language model that is trained, and there is none here; "
                "`model: PATH` names a frozen one"
            )
        return self._model
