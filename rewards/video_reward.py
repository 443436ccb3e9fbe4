"""VideoReward (arXiv 2501.13918, github.com/KwaiVGI/VideoAlign): a Qwen2-VL reads frames of a video, an instruction and
the prompt; a head scores what it makes of three tokens, one for each respect."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.qwen import RESIZE, Reader, resized, smart_size, without_lora
from rewards.vision import Dtype, load_weights, pick_device, weights_file, without_prefix
from rewards.wording import WORDINGS, wording

TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
RESPECTS = {"visual": "VQ", "motion": "MQ", "alignment": "TA"}
INSTRUCTION = WORDINGS / "video_reward.txt"
FEWEST, MOST = 4, 768  # frames, unless the video has fewer
LEAST_PIXELS = 128 * RESIZE * RESIZE  # of a frame


@cache
def load_video_reward(weights: str, config: str, base: str, device: str, dtype: Dtype) -> tuple[Reader, Tensor, Any]:
    """Network, head [1 or 3, width], and the authors' settings; rewards that name the same ones share them."""
    settings = json.loads(weights_file(config).read_text(encoding="utf-8"))
    lora = settings["peft_lora_config"]
    tensors = without_lora(load_weights(weights), lora["lora_alpha"] / lora["lora_r"])
    reader = Reader(tensors, base, TOKENS, getattr(torch, dtype), "VideoReward")
    reader.to(pick_device(device)).eval().requires_grad_(False)
    return reader, without_prefix(tensors, "rm_head.")["weight"].to(pick_device(device), torch.float32), settings


class VideoReward:
    """VideoReward: visual quality, motion and alignment of a video, by a Qwen2-VL of 2B (arXiv 2501.13918).

    Each respect is brought to mean 0 and deviation 1 over the authors' videos; the value is their weighted sum. Parts:
    `visual`, `motion`, `alignment`.

    Args:
        weigh: weights of the three in the sum.
        video_fps: frames a second of the videos that are scored; the model sees two a second.
        instruction: the model's instruction: a text file with {prompt} and the tokens <|VQ_reward|>, <|MQ_reward|> and
            <|TA_reward|>, in this order; or the authors' prompt_template.py, whose wording the weights were trained on
            and which their scores need. Default: the same criteria in our words.
        weights: the published checkpoint, a LoRA with what it was put on.
        config: the model_config.json beside it.
        base: folder or hub name of the Qwen2-VL below it, for configuration, tokenizer and chat template.
        batch_size: videos a call of the model.
        device, dtype: of the model; the head is float32 always.
    """

    name = "video_reward"
    spec = Spec(frozenset({"frames", "prompt"}), differentiable=True)

    def __init__(
        self,
        weigh: tuple[float, float, float] = (1.0, 1.0, 1.0),
        video_fps: float = 16.0,
        instruction: str | None = None,
        weights: str = "KwaiVGI/VideoReward/checkpoint-11352/model.pth",
        config: str = "KwaiVGI/VideoReward/model_config.json",
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        batch_size: int = 1,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        if video_fps <= 0 or batch_size < 1:
            raise ValueError(f"video_reward: video_fps {video_fps} and batch_size {batch_size} must be positive")
        names = ["DETAILED_PROMPT_WITH_SPECIAL_TOKEN"]
        file = Path(instruction or INSTRUCTION)
        self.instruction = wording(self.name, [file], names, "the authors' prompt_template.py", TOKENS)
        self.reader, self.head, self.settings = load_video_reward(weights, config, base, device, dtype)
        self.weigh, self.video_fps, self.batch_size = weigh, video_fps, batch_size

    def __call__(self, samples: Sequence[Sequence[Image]], prompts: Sequence[str], metadata: Metadata) -> Scores:
        batches = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            with torch.no_grad():
                batches.append(
                    self.of_films([self.film(video).float() / 255 for video in samples[rows]], prompts[rows])
                )
        scores = Scores.cat(batches)
        return Scores(scores.value.cpu(), {name: values.cpu() for name, values in scores.parts.items()})

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; for videos [B, 3, F, H, W]; frames are not rounded to 8 bits."""
        films = pixels.to(self.reader.device, torch.float32)[:, :, self.chosen(pixels.shape[2])].transpose(1, 2)
        return self.of_films([self._sized(film) for film in films], prompts)

    def film(self, video: Sequence[Image]) -> Tensor:
        """The frames of a video that the model sees, in its size: uint8 [F, 3, H, W]."""
        frames = [np.array(video[number].convert("RGB")) for number in self.chosen(len(video))]
        film = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
        return (self._sized(film) * 255).round().clamp(0, 255).to(torch.uint8)

    def chosen(self, count: int) -> list[int]:
        """The frames that the model sees, of so many: an even number, spread from the first to the last."""
        if count < 2:
            raise RewardError("video_reward: a video of one frame has no motion to judge")
        wanted = min(
            max(count / self.video_fps * self.settings["data_config"]["fps"], FEWEST), min(MOST, count) // 2 * 2
        )
        numbers = torch.linspace(0, count - 1, min(round(wanted / 2) * 2, count))
        return [int(number) for number in numbers.round()]

    def _sized(self, film: Tensor) -> Tensor:
        """Frames [F, 3, H, W] of the model's size."""
        height, width = film.shape[-2:]
        most = self.settings["data_config"]["max_frame_pixels"]
        return resized(film, smart_size(height, width, RESIZE, LEAST_PIXELS, most))

    def of_films(self, films: Sequence[Tensor], prompts: Sequence[str]) -> Scores:
        """Scores of films [F, 3, H, W] in [0, 1] of the model's sizes, with the gradient."""
        texts = [self.instruction.replace("{prompt}", prompt) for prompt in prompts]
        read = self.reader([[film] for film in films], texts)
        # one output for all three tokens, or one each
        raw = (read * self.head).sum(dim=-1)
        known = self.settings["inference_config"]
        mean, deviation = (
            torch.tensor([known[f"{short}_{what}"] for short in RESPECTS.values()]).to(raw) for what in ("mean", "std")
        )
        raw = (raw - mean) / deviation
        aspects = dict(zip(RESPECTS, raw.detach().T, strict=True))
        return Scores(raw @ torch.tensor(self.weigh).to(raw), aspects)
