"""VBench's measures of a video that need no judge (arXiv 2311.17982): consistency, flickering and motion.

Its motion smoothness interpolates frames with AMT, which no maintained package has. `linear_smoothness` interpolates by
the mean of the neighbours instead, and cannot be compared with published figures.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.benchmarks.published import Published, lines, located
from rewards import Metadata
from rewards.clip import load_dual_encoder
from rewards.hub import hub
from rewards.vision import pick_device

COMMIT = "45e79ec14e69a2187202c675d2dbce1a71843d53"
LISTS = {
    "subject_consistency": "b6b72ab4799acd7fa9bee99c34b938df0c49ca303a0abf38f17ebe15c8085c49",
    "scene": "87572cdb4b2d3d15bedd63edc5ac0326999fc6182d28494e02d11d41579f0bd5",
    "temporal_flickering": "9dac1e50d27f8a44f9329113183db36b61dfc41393b86fbf3ec5e07391f0cda6",
}
MEASURES = {
    "subject_consistency": ("subject_consistency", "dynamic_degree", "linear_smoothness"),
    "scene": ("background_consistency",),
    "temporal_flickering": ("temporal_flickering",),
}
"""Measures of the videos of each list of prompts."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
Frames = NDArray[np.uint8]
"""[F, H, W, 3]"""


class VBench(Suite):
    """VBench's consistency of subject and background, flickering and dynamic degree, on its prompts, 5 videos each.

    Args:
        prompts: a folder with the authors' subject_consistency.txt, scene.txt and temporal_flickering.txt.
        dino, clip: networks that compare subjects (dino) and backgrounds (clip).
        fps: frames per second of the videos; dynamic degree looks at 8 frames a second.
        device: device of all networks.
    """

    name = "vbench"
    pictures = 5
    videos = True
    headline = ("subject_consistency", "background_consistency", "temporal_flickering", "dynamic_degree")

    def __init__(
        self,
        prompts: str | None = None,
        dino: str = "facebook/dino-vitb16",
        clip: str = "openai/clip-vit-base-patch32",
        fps: int = 8,
        device: str = "auto",
    ) -> None:
        self.folder, self.dino, self.clip, self.fps, self.device = prompts, dino, clip, fps, device

    def prompts(self) -> Prompts:
        texts, metadata = [], []
        for name, digest in LISTS.items():
            path = f"prompts/prompts_per_dimension/{name}.txt"
            file = Published("Vchitect/VBench", COMMIT, path, "Apache-2.0", digest)
            copy = None if self.folder is None else str(Path(self.folder) / f"{name}.txt")
            for line in lines(located(file, copy, "vbench.prompts")):
                texts.append(line)
                metadata.append({"category": name})
        return Prompts(texts, metadata)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        return [
            {measure: self._one(measure, video) for measure in MEASURES[record["category"]]}
            for video, record in zip(samples, metadata, strict=True)
        ]

    def _one(self, measure: str, video: Sequence[Image]) -> float:
        match measure:
            case "subject_consistency":
                return consistency(self._see_subjects(video))
            case "background_consistency":
                return consistency(self._see_scenes(video))
            case "dynamic_degree":
                return float(moves(self._flow, stacked(video)[:: max(1, round(self.fps / 8))]))
            case "temporal_flickering":
                return steadiness(stacked(video))
            case _:
                return linear_smoothness(stacked(video))

    @cached_property
    def _dino(self) -> Any:
        from transformers import AutoModel

        network: Any = AutoModel.from_pretrained(**hub(self.dino))
        return network.to(pick_device(self.device)).eval().requires_grad_(False)

    @torch.no_grad()
    def _see_subjects(self, video: Sequence[Image]) -> Tensor:
        pixels = torch.from_numpy(stacked(video)).permute(0, 3, 1, 2).float() / 255
        # the shorter side to 224, as the authors do for DINO
        scale = 224 / min(pixels.shape[-2:])
        size = [int(side * scale) for side in pixels.shape[-2:]]
        pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False)
        mean, std = (torch.tensor(IMAGENET[name])[:, None, None] for name in ("mean", "std"))
        inputs = ((pixels - mean) / std).to(self._dino.device)
        seen: Tensor = self._dino(pixel_values=inputs, interpolate_pos_encoding=True).last_hidden_state[:, 0]
        return seen

    @torch.no_grad()
    def _see_scenes(self, video: Sequence[Image]) -> Tensor:
        encoder = load_dual_encoder(self.clip, device=self.device)
        return encoder.images(encoder.preprocess.images(video).to(encoder.device, encoder.dtype))

    @cached_property
    def _flow(self) -> Callable[[Tensor, Tensor], Tensor]:
        from torchvision.models.optical_flow import Raft_Large_Weights, raft_large

        # the authors' own weights, of FlyingChairs and FlyingThings3D
        device = pick_device(self.device)
        network = raft_large(weights=Raft_Large_Weights.C_T_V1).to(device).eval()
        return lambda first, second: network(first.to(device), second.to(device), num_flow_updates=20)[-1].cpu()

    def settings(self) -> Mapping[str, Any]:
        return {"dino": self.dino, "clip": self.clip, "fps": self.fps}


def stacked(video: Sequence[Image]) -> Frames:
    """The frames as one array."""
    return np.stack([np.asarray(frame.convert("RGB")) for frame in video])


def consistency(seen: Tensor) -> float:
    """Likeness of frames to the one before and to the first: mean cosine over all but the first, at least 0.

    Args:
        seen: [F, D], an encoder's features of the frames.
    """
    unit = F.normalize(seen.float(), dim=-1)
    before, first = (unit[1:] * unit[:-1]).sum(dim=-1), unit[1:] @ unit[0]
    return float(((before.clamp(min=0) + first.clamp(min=0)) / 2).mean())


def steadiness(frames: Frames) -> float:
    """1 minus the mean difference of neighbouring frames, in [0, 1]."""
    return 1 - float(np.abs(np.diff(frames.astype(np.float64), axis=0)).mean()) / 255


def linear_smoothness(frames: Frames) -> float:
    """1 minus the mean difference of every second frame from the mean of its neighbours, in [0, 1]."""
    values = frames.astype(np.float64)
    between = values[1:-1:2]
    filled = (values[:-2:2] + values[2::2]) / 2
    return 1 - float(np.abs(between - filled).mean()) / 255


@torch.no_grad()
def moves(flow: Callable[[Tensor, Tensor], Tensor], frames: Frames) -> bool:
    """True if a video moves: there are enough pairs of frames whose fastest 5% of pixels go far.

    Args:
        flow: optical flow [1, 2, H, W] in pixels between pictures [1, 3, H, W] in [-1, 1].
    """
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1
    height, width = pixels.shape[-2:]
    far, enough = 6.0 * min(height, width) / 256, round(4 * len(frames) / 16)
    down, across = -height % 8, -width % 8
    padded = F.pad(pixels, (across // 2, across - across // 2, down // 2, down - down // 2), mode="replicate")
    count = 0
    for first, second in zip(padded[:-1, None], padded[1:, None], strict=True):
        speed = flow(first, second)[0].norm(dim=0).flatten()
        fastest = speed.sort(descending=True).values[: int(len(speed) * 0.05)]
        count += bool(fastest.mean() > far)
    return count >= enough
