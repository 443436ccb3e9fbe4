"""Training VideoReward on votes on videos: Bradley and Terry's model on the sum of its three aspects.

The authors train their LoRA on verdicts on each aspect, ties included (arXiv 2501.13918, section 3); a vote here says
which video is better as a whole. A new LoRA of the published one's size is trained on the merged weights, with the
head, and is merged again when it is saved.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn

from flowalign.algorithms.matching.files import opened
from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.scorer import PreferenceModel
from rewards.qwen import without_lora
from rewards.video_reward import VideoReward, load_video_reward

WEIGHTS, SETTINGS = ("model.safetensors", "model.pth"), "model_config.json"
LAYERS = r"language_model\..*_proj"


def files_of(folder: Path) -> dict[str, str]:
    """The `weights` and `config` of a VideoReward in a folder; {} if there is none: the published ones."""
    if not (folder / SETTINGS).is_file():
        return {}
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), folder / WEIGHTS[0])
    return {"weights": str(weights), "config": str(folder / SETTINGS)}


class VideoScorer(PreferenceModel):
    """A VideoReward in training.

    Args:
        files: paths `weights` and `config`; default the published ones.
        base: folder or hub name of the Qwen2-VL below it; default the published one's.
        settings: further settings of `VideoReward`.
    """

    def __init__(self, files: Mapping[str, Any], base: str | None = None, **settings: object) -> None:
        # the cached network must not be shared, since it is trained here
        load_video_reward.cache_clear()
        try:
            self.reward = VideoReward(**{**files, **({} if base is None else {"base": base}), **settings})
        except (OSError, ValueError) as error:
            raise ConfigError(f"no VideoReward to train: {' '.join(str(error).split())[:300]}") from error
        load_video_reward.cache_clear()
        size = self.reward.settings["peft_lora_config"]
        self.scale = size["lora_alpha"] / size["lora_r"]
        lora = LoraConfig(r=size["lora_r"], lora_alpha=size["lora_alpha"], target_modules=LAYERS)
        inject_adapter_in_model(lora, self.reward.reader.backbone)
        self.network = nn.ModuleDict({"reader": self.reward.reader})
        self.network.head = self.reward.head = nn.Parameter(self.reward.head)
        for name, parameter in self.network.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
        self.films: dict[str, Tensor] = {}

    def film(self, file: str) -> Tensor:
        """Frames [F, 3, H, W] of a video, as many and in the size that the model sees."""
        if file not in self.films:
            video = opened(file)
            if not isinstance(video, list):
                raise ConfigError(f"{file}: VideoReward is trained on videos, and this is a picture")
            self.films[file] = self.reward.film(video)
        return self.films[file].float() / 255

    def margins(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        chosen, rejected = (
            torch.cat([self.reward.of_films([self.film(pairs.metadata[i][key])], [pairs.texts[i]]).value for i in rows])
            for key in Preferences.samples
        )
        return (chosen - rejected)[None]

    def save(self, folder: Path) -> None:
        """Write the weights with the LoRA merged, and the settings, as `VideoReward` reads them."""
        merged = without_lora(self.reward.reader.backbone.state_dict(), self.scale)
        tensors = {name if name.startswith("visual.") else f"model.{name}": value for name, value in merged.items()}
        tensors["rm_head.weight"] = self.network.head.detach()
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, folder / WEIGHTS[0])
        (folder / SETTINGS).write_text(json.dumps(self.reward.settings, indent=2), encoding="utf-8")
