"""A Qwen-VL that reads pictures or a video and then a text, for heads that score what it makes of marked tokens.

What HPSv3 and HPSv3++, EditReward and VideoReward have in common: the published tensors go into transformers'
Qwen2-VL, Qwen2.5-VL or Qwen3-VL. As in the authors' code the tokens of the first two are numbered one after the other;
where a patch stands in the picture is known to their picture tower only. Qwen3-VL knows it everywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Metadata, Scores
from rewards.hub import hub

PIXELS = 448 * 448  # about which pictures are resized to, their shape kept
RESIZE = 28  # the authors' multiple of a side, Qwen2's merged patch
MODELS = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}
PLACES = (  # in checkpoints and in transformers' files of today -> in transformers' model
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("model.", "language_model."),
)


class Reader(nn.Module):
    """A Qwen-VL and its processor.

    Args:
        tensors: tensors of a checkpoint; heads' tensors are left alone.
        base: folder or hub name of the Qwen-VL that was trained further, for its configuration and processor.
        markers: tokens that were added to its vocabulary, in this order; each stands once in a text.
        title: whose weights they are, for messages.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], base: str, markers: Sequence[str], dtype: torch.dtype, title: str
    ) -> None:
        import transformers
        from tokenizers import AddedToken

        super().__init__()
        self.processor = transformers.AutoProcessor.from_pretrained(**hub(base))
        self.processor.tokenizer.padding_side = "right"
        self.processor.tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers])
        self.markers = self.processor.tokenizer.convert_tokens_to_ids(list(markers))
        backbone = {new: tensor for name, tensor in tensors.items() if (new := place(name)) is not None}
        config = transformers.AutoConfig.from_pretrained(**hub(base))
        if config.model_type not in MODELS:
            raise ValueError(f"{title}: '{base}' is a {config.model_type}; it takes one of {', '.join(MODELS)}")
        config.text_config.vocab_size = backbone["language_model.embed_tokens.weight"].shape[0]
        self.backbone, report = getattr(transformers, MODELS[config.model_type]).from_pretrained(
            None, config=config, state_dict=backbone, dtype=dtype, output_loading_info=True
        )
        wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        if wrong:
            raise ValueError(
                f"these are not {title}'s weights for '{base}': {len(wrong)} tensors differ, e.g. {wrong[0]}"
            )
        self.width: int = config.text_config.hidden_size
        self.side: int = self.processor.image_processor.patch_size * self.processor.image_processor.merge_size
        """Pixels of a merged patch, of which every side of a picture is a multiple."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.backbone.device
        return device

    def forward(self, shown: Sequence[Sequence[Tensor]], texts: Sequence[str]) -> Tensor:
        """[B, markers, width] float32: the last states at the marked tokens.

        Args:
            shown: pictures [3, H, W] or a video [F, 3, H, W] of each sample, in [0, 1], of the model's sizes.
            texts: texts below them, with each marker once.
        """
        films = [frames.to(self.device) for row in shown for frames in row]
        kind = "video" if films[0].ndim == 4 else "image"
        patches, grids = zip(*(self._patches(film if kind == "video" else film[None]) for film in films), strict=True)
        counts = iter([t * h * w // self.processor.image_processor.merge_size**2 for t, h, w in grids])
        token = self.processor.video_token if kind == "video" else self.processor.image_token
        chats = []
        for row, text in zip(shown, texts, strict=True):
            content = [{"type": kind} for _ in row] + [{"type": "text", "text": text}]
            chat = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            begin, *rest = chat.split(token)
            chats.append(begin + "".join(token * next(counts) + piece for piece in rest))
        inputs = self.processor.tokenizer(chats, padding=True, return_tensors="pt").to(self.device)
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        seen = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[kind]
        given = dict(
            zip(
                seen, (torch.cat(patches).to(self.backbone.dtype), torch.tensor(grids, device=self.device)), strict=True
            )
        )
        if self.backbone.config.model_type == "qwen3_vl":
            is_seen = tokens == self.processor.tokenizer.convert_tokens_to_ids(token)
            given["mm_token_type_ids"] = is_seen.int() * (2 if kind == "video" else 1)
        else:
            given["position_ids"] = (mask.cumsum(dim=-1) - 1).clamp(min=0).expand(3, -1, -1)
        read = self.backbone(input_ids=tokens, attention_mask=mask, **given).last_hidden_state
        return torch.stack([read[tokens == marker] for marker in self.markers], dim=1).float()

    def _patches(self, film: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """[P, D] normalised patches of frames [F, 3, H, W], those merged later side by side; and their grid.

        Patches are `temporal_patch_size` frames deep, and what lacks is made up with the last frame: a picture counts
        as a film of equal frames.
        """
        p = self.processor.image_processor
        mean, std = (torch.tensor(rgb, device=film.device)[:, None, None] for rgb in (p.image_mean, p.image_std))
        side, merge, depth = p.patch_size, p.merge_size, p.temporal_patch_size
        frames = torch.cat([film, film[-1:].expand(-len(film) % depth, -1, -1, -1)])
        frames = (frames - mean) / std
        times, rows, columns = len(frames) // depth, film.shape[2] // side, film.shape[3] // side
        split = frames.unflatten(3, (columns // merge, merge, side)).unflatten(2, (rows // merge, merge, side))
        # time, frame, colour, rows, row in merge, y, columns, column in merge, x
        patches = split.unflatten(0, (times, depth)).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(0, 4)
        return patches, (times, rows, columns)

    def sized(self, images: Sequence[Image]) -> list[Tensor]:
        """[3, H, W] in [0, 1] of pictures, about `PIXELS` large; resized in 8 bits, as in training."""
        pictures = []
        for image in images:
            height, width = smart_size(image.height, image.width, RESIZE, PIXELS, PIXELS)
            small = image.convert("RGB").resize((width, height), Resampling.BICUBIC)
            picture = torch.from_numpy(np.array(small)).permute(2, 0, 1)
            # in whole numbers, as torchvision does it for transformers
            pictures.append(resized(picture[None], self._whole(height, width))[0].float() / 255)
        return pictures

    def sized_pixels(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] of the same sizes, with the gradient; torch resizes, not PIL in 8 bits."""
        height, width = pixels.shape[-2:]
        size = self._whole(*smart_size(height, width, RESIZE, PIXELS, PIXELS))
        return resized(pixels.to(self.device, torch.float32), size)

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        """Sides in whole merged patches, for a Qwen3-VL, whose merged patches are larger than `RESIZE`."""
        bounds = self.processor.image_processor.size
        return smart_size(height, width, self.side, bounds["shortest_edge"], bounds["longest_edge"])


