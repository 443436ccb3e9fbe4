"""Flow-GRPO on one page (arXiv 2505.05470): a small Stable Diffusion 3 learns to count, in minutes on a CPU.

The pipeline is the one that flowalign ships, loaded by plain diffusers. Of this project's packages the script uses
`samplers`, for denoising steps with their log-probabilities, and `rewards`, for the rule that checks whether a picture
shows what its prompt asks for. Settings, random numbers and updates are those of configs/tiny_sd3/flow_grpo.yaml.

    python scripts/flow_grpo_in_one_page.py
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from PIL.Image import Image
from torch import Tensor

from rewards.shapes.reward import ShapesReward
from samplers import derive_seed, flow_sde, generators, normal, rollout

ASSETS = Path(__file__).parents[1] / "flowalign" / "assets"
SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
"""[T + 1] noise levels, from noise to picture"""
ETA = torch.tensor([0.7, 0.7, 0.7, 0.7, 0.0])
"""[T] how much noise each denoising step adds"""
GROUP_SIZE = 8
CLIP_RANGE = 0.01
"""of the ratio; a step's log-probability is a mean over its elements, so that the ratio stays close to 1"""
LEARNING_RATE = 2e-3
BATCH_SIZE = 64


def load(seed: int) -> StableDiffusion3Pipeline:
    """The pipeline, frozen, with a new LoRA adapter on its transformer's attention, which is trained."""
    absent = dict.fromkeys(["text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"])
    pipeline = StableDiffusion3Pipeline.from_pretrained(ASSETS / "tiny_sd3", **absent)
    for network in (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
        network.requires_grad_(False)
    own = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    torch.manual_seed(seed)
    targets = [f"attn.{name}" for name in own]
    pipeline.transformer.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    return pipeline


def read_prompts(seed: int) -> Iterator[str]:
    """The shipped counting prompts in a random order, over and over."""
    lines = (ASSETS / "prompts" / "shapes_train.jsonl").read_text().splitlines()
    prompts = [record["prompt"] for record in map(json.loads, lines) if record["category"] == "counting"]
    for epoch in itertools.count():
        yield from (prompts[i] for i in np.random.default_rng([seed, epoch]).permutation(len(prompts)))


@torch.no_grad()
def encode(pipeline: StableDiffusion3Pipeline, prompt: str) -> tuple[Tensor, Tensor]:
    """What the transformer is told of a prompt: [1, L, D] a vector a token, and [1, D] one of the whole."""
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 0}
    tokens, _, pooled, _ = pipeline.encode_prompt(prompt, None, None, **options)
    return tokens, pooled


@torch.no_grad()
def decode(pipeline: StableDiffusion3Pipeline, latents: Tensor) -> list[Image]:
    """Pictures of finished latents [B, C, H, W]."""
    vae = pipeline.vae
    pixels = [vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor)[0] for x in latents.split(BATCH_SIZE)]
    return pipeline.image_processor.postprocess(torch.cat(pixels), output_type="pil")


def train(
    pipeline: StableDiffusion3Pipeline, iterations: int, prompts_per_iteration: int, updates: int, seed: int
) -> Iterator[Tensor]:
    """Train the pipeline's transformer; yields the rewards [B] of each iteration."""
    transformer = pipeline.transformer
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, iterations * updates)
    reward = ShapesReward(strict_weight=0.5)
    drawn = read_prompts(seed)

    for iteration in range(iterations):
        # Prompts, each for a group of samples.
        groups = range(prompts_per_iteration)
        prompts = [next(drawn) for _ in groups]
        tokens, pooled = map(torch.cat, zip(*(encode(pipeline, prompt) for prompt in prompts), strict=True))
        group = torch.tensor(groups).repeat_interleave(GROUP_SIZE)

        def velocity(x: Tensor, sigma: Tensor, groups: Tensor) -> Tensor:
            """[B, ...] noise minus picture, as the transformer predicts it at x = (1 - sigma) picture + sigma noise."""
            return torch.cat([transformer(x[n], tokens[groups[n]], pooled[groups[n]], 1000 * sigma[n])[0]
                              for n in torch.arange(len(x)).split(BATCH_SIZE)])

        # Start noise, the same for the members of a group.
        size = transformer.config.sample_size
        starts = generators([derive_seed(seed, iteration, g, 0, 0) for g in groups])
        noise = normal((transformer.config.in_channels, size, size), starts, "cpu")[group]

        # Denoising steps: each draws the next state from a Gaussian, whose log-probability is kept.
        noise_seeds = [derive_seed(seed, iteration, g, m, 1) for g in groups for m in range(GROUP_SIZE)]
        made = rollout(lambda x, sigma: velocity(x, sigma, group), noise, SIGMAS, flow_sde, ETA, noise_seeds)

        # Pictures, their rewards, and by how many standard deviations each is better than its group.
        samples = [prompts[g] for g in group]
        rewards = reward(decode(pipeline, made.final), samples, [{}] * len(samples)).value
        yield rewards
        spread = rewards.view(-1, GROUP_SIZE)
        mean, std = spread.mean(1, keepdim=True), spread.std(1, correction=0, keepdim=True)
        advantage = ((spread - mean) / (std + 1e-4)).clamp(-5, 5).flatten()

        # Actions: every noisy step of every sample, in a random order within its group; each update takes a share.
        actions = made.mask.nonzero().unflatten(0, (len(groups), -1))
        orders = generators([derive_seed(seed, iteration, g, 2) for g in groups])
        order = torch.stack([torch.randperm(actions.shape[1], generator=own) for own in orders])
        actions = actions.gather(1, order[..., None].expand_as(actions))

        for share in actions.chunk(updates, dim=1):
            share = share.flatten(0, 1)
            sample, step = share[advantage[share[:, 0]] != 0].unbind(1)

            # How much more probable the same steps are now, and PPO's clipped loss.
            v = velocity(made.latents[sample, step], made.sigmas[step], group[sample])
            log_prob = made.score(flow_sde, v, sample, step).log_prob
            ratio = torch.exp(log_prob - made.log_prob[sample, step])
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            loss = torch.maximum(-advantage[sample] * ratio, -advantage[sample] * clipped).sum() / len(share)

            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=110)
    parser.add_argument("--prompts", type=int, default=24, help="per iteration")
    parser.add_argument("--updates", type=int, default=4, help="per iteration")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = train(load(given.seed), given.iterations, given.prompts, given.updates, given.seed)
    for iteration, rewards in enumerate(run):
        print(f"iteration {iteration}: mean reward {rewards.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
