"""Networks that give a text after its prompt one number or several: sequence-classification models of transformers, and
image-text-to-text models with a head of their own, for prompts that show pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import cached_file

from rewards.hub import hub, reason
from rewards.vision import pick_device

Precision = Literal["float32", "bfloat16", "float16"]
HEAD = "score_head.safetensors"
"""File of the head, beside an image-text-to-text model."""


class RewardModel:
    """A network that gives a text after its prompt one number or several, and its tokenizer.

    With a chat template a prompt is a user's turn and the text the assistant's; without one the text follows its
    prompt. A reference text, as POLAR's models want it (arXiv 2507.05197), comes before both.

    Args:
        network: a sequence-classification model.
        tokenizer: its tokenizer.
        most_tokens: texts are cut on the left beyond this; default the model's own context.
    """

    sees_pictures = False
    network: PreTrainedModel

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
        if sees_pictures(path):
            return PictureRewardModel.load(path, dtype, device, outputs)
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

    @property
    def numbers(self) -> int:
        """How many numbers a text gets."""
        return int(self.network.config.num_labels)

    def outputs(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        references: Sequence[str] | None = None,
        pictures: Sequence[Sequence[Image]] | None = None,
    ) -> Tensor:
        """[N, outputs] float32 of texts after their prompts; `pictures` are for models that see them."""
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
        scores: Tensor = self.network(**inputs).logits
        return scores.float()

    def _joined(self, prompt: str, text: str, reference: str) -> str:
        if self.tokenizer.chat_template is None:
            # a text that ends is a text: without its end token the head would read any of its last tokens
            return f"{reference}{prompt}{text}{self.tokenizer.eos_token or ''}"
        asked = prompt if not reference else f"{prompt}\n\nReference:\n{reference}"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False))

    def save(self, folder: Path) -> None:
        """Write what `load` and transformers load."""
        self.network.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class PicturedNetwork(nn.Module):
    """An image-text-to-text model with a head on the mean of its last layer's states over all tokens, those of pictures
    included (IXC-2.5-Reward, arXiv 2501.12368, sec. 3)."""

    def __init__(self, model: PreTrainedModel, outputs: int) -> None:
        super().__init__()
        text = model.config.get_text_config()
        self.model, self.config = model, model.config
        self.head = nn.Linear(text.hidden_size, outputs, bias=False, device=model.device)
        nn.init.normal_(self.head.weight, std=text.initializer_range)
        # the vision encoder and its projector stay as they are, as in the paper
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)

    def forward(self, **inputs: Tensor) -> Tensor:
        """[N, outputs] float32 of a processor's inputs."""
        states = self.model(**inputs, logits_to_keep=1, use_cache=False, output_hidden_states=True).hidden_states[-1]
        mask = inputs["attention_mask"][..., None].float()
        scores: Tensor = self.head((states.float() * mask).sum(1) / mask.sum(1))
        return scores


class PictureRewardModel(RewardModel):
    """A reward model of texts whose prompts may show pictures, several for the frames of a video.

    A prompt is a user's turn, its pictures before its text; the scored text is the assistant's.
    """

    sees_pictures = True
    network: PicturedNetwork

    def __init__(self, network: PicturedNetwork, processor: ProcessorMixin) -> None:
        self.network, self.processor = network, processor
        if processor.chat_template is None:
            raise ValueError("its processor has no chat template to show pictures by")

    @classmethod
    def load(
        cls, path: str, dtype: Precision = "float32", device: str = "auto", outputs: int | None = None
    ) -> "PictureRewardModel":
        """A model with its head from a folder; of an image-text-to-text model with a new head of `outputs` numbers."""
        named = hub(path)
        file = cached_file(
            named["pretrained_model_name_or_path"],
            HEAD,
            revision=named.get("revision"),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        saved = None if file is None else load_file(file)["weight"]
        count = outputs if outputs is not None or saved is None else len(saved)
        if count is None:
            raise ValueError(
                f"'{path}' has no head that scores texts; `flowalign train-reward VOTES --texts --model {path}` "
                "gives it one"
            )
        try:
            network = AutoModelForImageTextToText.from_pretrained(**hub(path), dtype=getattr(torch, dtype))
            processor = AutoProcessor.from_pretrained(**hub(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"no reward model of texts at '{path}': {reason(error)}") from error
        scored = PicturedNetwork(network.to(pick_device(device)).eval(), count)
        if saved is not None and len(saved) == count:
            with torch.no_grad():
                scored.head.weight.copy_(saved)
        return cls(scored, processor)

    @property
    def numbers(self) -> int:
        return self.network.head.out_features

    def outputs(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        references: Sequence[str] | None = None,
        pictures: Sequence[Sequence[Image]] | None = None,
    ) -> Tensor:
        shown = pictures or [[] for _ in texts]
        asked = prompts
        if references is not None:
            asked = [f"{p}\n\nReference:\n{r}" if r else p for p, r in zip(prompts, references, strict=True)]
        inputs = self.processor(
            text=[self._turns(*row) for row in zip(asked, texts, map(len, shown), strict=True)],
            images=[list(row) for row in shown] if any(shown) else None,
            padding=True,
            return_tensors="pt",
        )
        device, dtype = self.network.head.weight.device, self.network.model.dtype
        scores: Tensor = self.network(**inputs.to(device, dtype))
        return scores

    def save(self, folder: Path) -> None:
        """Write the model as transformers loads it, and the head beside it."""
        self.network.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        save_file({"weight": self.network.head.weight.detach().contiguous()}, folder / HEAD)

    def _turns(self, prompt: str, text: str, pictures: int) -> str:
        content: list[dict[str, Any]] = [{"type": "image"}] * pictures
        turns = [
            {"role": "user", "content": [*content, {"type": "text", "text": prompt}]},
            {"role": "assistant", "content": [{"type": "text", "text": text}]},
        ]
        return str(self.processor.apply_chat_template(turns, tokenize=False))


def sees_pictures(path: str) -> bool:
    """Whether a folder or hub name is an image-text-to-text model without transformers' own head for scores."""
    try:
        config = AutoConfig.from_pretrained(**hub(path))
    except (OSError, ValueError):
        # loading it says what is wrong
        return False
    named = config.architectures or []
    return hasattr(config, "vision_config") and not any("SequenceClassification" in name for name in named)