class QwenReward(ABC):
    """Base of rewards of pictures that a head on such a reader gives.

    Args:
        batch_size: pictures a call of the model.
    """

    reader: Reader

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.batch_size = batch_size

    @abstractmethod
    def model_scores(self, pictures: Sequence[Tensor], prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Scores of pictures [3, H, W] in [0, 1] of the model's sizes."""

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        batches = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            with torch.no_grad():
                batches.append(self.model_scores(self.reader.sized(samples[rows]), prompts[rows], metadata[rows]))
        scores = Scores.cat(batches)
        return Scores(scores.value.cpu(), {name: values.cpu() for name, values in scores.parts.items()})

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; the resize is torch's, not PIL's in 8 bits."""
        scores = self.model_scores(list(self.reader.sized_pixels(pixels)), prompts, metadata)
        return Scores(scores.value, {name: values.detach() for name, values in scores.parts.items()})


def place(name: str) -> str | None:
    """transformers' name of a tensor of a checkpoint; None for the heads' tensors."""
    for old, new in PLACES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def without_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The tensors of a model that peft had wrapped, its LoRA merged: W + scale B A.

    Args:
        scale: alpha / rank.
    """
    plain = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    merged = {}
    for name, tensor in plain.items():
        layer, base, end = name.partition(".base_layer")
        if f"{layer}.lora_B.default.weight" in plain and end == ".weight":
            up, down = (plain[f"{layer}.lora_{factor}.default.weight"].float() for factor in "BA")
            tensor = (tensor.float() + scale * up @ down).to(tensor.dtype)
        if ".lora_" not in name:
            merged[layer + end if base else name] = tensor
    return merged


def ranking_head(width: int) -> nn.Sequential:
    """The head that HPSv3 and its kin have: mean and spread of what people would say."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Identity(),  # dropout in training
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, 3, H, W] brought to a size by torch, with the gradient."""
    if size == pixels.shape[-2:]:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)


def smart_size(height: int, width: int, side: int, low: int, high: int) -> tuple[int, int]:
    """Height and width of nearly the same shape, in multiples of `side`, with from `low` to about `high` pixels."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    return smart_resize(height, width, side, low, high)
