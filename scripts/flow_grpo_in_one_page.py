"""Flow-GRPO on one page (arXiv 2505.05470): a small Stable Diffusion 3 learns to count, in minutes on a CPU.

The pipeline is the one that flowalign ships, loaded by plain diffusers. Of this project's packages the script uses
`samplers`, for denoising steps with their log-probabilities, and `rewards`, for the rule that checks whether a picture
shows what its prompt asks for. Settings, random numbers and updates are as in
configs/tiny_sd3/short_flow_grpo.yaml, which also averages the weights.

    python scripts/flow_grpo_in_one_page.py
"""

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: threads that wait sleep
import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from PIL.Image import Image
from torch import Tensor, nn

from rewards.shapes.reward import ShapesReward
from samplers import Trajectory, derive_seed, flow_sde, generators, normal, rollout

ASSETS = Path(__file__).parents[1] / "flowalign" / "data" / "assets"
SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])  # [T + 1] noise levels, from noise to picture
ETA = torch.tensor([0.0, 0.7, 0.0, 0.0, 0.0])  # [T] how much noise each denoising step adds
GROUP_SIZE, BATCH_SIZE, LEARNING_RATE = 8, 64, 5e-4
CLIP_RANGE = 0.01  # of the ratio: a step's log-probability is a mean over its elements, so the ratio stays close to 1


def load(seed: int) -> StableDiffusion3Pipeline:
    """The pipeline, frozen, with a new LoRA adapter on its transformer's linear layers, which is trained."""
    absent = dict.fromkeys(["text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"])
    pipeline = StableDiffusion3Pipeline.from_pretrained(ASSETS / "tiny_sd3", **absent)
    pipeline.transformer.requires_grad_(False)
    torch.manual_seed(seed)
    pipeline.transformer.add_adapter(LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"))
    return pipeline


def read_prompts(seed: int) -> Iterator[str]:
    """The shipped counting prompts in a random order, over and over."""
    lines = (ASSETS / "prompts" / "shapes_train.jsonl").read_text().splitlines()
    prompts = [record["prompt"] for record in map(json.loads, lines) if record["category"] == "counting"]
    for epoch in itertools.count():
        yield from (prompts[i] for i in np.random.default_rng([seed, epoch]).permutation(len(prompts)))


@torch.no_grad()
def encode(pipeline: StableDiffusion3Pipeline, prompt: str) -> tuple[Tensor, Tensor]:
    """A prompt as the transformer reads it: [1, L, D] a vector a token, and [1, D] one of the whole."""
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 0}
    tokens, _, pooled, _ = pipeline.encode_prompt(prompt, None, None, **options)
    return tokens, pooled


@torch.no_grad()
def decode(pipeline: StableDiffusion3Pipeline, latents: Tensor) -> list[Image]:
    """Pictures of finished latents [B, C, H, W]."""
    vae = pipeline.vae
    pixels = [vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor)[0] for x in latents.split(BATCH_SIZE)]
    return pipeline.image_processor.postprocess(torch.cat(pixels), output_type="pil")


def velocity(transformer: nn.Module, x: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
    """[B, ...] noise minus picture, which the network predicts at x = (1 - sigma) picture + sigma noise."""
    parts = zip(*(rows.split(BATCH_SIZE) for rows in (x, tokens, pooled, 1000 * sigma)), strict=True)
    return torch.cat([transformer(*part)[0] for part in parts])


def sample(transformer: nn.Module, tokens: Tensor, pooled: Tensor, group: Tensor, seed: tuple[int, int]) -> Trajectory:
    """Denoise whole groups: a noisy step draws the next state from a Gaussian, and keeps its log-probability."""
    first = slice(None, None, GROUP_SIZE)
    starts = generators([derive_seed(*seed, g, 0, 0) for g in group[first].tolist()])
    size = transformer.config.sample_size
    noise = normal((transformer.config.in_channels, size, size), starts, "cpu")[group]

    def velocity_of_members(x: Tensor, sigma: Tensor) -> Tensor:
        if sigma[0] < SIGMAS[:-1][ETA > 0].max():
            return velocity(transformer, x, sigma, tokens[group], pooled[group])
        # up to the first noisy step the members of a group are in one state, where the velocity is computed once
        return velocity(transformer, x[first], sigma[first], tokens, pooled)[group]

    seeds = [derive_seed(*seed, g, row % GROUP_SIZE, 1) for row, g in enumerate(group.tolist())]
    return rollout(velocity_of_members, noise, SIGMAS, flow_sde, ETA, seeds)


def shuffled(actions: Tensor, seed: tuple[int, int]) -> Tensor:
    """[G, N, 2] (sample, step) of G groups, in a random order within each."""
    draws = generators([derive_seed(*seed, g, 2) for g in range(len(actions))])
    return torch.stack([own[torch.randperm(len(own), generator=draw)] for own, draw in zip(actions, draws)])


def train(
    pipeline: StableDiffusion3Pipeline, iterations: int, prompts_per_iteration: int, updates: int, seed: int
) -> Iterator[Tensor]:
    """Train the transformer, `updates` times an iteration; yields the rewards [B] of each iteration."""
    transformer = pipeline.transformer
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    reward = ShapesReward(strict_weight=0.5)
    prompts = read_prompts(seed)
    group = torch.arange(prompts_per_iteration).repeat_interleave(GROUP_SIZE)

    for iteration in range(iterations):
        # a group of pictures for each of the next prompts, and their rewards
        drawn = list(itertools.islice(prompts, prompts_per_iteration))
        tokens, pooled = map(torch.cat, zip(*(encode(pipeline, prompt) for prompt in drawn), strict=True))
        made = sample(transformer, tokens, pooled, group, (seed, iteration))
        rewards = reward(decode(pipeline, made.final), [drawn[g] for g in group], [{}] * len(group)).value

        # advantage: by how many standard deviations a picture is better than its group
        gap = rewards.view(-1, GROUP_SIZE) - rewards.view(-1, GROUP_SIZE).mean(1, keepdim=True)
        advantage = (gap / ((gap**2).mean(1, keepdim=True).sqrt() + 1e-4)).clamp(-5, 5).flatten()

        # every noisy step is an action; each update takes a share of each group's
        actions = shuffled(made.mask.nonzero().unflatten(0, (prompts_per_iteration, -1)), (seed, iteration))
        for share in actions.chunk(updates, dim=1):
            samples, steps = share.flatten(0, 1)[advantage[share.flatten(0, 1)[:, 0]] != 0].unbind(1)
            # the members of a group are in one state at the only noisy step: the network is asked once a group
            asked, place = group[samples].unique(return_inverse=True)
            state, sigma = made.latents[asked * GROUP_SIZE, steps[0]], made.sigmas[steps[0]].expand(len(asked))
            v = velocity(transformer, state, sigma, tokens[asked], pooled[asked]).index_select(0, place)

            # how much more probable the same step is now, and PPO's clipped loss
            ratio = torch.exp(made.score(flow_sde, v, samples, steps).log_prob - made.log_prob[samples, steps])
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            loss = torch.maximum(-advantage[samples] * ratio, -advantage[samples] * clipped)

            (loss.sum() / share[..., 0].numel()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("iterations", 45), ("prompts", 32), ("updates", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    own = parser.parse_args()
    for iteration, rewards in enumerate(train(load(own.seed), own.iterations, own.prompts, own.updates, own.seed)):
        print(f"iteration {iteration}: mean reward {rewards.mean():.3f}", flush=True)
