"""Scores remembered by the content of what was scored."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from rewards.base import Metadata, Reward, Scores, Sound, as_reward, score, sides, spec_of


class Cached:
    """A reward that is asked once for each distinct sample, and remembers the answer.

    A sample is known by the bytes of its picture (or frames), its prompt, and what else the reward needs.

    Args:
        reward: pointwise and deterministic.
        entries: how many scores are kept; the longest unused is forgotten first.
    """

    def __init__(self, reward: Reward, entries: int = 100_000) -> None:
        self.reward, self.entries = as_reward(reward), entries
        self.name, self.spec = self.reward.name, spec_of(self.reward)
        if self.spec.kind != "pointwise" or not self.spec.deterministic or self.spec.scheduled:
            raise ValueError(f"'{self.name}' cannot be cached: its value depends on more than the sample itself")
        if sides(self.spec.needs) != ["picture"]:
            raise ValueError(f"'{self.name}' cannot be cached: samples are known by their pictures, and it scores more")
        self.scores: OrderedDict[bytes, Scores] = OrderedDict()
        self.hits = self.misses = 0

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        keys = [self._key(*sample) for sample in zip(samples, prompts, metadata, strict=True)]
        new = {key: i for i, key in reversed(list(enumerate(keys))) if key not in self.scores}
        known = {key: self.scores[key] for key in keys if key not in new}
        if new:
            ask = sorted(new.values())
            scores = score(
                self.reward, [samples[i] for i in ask], [prompts[i] for i in ask], [metadata[i] for i in ask]
            )
            known |= {keys[i]: scores[torch.tensor([row])] for row, i in enumerate(ask)}
        for key in keys:
            self.scores[key] = known[key]
            self.scores.move_to_end(key)
        while len(self.scores) > self.entries:
            self.scores.popitem(last=False)
        self.misses += len(new)
        self.hits += len(keys) - len(new)
        return Scores.cat([known[key] for key in keys])

    def _key(self, image: Image | Sequence[Image] | Sound, prompt: str, record: Mapping[str, Any]) -> bytes:
        needs, content = self.spec.needs, hashlib.sha256()
        pictures = [image] if isinstance(image, Image) else [] if isinstance(image, Sound) else list(image)
        if isinstance(image, Sound):
            content.update(image.waveform.tobytes())
        if "reference" in needs:
            # a file is known by its name
            pictures += [record["reference"]] if isinstance(record["reference"], Image) else []
        for picture in pictures:
            content.update(f"{picture.mode}{picture.size}".encode())
            content.update(picture.tobytes())
        if "prompt" in needs:
            content.update(prompt.encode())
        if needs & {"metadata", "reference"}:
            # the group changes from one iteration to the next, but not what a pointwise reward makes of a sample
            others = {k: value for k, value in record.items() if k != "group" and not isinstance(value, Image)}
            content.update(repr(sorted(others.items())).encode())
        return content.digest()
