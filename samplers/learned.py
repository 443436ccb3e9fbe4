"""A kernel whose noise is learned: the ODE's step plus Gaussian noise whose size a small network decides (ReinFlow).

The transition is Gaussian by construction, so the likelihood of a chain is exact at any number of steps, one
included, and the noise can be trained by policy gradient together with the velocity.
"""

import math

import torch
from torch import Tensor, nn

from samplers.kernels import Kernel, Traits, declares

FREQUENCIES = 8
"""Octaves of the sinusoidal features of sigma."""


class LearnedNoise(nn.Module):
    """ReinFlow's noise injection network (arXiv 2505.22094): mean x + v dt, std a bounded function of the time.

    The module is itself a kernel (one without a condition), and `given` makes one that knows the condition. eta
    scales the learned std and switches steps off: 1 at stochastic steps. The last step may be stochastic.

    Departures from the authors' code: std is the unclipped Gaussian's for sampling too (theirs clips the
    noise at 3 std and scores it without), and rollout and replay ask for it at one and the same sigma.

    Args:
        shape: shape of a sample's std, broadcasting against the latents: (C, 1, 1) gives one a channel, (C, H, W)
            one an element.
        low, high: bounds of std, 0 < low < high; the network moves between their logarithms.
        condition_size: length of the condition vector (a pooled prompt embedding), 0 for none.
        hidden: width of the two hidden layers.
        hold: share of training during which the upper bound stays, in [0, 1).
        decay: share of high - low that the upper bound loses after that, in [0, 1]; 0 keeps it.
    """

    traits = Traits(learned=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        low: float = 0.03,
        high: float = 0.15,
        condition_size: int = 0,
        hidden: int = 64,
        hold: float = 0.35,
        decay: float = 0.3,
    ) -> None:
        super().__init__()
        if not 0 < low < high:
            raise ValueError(f"learned noise: the bounds are {low:g} and {high:g}; they must be 0 < low < high")
        if not 0 <= hold < 1 or not 0 <= decay <= 1:
            raise ValueError("learned noise: hold must be in [0, 1) and decay in [0, 1]")
        self.shape, self.low, self.high = shape, low, high
        self.condition_size, self.hold, self.decay = condition_size, hold, decay
        self.register_buffer("upper", torch.tensor(high))
        self.upper: Tensor
        output = nn.Linear(hidden, math.prod(shape))
        # start in the middle of the bounds, the same for every time and condition
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
        self.net = nn.Sequential(
            nn.Linear(2 * FREQUENCIES + condition_size, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            output,
        )

    def std(self, sigma: Tensor, condition: Tensor | None = None) -> Tensor:
        """Standard deviations between low and the annealed upper bound.

        Args:
            sigma: [B].
            condition: [B, condition_size], None where there is no condition.

        Returns:
            [B, *shape] float32.
        """
        angles = sigma.float()[:, None] * math.pi * 2.0 ** torch.arange(FREQUENCIES, device=sigma.device)
        features = [angles.sin(), angles.cos()]
        if self.condition_size:
            if condition is None:
                raise ValueError("learned noise: this network needs a condition; use given(condition) as the kernel")
            features.append(condition.float())
        share = (torch.tanh(self.net(torch.cat(features, 1))) + 1) / 2
        log_low = math.log(self.low)
        return torch.exp(log_low + share * (self.upper.log() - log_low)).unflatten(1, self.shape)

    def forward(
        self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The transition's mean and std, as every kernel; sigma and eta are [B, 1, ...]."""
        return x + v * (sigma_next - sigma), eta * self.std(sigma.flatten(), condition)

    def kernel(self, condition: Tensor) -> Kernel:
        """The kernel for B samples with these conditions, [B, condition_size]."""

        @declares(Traits(learned=True))
        def learned(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
            return self(x, v, sigma, sigma_next, eta, condition)

        return learned

    def anneal(self, progress: float) -> None:
        """Set the upper bound for a share of training done, in [0, 1]: held first, then lowered by a cosine."""
        done = min(max((progress - self.hold) / (1 - self.hold), 0.0), 1.0)
        lowest = self.high - self.decay * (self.high - self.low)
        self.upper.fill_(lowest + (self.high - lowest) * (1 + math.cos(math.pi * done)) / 2)
