"""A learned distribution of the start noise, which is the standard normal before it has learned."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StartNoise(nn.Module):
    """Gaussians of the start noise given the prompt, whose means and deviations vary smoothly over the latents.

    A small network makes a coarse grid of them, which is brought to the latents' height and width; a video's frames
    have the same.

    Args:
        channels: channels of the latents.
        condition_size: length of a prompt's vector.
        grid: height and width of the coarse grid.
        hidden: width of the hidden layer.
        bound: bound of means and of the logarithms of deviations.
    """

    def __init__(self, channels: int, condition_size: int, grid: int = 4, hidden: int = 64, bound: float = 1.5) -> None:
        super().__init__()
        self.shape, self.bound = (2 * channels, grid, grid), bound
        output = nn.Linear(hidden, math.prod(self.shape))
        # the standard normal, whatever the prompt
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
        self.net = nn.Sequential(nn.LayerNorm(condition_size), nn.Linear(condition_size, hidden), nn.Tanh(), output)

    def forward(self, condition: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
        """Means and deviations [B, ...] of latents of `size` [B, C, (F,) H, W].

        Args:
            condition: [B, condition_size].
        """
        coarse = self.bound * torch.tanh(self.net(condition.float())).unflatten(1, self.shape)
        fine = F.interpolate(coarse, size[-2:], mode="bilinear", align_corners=False)
        mean, log_std = (half.unsqueeze(2).expand(size) if len(size) == 5 else half for half in fine.chunk(2, 1))
        return mean, log_std.exp()
