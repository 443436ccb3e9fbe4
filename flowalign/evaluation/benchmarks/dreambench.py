"""DreamBench (DreamBooth, arXiv 2208.12242): a subject in new places, by likeness to its photographs and the prompt."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.data import Prompts
from flowalign.errors import ConfigError, nearest
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from rewards import Metadata
from rewards.clip import DualEncoder, load_dual_encoder
from rewards.pictures import read_picture

LIST = "prompts_and_classes.txt"


class DreamBench(Suite):
    """DreamBench: a subject's 25 prompts, 4 pictures each; CLIP-I (the headline) and CLIP-T.

    A model is measured on the subject that it was tuned for; the published figures are means over 30 subjects.

    Args:
        data: the folder 'dataset' of github.com/google/dreambooth (CC BY 4.0).
        subject: a folder in it.
        token: word that stands for the subject in the prompts; '' if the model gets a photograph of it instead.
        clip: the CLIP model that compares pictures; DreamBooth's is ViT-B/32.
        device: device of the CLIP model.
    """

    name = "dreambench"
    headline = ("clip_i",)

    def __init__(
        self,
        data: str | None = None,
        subject: str = "dog",
        token: str = "sks",
        clip: str = "openai/clip-vit-base-patch32",
        device: str = "auto",
    ) -> None:
        if data is None or not (Path(data) / LIST).is_file():
            raise ConfigError(
                "dreambench.data: git clone https://github.com/google/dreambooth (CC BY 4.0), and "
                "--set dreambench.data=dreambooth/dataset"
            )
        self.folder, self.subject, self.token, self.clip, self.device = Path(data), subject, token, clip, device

    @property
    def photographs(self) -> list[Path]:
        return sorted(path for path in (self.folder / self.subject).glob("*.*") if path.suffix in (".jpg", ".png"))

    def prompts(self) -> Prompts:
        subjects, objects, alive = read_list((self.folder / LIST).read_text(encoding="utf-8"))
        if self.subject not in subjects or not self.photographs:
            raise ConfigError(
                f"dreambench.subject: no photographs of '{self.subject}'; {nearest(self.subject, subjects)}"
            )
        kind = subjects[self.subject]
        patterns = alive if kind in ("cat", "dog") else objects
        texts = [" ".join(pattern.format(self.token, kind).split()) for pattern in patterns]
        plain = [" ".join(pattern.format("", kind).split()) for pattern in patterns]
        photograph = [str(path) for path in self.photographs[:1]]
        return Prompts(
            texts, [{"plain": text, "image": photograph} if not self.token else {"plain": text} for text in plain]
        )

    @cached_property
    def _encoder(self) -> DualEncoder:
        return load_dual_encoder(self.clip, device=self.device)

    @cached_property
    def _subject(self) -> Tensor:
        return self._see([read_picture(path) for path in self.photographs])

    @torch.no_grad()
    def _see(self, images: Sequence[Image]) -> Tensor:
        encoder = self._encoder
        return encoder.images(encoder.preprocess.images(images).to(encoder.device, encoder.dtype))

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        seen, texts = self._see(samples), self._encoder.texts([record["plain"] for record in metadata])
        likeness, match = (seen @ self._subject.T).mean(dim=1), (seen * texts).sum(dim=-1)
        return [{"clip_i": float(one), "clip_t": float(two)} for one, two in zip(likeness, match, strict=True)]

    def settings(self) -> Mapping[str, Any]:
        return {"subject": self.subject, "token": self.token, "clip": self.clip}


def read_list(text: str) -> tuple[dict[str, str], list[str], list[str]]:
    """The class of each subject, and the patterns of prompts of objects and of live subjects."""
    head, objects, alive = re.split(r"^(?:Object|Live Subject) Prompts$", text, flags=re.MULTILINE)
    subjects = dict(re.findall(r"^(\w+),([\w ]+)$", head, re.MULTILINE))
    subjects.pop("subject_name", None)
    return subjects, *(re.findall(r"'([^']*\{0\} \{1\}[^']*)'", block) for block in (objects, alive))  # type: ignore[return-value]
