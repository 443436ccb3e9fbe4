"""HPSv3 (arXiv 2508.03789): Qwen2-VL reads the picture, an instruction and the prompt; a head scores what it makes of a
token of its own at the end.

The published checkpoint's tensors go into transformers' Qwen2-VL. As in the authors' code all tokens are numbered one
after the other; where a patch stands in the picture is known to the picture tower only.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec
from rewards.vision import Dtype, load_weights, pick_device

PIXELS = 448 * 448  # about which a picture is resized to, its shape kept
REWARD_TOKEN = "<|Reward|>"
INSTRUCTION = Path(__file__).parent / "hpsv3.txt"
_PLACES = (  # in the checkpoint and in transformers' files of today -> in transformers' model
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("model.", "language_model."),
)


class Network(nn.Module):
    """Qwen2-VL and the head on top.

    Args:
        tensors: of the checkpoint.
        base: folder or hub name of the Qwen2-VL that was trained further, for its configuration.
    """

    def __init__(self, tensors: Mapping[str, Tensor], base: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, Qwen2VLModel

        super().__init__()
        backbone = {new: tensor for name, tensor in tensors.items() if (new := _place(name)) is not None}
        config = AutoConfig.from_pretrained(base)
        config.text_config.vocab_size = backbone["language_model.embed_tokens.weight"].shape[0]
        self.backbone, found = Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=backbone, dtype=dtype, output_loading_info=True
        )
        wrong = [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]
        if wrong:
            raise ValueError(
                f"these are not HPSv3's weights for '{base}': {len(wrong)} tensors differ, e.g. {wrong[0]}"
            )
        self.head = nn.Sequential(
            nn.Linear(config.text_config.hidden_size, 1024),
            nn.ReLU(),
            nn.Identity(),  # dropout in training
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )
        head = {name.removeprefix("rm_head."): t.float() for name, t in tensors.items() if name.startswith("rm_head.")}
        self.head.load_state_dict(head)

    def forward(self, tokens: Tensor, mask: Tensor, patches: Tensor, grid: Tensor, reward_token: int) -> Tensor:
        """[B, 2] mean and spread of what people would say.

        Args:
            tokens, mask: [B, L], padded on the right.
            patches: [P, D] of all pictures.
            grid: [B, 3] patches of each in time, height and width.
            reward_token: comes once in each row.
        """
        places = (mask.cumsum(dim=-1) - 1).clamp(min=0).expand(3, -1, -1)
        read = self.backbone(
            input_ids=tokens, attention_mask=mask, position_ids=places, pixel_values=patches, image_grid_thw=grid
        ).last_hidden_state
        return self.head(read[tokens == reward_token].float())


def _place(name: str) -> str | None:
    """transformers' name of a tensor of the checkpoint; None for the heads' tensors."""
    for old, new in _PLACES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


@cache
def load_hpsv3(weights: str, base: str, device: str, dtype: Dtype) -> tuple[Network, Any]:
    """Load network and processor; rewards that name the same ones share them."""
    from tokenizers import AddedToken
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.add_tokens([AddedToken(REWARD_TOKEN, special=True)])
    network = Network(load_weights(weights), base, getattr(torch, dtype))
    network.backbone.to(pick_device(device))
    network.head.to(pick_device(device))
    return network.eval().requires_grad_(False), processor


def read_instruction(file: Path) -> str:
    """The text of a file, or of the constants in the authors' Python file, which is not run."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    constants: dict[str, str] = {}
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                constants[name] = value
    try:
        return constants["INSTRUCTION"].replace("{text_prompt}", "{prompt}") + constants["prompt_with_special_token"]
    except KeyError as error:
        raise ValueError(f"hpsv3: {file} has no {error}; give hpsv3/dataset/data_collator_qwen.py") from error


