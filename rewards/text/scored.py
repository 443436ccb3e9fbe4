"""Reward models of texts with a head of numbers: any sequence-classification model of transformers, as the hub has
them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.hub import hub, reason
from rewards.vision import pick_device

Precision = Literal["float32", "bfloat16", "float16"]


class RewardModel:
    """A network that gives a text after its prompt one number or several, and its tokenizer.

    With a chat template a prompt is a user's turn and the text the assistant's; without one the text follows its
    prompt. A reference text, as POLAR's models want it (arXiv 2507.05197), comes before both.

    Args:
        network: a sequence-classification model.
        tokenizer: its tokenizer.
        most_tokens: texts are cut on the left beyond this; default the model's own context.
    """

    def __init__(
        self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most_tokens: int | None = None
    ) -> None:
        self.network, self.tokenizer = network, tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # the head reads the last token that is no padding
        network.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
        context = getattr(network.config, "max_position_embeddings", None)
        self.most_tokens = most_tokens or context

    @classmethod
    def load(
        cls, path: str, dtype: Precision = "float32", device: str = "auto", outputs: int | None = None
    ) -> "RewardModel":
        """A model from a folder or the hub; of another kind of model with a new head of `outputs` numbers.

        Raises:
            ValueError: there is none.
        """
        head = {} if outputs is None else {"num_labels": outputs}
        try:
            network, loading = AutoModelForSequenceClassification.from_pretrained(
                **hub(path), dtype=getattr(torch, dtype), output_loading_info=True, **head
            )
            tokenizer = AutoTokenizer.from_pretrained(**hub(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"no reward model of texts at '{path}': {reason(error)}") from error
        if outputs is None and loading["missing_keys"]:
            raise ValueError(
                f"'{path}' has no head that scores texts; `flowalign train-reward VOTES --texts --model {path}` "
                "gives it one"
            )
        return cls(network.to(pick_device(device)).eval(), tokenizer)

    def outputs(self, texts: Sequence[str], prompts: Sequence[str], references: Sequence[str] | None = None) -> Tensor:
        """[N, outputs] float32 of texts after their prompts."""
        references = [""] * len(texts) if references is None else references
        joined = [self._joined(*row) for row in zip(prompts, texts, references, strict=True)]
        inputs = self.tokenizer(
            joined,
            padding=True,
            truncation=self.most_tokens is not None,
            max_length=self.most_tokens,
            add_special_tokens=self.tokenizer.chat_template is None,
            return_tensors="pt",
        ).to(self.network.device)
        inputs.pop("token_type_ids", None)
        numbers: Tensor = self.network(**inputs).logits
        return numbers.float()

    def _joined(self, prompt: str, text: str, reference: str) -> str:
        if self.tokenizer.chat_template is None:
            # a text that ends is a text: without its end token the head would read any of its last tokens
            return f"{reference}{prompt}{text}{self.tokenizer.eos_token or ''}"
        asked = prompt if not reference else f"{prompt}\n\nReference:\n{reference}"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False))


class TextScore:
    """The number of a reward model of texts: a sequence-classification folder, or one of the hub.

    `flowalign train-reward VOTES --model MODEL` trains one.

    Args:
        model: folder or hub name.
        weights: weights of the model's numbers where it has several, as of models trained on attributes.
        reference: key of the metadata with the reference text that POLAR's kind of model compares with.
        batch_size: texts a network call.
    """

    name = "text_score"

    def __init__(
        self,
        model: str,
        weights: Sequence[float] | None = None,
        reference: str | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Precision = "float32",
    ) -> None:
        self.model = RewardModel.load(model, dtype, device)
        self.model.network.requires_grad_(False)
        outputs = int(self.model.network.config.num_labels)
        if (1 if weights is None else len(weights)) != outputs:
            raise ValueError(f"text_score: '{model}' gives {outputs} numbers a text; weights: one for each")
        self.weights, self.reference, self.batch_size = (
            torch.tensor(weights or [1.0], dtype=torch.float32),
            reference,
            batch_size,
        )
        self.spec = Spec(frozenset({"text", "prompt"} | (set() if reference is None else {"metadata"})))

    @torch.no_grad()
    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        references = (
            [""] * len(samples) if self.reference is None else self._references(self.reference, prompts, metadata)
        )
        rows = [slice(start, start + self.batch_size) for start in range(0, len(samples), self.batch_size)]
        numbers = torch.cat([self.model.outputs(samples[r], prompts[r], references[r]).cpu() for r in rows])
        parts = {f"output_{i}": numbers[:, i] for i in range(numbers.shape[1])} if numbers.shape[1] > 1 else {}
        return Scores(numbers @ self.weights, parts)

    def _references(self, key: str, prompts: Sequence[str], metadata: Metadata) -> list[str]:
        for prompt, record in zip(prompts, metadata, strict=True):
            if key not in record:
                raise RewardError(f"reward 'text_score': the prompt {prompt!r} has no '{key}' to compare with")
        return [str(record[key]) for record in metadata]


def preferred(first: Tensor, second: Tensor) -> Tensor:
    """[N] log-odds that `first` is preferred, of embeddings [N, 2 K] (GPM, arXiv 2410.02197): v_1^T R v_2.

    R turns each pair of coordinates by a right angle, so that the log-odds change their sign with the order, and
    preferences may go in a circle.
    """
    a, b = first.unflatten(-1, (-1, 2)), second.unflatten(-1, (-1, 2))
    return (a[..., 1] * b[..., 0] - a[..., 0] * b[..., 1]).sum(-1)


class TextPreference:
    """A comparison by embeddings of both texts, which may prefer in circles (GPM, arXiv 2410.02197).

    `flowalign train-reward VOTES --model MODEL --loss general` trains one. `win_rate` makes a reward of it.

    Args:
        model: folder or hub name of a sequence-classification model with an even number of outputs.
        batch_size: texts a network call.
    """

    name = "text_preference"
    spec = Spec(frozenset({"text", "prompt"}), "pairwise")

    def __init__(self, model: str, batch_size: int = 32, device: str = "auto", dtype: Precision = "float32") -> None:
        self.model = RewardModel.load(model, dtype, device)
        if self.model.network.config.num_labels % 2:
            raise ValueError(
                f"text_preference: '{model}' gives an odd number of outputs; text_score takes models of one"
            )
        self.batch_size = batch_size

    @torch.no_grad()
    def compare(
        self, first: Sequence[str], second: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> Scores:
        """The probability that `first` is better."""
        rows = [slice(start, start + self.batch_size) for start in range(0, len(first), self.batch_size)]
        odds = [
            preferred(self.model.outputs(first[r], prompts[r]), self.model.outputs(second[r], prompts[r])) for r in rows
        ]
        return Scores(torch.cat(odds).sigmoid().cpu())


def saved(model: RewardModel, folder: Path) -> None:
    """Write what `RewardModel.load` and transformers load."""
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
