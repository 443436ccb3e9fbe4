"""How far the pictures of one prompt are from each other."""

import torch

from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Interval, ratio


def diversity(result: Evaluated) -> Interval:
    """Mean distance of two pictures of one prompt: root mean square over pixels in [0, 1], mean over pairs.

    Its 95% interval is over prompts; 0 without one where no prompt has two pictures.
    """
    values = list(distances(result).values())
    return ratio(values) if values else Interval(0.0)


def distances(result: Evaluated) -> dict[str, float]:
    """The same of each prompt that has two pictures or more."""
    by_prompt: dict[str, list[torch.Tensor]] = {}
    for prompt, image in zip(result.prompts, result.samples, strict=True):
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255
        by_prompt.setdefault(prompt, []).append(pixels)
    return {
        prompt: torch.pdist(torch.stack(pictures)).mean().item() / pictures[0].numel() ** 0.5
        for prompt, pictures in by_prompt.items()
        if len(pictures) > 1
    }
