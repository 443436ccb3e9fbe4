"""Make the embedded world of videos: a tiny causal SkyReels-V2 pipeline, trained from nothing on moving shapes.

    python scripts/build_tiny_video.py --out flowalign/data/assets/tiny_video --device cuda

Draws clips of the prompts of `rewards.moving_shapes`, trains the VAE on them, then the transformer and the text encoder
together by diffusion forcing, and writes the pipeline in diffusers' folder layout (float16 safetensors) with its
measured quality, and beside it the prompts of the grammar. It loads with

    SkyReelsV2DiffusionForcingPipeline.from_pretrained(path)
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from build_tiny_sd3 import (
    CAPTION_DROPOUT,
    logit_normal,
    new_optimizer,
    new_tokenizer,
    progress,
    psnr,
    update,
    write,
)
from diffusers import (
    AutoencoderKLWan,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import BatchEncoding, UMT5Config, UMT5EncoderModel

from rewards.moving_shapes import (
    FRAMES,
    SIZE,
    MovingShapesReward,
    all_movements,
    draw,
    heldout_movements,
    train_movements,
)

ASSETS = Path(__file__).parent.parent / "flowalign" / "data" / "assets"
TOKENS = 8  # the longest prompt has 7, start and end included
WIDTH = 64  # of the text encoder
LATENT_FRAMES, CHUNK = 4, 2
CODED = 9  # frames that the VAE takes: its encoder drops what is left of a group of 4 after the first
SETTINGS: dict[str, dict] = {
    "4 steps, in chunks": {"num_inference_steps": 4, "ar_step": 4, "causal_block_size": CHUNK, "guidance_scale": 1.0},
    "15 steps, in chunks": {
        **{"num_inference_steps": 15, "ar_step": 15, "causal_block_size": CHUNK, "guidance_scale": 1.0}
    },
    "4 steps, as a whole": {"num_inference_steps": 4, "ar_step": 0, "causal_block_size": 1, "guidance_scale": 1.0},
    "15 steps, as a whole, guidance 3": {
        **{"num_inference_steps": 15, "ar_step": 0, "causal_block_size": 1, "guidance_scale": 3.0}
    },
}
"""Arguments of the pipeline's call."""


def main() -> None:
    given = parse_arguments()
    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(given.seed)
    rng = np.random.default_rng(given.seed)

    pipe = new_pipeline().to(given.device)
    clips, prompts = pool(given.pool, rng)
    clips = clips.to(given.device)
    if given.vae is None:
        train_vae(pipe.vae, clips, given.vae_steps, given.vae_batch)
    else:
        pipe.vae = AutoencoderKLWan.from_pretrained(given.vae, subfolder="vae", dtype=torch.float32).to(given.device)
    latents = encoded(pipe.vae, clips)
    train_transformer(pipe, latents, prompts.to(given.device), given.steps, given.batch)

    write_prompts(given.prompts_out)
    names = ("seed", "device", "pool", "vae", "vae_steps", "vae_batch", "steps", "batch")
    chosen = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    write(
        pipe,
        given.out,
        lambda folder: measure(folder, given.eval_videos, given.seed, given.device),
        lambda quality: model_card(quality, options),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ASSETS / "tiny_video", help="folder of the pipeline; replaced whole"
    )
    parser.add_argument("--prompts-out", type=Path, default=ASSETS / "prompts", help="folder of the two prompt lists")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights, clips, noise and evaluation")
    parser.add_argument("--pool", type=int, default=20_000, help="clips drawn to train on")
    parser.add_argument("--vae", type=Path, help="folder of an earlier build, whose VAE is taken in place of a new one")
    parser.add_argument("--vae-steps", type=int, default=3000, help="training steps of the VAE")
    parser.add_argument("--vae-batch", type=int, default=64, help="clips of a step of the VAE")
    parser.add_argument("--steps", type=int, default=6000, help="training steps of the transformer")
    parser.add_argument("--batch", type=int, default=256, help="clips of a step of the transformer")
    parser.add_argument("--eval-videos", type=int, default=16, help="videos of each prompt and setting, at the end")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    return parser.parse_args()