class HPSv3:
    """HPSv3: what people prefer, by a Qwen2-VL of 7B; not bounded, better is higher (arXiv 2508.03789).

    Part `spread`: the head's second output, the authors' measure of how unsure it is.

    Args:
        instruction: what the model is told: a text file with {prompt} and, at the end, the token <|Reward|>; or the
            authors' hpsv3/dataset/data_collator_qwen.py, whose wording the weights were trained on and which their
            scores need. Default: the same criteria in our words.
        weights: the published checkpoint.
        base: folder or hub name of the Qwen2-VL below it, for configuration, tokenizer and chat template.
        batch_size, device, dtype: of the model; the head is float32 always.
    """

    name = "hpsv3"
    spec = Spec(differentiable=True)

    def __init__(
        self,
        instruction: str | None = None,
        weights: str = "MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        self.instruction = read_instruction(Path(instruction or INSTRUCTION))
        if "{prompt}" not in self.instruction or self.instruction.count(REWARD_TOKEN) != 1:
            raise ValueError(f"hpsv3: {instruction} must hold {{prompt}}, and the token {REWARD_TOKEN} once")
        self.network, self.processor = load_hpsv3(weights, base, device, dtype)
        self.batch_size, self.device, self.dtype = batch_size, pick_device(device), getattr(torch, dtype)

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        batches = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            # resized by PIL in 8 bits, as in training
            pixels = [self._resized(image) for image in samples[rows]]
            with torch.no_grad():
                batches.append(self._scores(pixels, prompts[rows]))
        scores = Scores.cat(batches)
        return Scores(scores.value.cpu(), {name: part.cpu() for name, part in scores.parts.items()})

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """As `DifferentiableReward.score_pixels`; the resize is torch's, not PIL's in 8 bits."""
        size = self._size(*pixels.shape[-2:])
        pixels = pixels.to(self.device, torch.float32)
        if size != pixels.shape[-2:]:
            pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
        scores = self._scores(list(pixels), prompts)
        return Scores(scores.value, {name: part.detach() for name, part in scores.parts.items()})

    def _scores(self, pixels: Sequence[Tensor], prompts: Sequence[str]) -> Scores:
        """Scores of pictures [3, H, W] in [0, 1] of the model's sizes."""
        patches, grids = zip(*(self._patches(picture.to(self.device)) for picture in pixels), strict=True)
        merged = self.processor.image_processor.merge_size**2
        texts = []
        for prompt, (_, rows, columns) in zip(prompts, grids, strict=True):
            text = self.instruction.replace("{prompt}", prompt)
            content = [{"type": "image"}, {"type": "text", "text": text}]
            chat = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            texts.append(
                chat.replace(self.processor.image_token, self.processor.image_token * (rows * columns // merged))
            )
        inputs = self.processor.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        reward_token = self.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        made = self.network(
            inputs["input_ids"],
            inputs["attention_mask"],
            torch.cat(patches).to(self.dtype),
            torch.tensor(grids, device=self.device),
            reward_token,
        )
        return Scores(made[:, 0], {"spread": made[:, 1]})

    def _patches(self, picture: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """[P, D] normalised patches of a picture [3, H, W], those merged later side by side; and their grid.

        A picture counts as a film of `temporal_patch_size` equal frames.
        """
        p = self.processor.image_processor
        mean, std = (torch.tensor(own, device=picture.device)[:, None, None] for own in (p.image_mean, p.image_std))
        side, merge = p.patch_size, p.merge_size
        rows, columns = picture.shape[1] // side, picture.shape[2] // side
        frames = ((picture - mean) / std).expand(p.temporal_patch_size, -1, -1, -1)
        split = frames.unflatten(3, (columns // merge, merge, side)).unflatten(2, (rows // merge, merge, side))
        # frame, colour, rows, row in merge, y, columns, column in merge, x
        patches = split.permute(2, 5, 3, 6, 1, 0, 4, 7).flatten(4).flatten(0, 3)
        return patches, (1, rows, columns)

    def _resized(self, image: Image) -> Tensor:
        height, width = self._size(image.height, image.width)
        small = image.convert("RGB").resize((width, height), Resampling.BICUBIC)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of about `PIXELS` and nearly the same shape, in whole merged patches."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        side = self.processor.image_processor.patch_size * self.processor.image_processor.merge_size
        return smart_resize(height, width, side, PIXELS, PIXELS)
