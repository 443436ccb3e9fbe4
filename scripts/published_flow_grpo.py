"""Flow-GRPO's way of sampling and updating, written from reading github.com/yifan123/flow_grpo, to compare with.

What is theirs (scripts/train_sd3.py, scripts/train_flux.py and the patched pipeline they call): eager, the weights in
float32 with autocast as accelerate wraps the forward pass, guidance by concatenating the empty prompt with the prompts,
a VAE in float32; the update walks the steps of the trajectory one at a time, each a forward of the whole batch, one of
the reference with the adapter off if there is a KL term, and a backward. Left out, as in what it is compared with:
prompt encoding, rewards, logging, EMA.
"""

import math
from typing import Any

import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model
from torch import Tensor


class PublishedFlowGRPO:
    """SD3 or FLUX.1 with a LoRA, sampled and updated as the published scripts do.

    Args:
        transformer, vae: their weights as they are to be kept, on the device.
        sigmas: [T + 1] noise levels, the last 0.
        embeds, pooled: [B, L, D] and [B, P] of the prompts; `negative` the same of the empty prompt.
        targets: module names that LoRA goes on.
        kl_weight: of the KL to the reference; 0 does without its forward pass.
    """

    def __init__(
        self,
        transformer: Any,
        vae: Any,
        sigmas: Tensor,
        embeds: Tensor,
        pooled: Tensor,
        negative: tuple[Tensor, Tensor],
        *,
        guidance: float,
        size: int,
        rank: int,
        targets: list[str],
        dtype: torch.dtype,
        eta: float = 0.7,
        clip_range: float = 1e-4,
        kl_weight: float = 0.04,
    ) -> None:
        self.flux = type(transformer).__name__.startswith("Flux")
        transformer.requires_grad_(False)
        self.frozen = list(transformer.parameters())
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights="gaussian", target_modules=targets)
        self.transformer, self.vae, self.config = get_peft_model(transformer, lora), vae, transformer.config
        self.trained = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.data = parameter.data.float()
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, weight_decay=1e-4)
        self.sigmas, self.embeds, self.pooled, self.negative = sigmas, embeds, pooled, negative
        self.guidance, self.size, self.dtype = guidance, size, dtype
        self.eta, self.clip_range, self.kl_weight = eta, clip_range, kl_weight
        self.device = embeds.device
        self.side = size // (2 ** (len(vae.config.block_out_channels) - 1))

    def velocity(self, x: Tensor, step: int, rows: slice = slice(None)) -> Tensor:
        """Guided velocity of the rows x of the batch at a step, float32."""
        sigma = self.sigmas[step]
        embeds, pooled = self.embeds[rows], self.pooled[rows]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            if self.flux:
                half = self.side // 2
                places = FluxPipeline._prepare_latent_image_ids(len(x), half, half, self.device, self.dtype)
                return self.transformer(
                    hidden_states=x.to(self.dtype),
                    timestep=sigma.expand(len(x)).to(self.dtype),
                    guidance=torch.full((len(x),), self.guidance, device=self.device),
                    encoder_hidden_states=embeds,
                    pooled_projections=pooled,
                    txt_ids=torch.zeros(embeds.shape[1], 3, device=self.device, dtype=self.dtype),
                    img_ids=places,
                    return_dict=False,
                )[0].float()
            empty, empty_pooled = (part.expand(len(x), *part.shape[1:]) for part in self.negative)
            output = self.transformer(
                hidden_states=torch.cat([x, x]).to(self.dtype),
                timestep=(1000 * sigma).expand(2 * len(x)),
                encoder_hidden_states=torch.cat([empty, embeds]),
                pooled_projections=torch.cat([empty_pooled, pooled]),
                return_dict=False,
            )[0].float()
        without, with_prompt = output.chunk(2)
        return without + self.guidance * (with_prompt - without)

    def transition(self, x: Tensor, velocity: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next state by their SDE (arXiv 2505.05470, equation 9)."""
        sigma, dt = self.sigmas[step], self.sigmas[step + 1] - self.sigmas[step]
        finite = torch.where(sigma == 1, self.sigmas[1], sigma)
        spread = self.eta * torch.sqrt(sigma / (1 - finite))
        drift = spread**2 / (2 * sigma)
        mean = x * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
        return mean, spread * torch.sqrt(-dt)

    def start(self, count: int) -> Tensor:
        """Noise to start from, in the shape that the network takes."""
        if self.flux:
            return torch.randn(count, (self.side // 2) ** 2, self.config.in_channels, device=self.device)
        return torch.randn(count, self.config.in_channels, self.side, self.side, device=self.device)

    @torch.no_grad()
    def rollout(self) -> tuple[Tensor, Tensor]:
        """[B, T + 1, ...] states and [B, T] log-probabilities."""
        self.transformer.eval()
        x = self.start(len(self.embeds))
        states, log_probs = [x], []
        for step in range(len(self.sigmas) - 1):
            mean, std = self.transition(x, self.velocity(x, step), step)
            x = mean + std * torch.randn_like(mean)
            states.append(x)
            log_probs.append(log_prob(x, mean, std))
        return torch.stack(states, 1), torch.stack(log_probs, 1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] pictures of finished states."""
        if self.flux:
            latents = FluxPipeline._unpack_latents(latents, self.size, self.size, self.size // self.side)
        config = self.vae.config
        return self.vae.decode((latents / config.scaling_factor + config.shift_factor).float(), return_dict=False)[0]

    def update(self, states: Tensor, log_probs: Tensor, advantage: Tensor, micro_batch: int) -> Tensor:
        """One optimizer step over every step but the last, one step at a time.

        Returns:
            [T - 1, B / micro_batch] mean ratios.
        """
        self.transformer.train()
        starts = range(0, len(states), micro_batch)
        calls, ratios = len(starts) * (log_probs.shape[1] - 1), []
        for start in starts:
            rows = slice(start, start + micro_batch)
            for step in range(log_probs.shape[1] - 1):
                x, after = states[rows, step], states[rows, step + 1]
                mean, std = self.transition(x, self.velocity(x, step, rows), step)
                ratio = torch.exp(log_prob(after, mean, std) - log_probs[rows, step])
                clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
                loss = torch.maximum(-advantage[rows] * ratio, -advantage[rows] * clipped).mean()
                if self.kl_weight > 0:
                    with torch.no_grad(), self.transformer.disable_adapter():
                        base, _ = self.transition(x, self.velocity(x, step, rows), step)
                    loss = loss + self.kl_weight * ((mean - base) ** 2 / (2 * std**2)).mean()
                (loss / calls).backward()
                ratios.append(ratio.detach().mean())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(ratios).view(len(starts), -1).T


def log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B] Gaussian log-density, the mean over elements as they take it."""
    density = -((x.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)