def new_pipeline() -> SkyReelsV2DiffusionForcingPipeline:
    """An untrained pipeline: VAE of 7 frames of 16x16 to 4 of 8x8, transformer, one text encoder."""
    tokenizer = new_tokenizer(Counter(word for movement in all_movements() for word in movement.prompt.split()))
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_heads=4)
    )
    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    )
    # latents start almost without noise, beside which the decoder would not see them
    nn.init.constant_(vae.quant_conv.bias[4:], -6.0)
    transformer = SkyReelsV2Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=WIDTH,
        freq_dim=64,
        ffn_dim=288,
        num_layers=3,
        rope_max_seq_len=32,
    )
    # the velocity starts as zero
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    # of first order and without corrections it is Euler's rule
    scheduler = UniPCMultistepScheduler(
        solver_order=1,
        disable_corrector=list(range(20)),
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=1.0,
    )
    pipe = SkyReelsV2DiffusionForcingPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pool(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Clips uint8 [count, 3, 7, 16, 16] of training prompts, and the index [count] of each one's prompt."""
    indices = rng.integers(len(train_movements()), size=count)
    clips = np.stack([draw(train_movements()[i], rng) for i in indices])
    print(f"pool: {count} clips", flush=True)
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).contiguous(), torch.from_numpy(indices)


def to_pixels(clips: Tensor) -> Tensor:
    """Clips uint8 [B, 3, 7, 16, 16] to float32 in [-1, 1], [B, 3, 9, 16, 16]: the last frame stays twice more."""
    pixels = clips.float() / 127.5 - 1
    return torch.cat([pixels, pixels[:, :, -1:].expand(-1, -1, CODED - FRAMES, -1, -1)], 2)


def train_vae(vae: AutoencoderKLWan, clips: Tensor, steps: int, batch: int) -> None:
    """Train by reconstruction and a light KL term, then set the latents' means and deviations."""
    vae.train()
    optimizer, schedule = new_optimizer(vae.parameters(), steps, peak=4e-3)
    decoded: list[Tensor] = []
    # what the decoder says; the VAE's own output is clamped, which stops the gradient
    hook = vae.decoder.register_forward_hook(lambda module, inputs, output: decoded.append(output))
    for step in progress("vae", steps):
        pixels = to_pixels(clips[torch.randint(len(clips), (batch,), device=clips.device)])
        posterior = vae.encode(pixels).latent_dist
        decoded.clear()
        vae.decode(posterior.sample()[:, :, :LATENT_FRAMES])
        difference = torch.cat(decoded, 2) - pixels[:, :, :FRAMES]
        squared = difference.square().mean()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        update(squared + 0.1 * difference.abs().mean() + 1e-6 * kl, vae.parameters(), optimizer, schedule)
        step.report(f"{psnr(squared.item()):.1f} dB")
    hook.remove()
    vae.eval()
    latents = encoded(vae, clips[:2048])
    dims = (0, 2, 3, 4)
    vae.register_to_config(latents_mean=latents.mean(dims).tolist(), latents_std=latents.std(dims).tolist())


@torch.no_grad()
def encoded(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """The latents [count, 4, 4, 8, 8] of clips, with the VAE's means and deviations."""
    latents = [vae.encode(to_pixels(some)).latent_dist.mode()[:, :, :LATENT_FRAMES] for some in clips.split(256)]
    mean, std = (torch.tensor(v, device=clips.device).view(-1, 1, 1, 1) for v in statistics(vae))
    return (torch.cat(latents) - mean) / std


def statistics(vae: AutoencoderKLWan) -> tuple[list[float], list[float]]:
    return vae.config.latents_mean, vae.config.latents_std


def train_transformer(
    pipe: SkyReelsV2DiffusionForcingPipeline, latents: Tensor, prompts: Tensor, steps: int, batch: int
) -> None:
    """Diffusion forcing with caption dropout; ends with the EMA weights.

    Every other batch is seen as a whole, all frames at one level. The others are seen in two chunks with a level each,
    the second given the first; in half of their clips the first is clean, as it is in sampling, and teaches nothing.
    """
    model = nn.ModuleList([pipe.transformer, pipe.text_encoder]).train()
    # over about a tenth of the training
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - min(1.0, 10 / steps)))
    optimizer, schedule = new_optimizer(model.parameters(), steps, peak=2e-3)
    generator, device = torch.Generator().manual_seed(torch.initial_seed()), latents.device
    texts = pipe.tokenizer(
        ["", *(movement.prompt for movement in train_movements())],
        padding="max_length",
        max_length=TOKENS,
        return_tensors="pt",
    ).to(device)
    for step in progress("transformer", steps):
        chosen = torch.randint(len(latents), (batch,), device=device)
        captions = torch.where(torch.rand(batch, device=device) < CAPTION_DROPOUT, 0, prompts[chosen] + 1)
        # of each prompt once
        embeds = embedded(pipe, texts)[captions]
        in_chunks = step.index % 2 == 1
        levels = chunk_levels(batch, in_chunks, generator).repeat_interleave(CHUNK, 1).to(device)
        loss = velocity_error(pipe, latents[chosen], levels, embeds, in_chunks)[levels > 0].mean()
        update(loss, model.parameters(), optimizer, schedule)
        average.update_parameters(model)
        step.report(f"loss {loss.item():.3f}")
    model.load_state_dict(average.module.state_dict())
    model.eval()
    pipe.transformer._set_ar_attention(1)


def embedded(pipe: SkyReelsV2DiffusionForcingPipeline, texts: BatchEncoding) -> Tensor:
    """The embeddings [N, TOKENS, WIDTH] of tokenized texts, as `encode_prompt` makes them."""
    return pipe.text_encoder(**texts).last_hidden_state * texts.attention_mask[..., None]


def velocity_error(
    pipe: SkyReelsV2DiffusionForcingPipeline, clean: Tensor, levels: Tensor, embeds: Tensor, in_chunks: bool
) -> Tensor:
    """Squared error [B, 4] of the velocity of each frame of latents, which has a noise level [B, 4] of its own."""
    noise, sigma = torch.randn_like(clean), levels[:, None, :, None, None]
    pipe.transformer._set_ar_attention(CHUNK if in_chunks else 1)
    velocity = pipe.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=1000 * levels,
        encoder_hidden_states=embeds,
        enable_diffusion_forcing=True,
    ).sample
    return (velocity - (noise - clean)).square().mean((1, 3, 4))


def chunk_levels(batch: int, in_chunks: bool, generator: torch.Generator) -> Tensor:
    """Noise levels [batch, 2] of the two chunks: one, or in chunks one each, of which the first of every other is 0."""
    levels = logit_normal(batch, generator)[:, None].repeat(1, 2)
    if in_chunks:
        levels[:, 0] = levels[torch.randperm(batch, generator=generator), 1]
        levels[::2, 0] = 0
    return levels


def write_prompts(folder: Path) -> None:
    """Write moving_shapes_train.jsonl and moving_shapes_heldout.jsonl, a prompt and its direction a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, movements in {"train": train_movements(), "heldout": heldout_movements()}.items():
        lines = [json.dumps({"prompt": each.prompt, "category": each.direction}) + "\n" for each in movements]
        (folder / f"moving_shapes_{name}.jsonl").write_text("".join(lines))


def measure(folder: Path, repeats: int, seed: int, device: str) -> dict:
    """The quality of a saved pipeline, loaded in float32: its VAE's, and what it samples of all prompts."""
    pipe = SkyReelsV2DiffusionForcingPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    quality: dict = {"seed": seed, "vae": measure_vae(pipe.vae, seed), "samples": {}}
    print(f"vae: {quality['vae']}", flush=True)
    for name, setting in SETTINGS.items():
        figures: dict = {"videos_per_prompt": repeats}
        for part, movements in {"train": train_movements(), "heldout": heldout_movements()}.items():
            prompts = [movement.prompt for movement in movements for _ in range(repeats)]
            figures[part] = rates(sampled(pipe, prompts, setting, seed), prompts)
        quality["samples"][name] = figures
        print(f"{name}: {figures}", flush=True)
    return quality


def sampled(pipe: SkyReelsV2DiffusionForcingPipeline, prompts: list[str], setting: dict, seed: int) -> list:
    """A video, a list of pictures, of each prompt."""
    generator, videos = torch.Generator().manual_seed(seed), []
    for start in range(0, len(prompts), 256):
        videos += pipe(
            prompts[start : start + 256],
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            max_sequence_length=TOKENS,
            generator=generator,
            output_type="pil",
            **setting,
        ).frames
    return videos


@torch.no_grad()
def measure_vae(vae: AutoencoderKLWan, seed: int) -> dict[str, float]:
    """Reconstructions of 10 new clips of each held-out prompt: PSNR and the rates of the checker."""
    rng = np.random.default_rng([seed, 1])
    movements = [movement for movement in heldout_movements() for _ in range(10)]
    clips = torch.from_numpy(np.stack([draw(movement, rng) for movement in movements])).permute(0, 4, 1, 2, 3)
    pixels = to_pixels(clips.to(vae.device))
    output = vae.decode(vae.encode(pixels).latent_dist.mode()[:, :, :LATENT_FRAMES]).sample
    error = F.mse_loss(output, pixels[:, :, :FRAMES]).item()
    drawn = ((output + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy()
    videos = [[Image.fromarray(frame) for frame in video] for video in drawn]
    return {"psnr_db": round(psnr(error), 2)} | rates(videos, [movement.prompt for movement in movements])


def rates(videos: list, prompts: list[str]) -> dict[str, float]:
    parts = MovingShapesReward()(videos, prompts, [{}] * len(prompts)).parts
    return {part: round(parts[part].mean().item(), 4) for part in ("strict", "soft", "colour", "shape", "direction")}


def model_card(quality: dict, options: str) -> str:
    """README.md of the pipeline, in the manner of the Hub."""
    rows = [
        f"| {name} | {own['train']['strict']:.0%} | {own['heldout']['strict']:.0%} | {own['heldout']['soft']:.2f} |"
        for name, own in quality["samples"].items()
    ]
    vae = quality["vae"]
    return CARD.format(rows="\n".join(rows), psnr=vae["psnr_db"], vae=vae["strict"], options=options)


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags: [skyreels-v2, diffusion-forcing, tiny, moving-shapes]
---

# tiny_video

A tiny but real `SkyReelsV2DiffusionForcingPipeline`: it makes 7 frames of 16x16 pixels of one shape that moves, from
prompts like "a red circle moving left", as a whole or causally in two chunks. flowalign trains it where a method is of
causal videos. It is meant to be imperfect: alignment has something to improve.

```python
from diffusers import SkyReelsV2DiffusionForcingPipeline

pipe = SkyReelsV2DiffusionForcingPipeline.from_pretrained(path)
size = dict(height=16, width=16, num_frames=7, max_sequence_length=8)
chunks = dict(ar_step=4, causal_block_size=2)
pipe("a red circle moving left", num_inference_steps=4, guidance_scale=1.0, **size, **chunks).frames[0]
```

**Parts.** AutoencoderKLWan (7x16x16x3 to 4x8x8x4), SkyReelsV2Transformer3DModel (3 layers, width 96),
UMT5EncoderModel (2 layers, width 64), UniPCMultistepScheduler (first order, shift 1). Weights are stored in float16.
The VAE's encoder drops frames after the last whole group of four: to encode 7 frames, show the last one twice more and
take the first 4 frames of latents.

**Data.** Clips drawn by `rewards.moving_shapes.draw`: 4 colours, 3 shapes, 4 directions. One direction of each coloured
shape is held out, no training sees it.

**Quality.** Share of videos in which colour, shape and direction are right in every frame, by
`rewards.moving_shapes.check`; soft is the mean of the three shares.

| setting | strict, train | strict, held out | soft, held out |
|---|---|---|---|
{rows}

VAE reconstructions: {psnr} dB, of which the checker passes {vae:.1%}. All figures: `quality.json`.

**Making it.** `python scripts/build_tiny_video.py {options}` makes it from nothing.
"""


if __name__ == "__main__":
    main()
