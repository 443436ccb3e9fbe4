"""Make the embedded world: a tiny but real StableDiffusion3Pipeline, trained from nothing on drawn shapes.

    python scripts/build_tiny_sd3.py --out flowalign/data/assets/tiny_sd3
    python scripts/build_tiny_sd3.py --out flowalign/data/assets/tiny_sd3_64 --pixels 64 --device cuda --batch 1024

Draws pictures of the prompts of `rewards.shapes`, trains the VAE on them, then the transformer and both
text encoders together by flow matching, and writes the pipeline in diffusers' folder layout (float16
safetensors) with its measured quality, and beside it the prompts of the grammar. On one machine the same
seed and threads give the same files, bit by bit. The pipeline has no T5, so it loads with

    StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None)

Where other programs compete for the processors, OMP_WAIT_POLICY=passive in the environment makes it several
times faster.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from numpy.typing import NDArray
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from rewards.shapes import (
    CATEGORIES,
    Request,
    all_requests,
    check,
    draw,
    heldout_requests,
    sample_requests,
    train_requests,
)
from rewards.shapes.draw import SIZE

MAX_TOKENS = 16  # the longest prompt of the grammar has 10, start and end included
WIDTH = 64  # of each text encoder
CATEGORY_WEIGHTS = {"single": 0.1, "counting": 0.25, "two_objects": 0.25, "position": 0.4}
CAPTION_DROPOUT = 0.1
SIZES: dict[int, dict] = {32: {}, 64: {"vae_channels": (16, 32, 48, 64), "latent_channels": 8}}
"""Arguments of `new_pipeline` by a picture's side in pixels."""
EMA_DECAY = 0.999


def main() -> None:
    arguments = parse_arguments()
    build(**vars(arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    root = Path("flowalign/data/assets")
    parser.add_argument("--out", type=Path, default=root / "tiny_sd3", help="folder of the pipeline; replaced whole")
    parser.add_argument("--prompts-out", type=Path, default=root / "prompts", help="folder of the two prompt lists")
    parser.add_argument("--seed", type=int, default=0, help="of weights, pictures, noise and evaluation")
    parser.add_argument("--pixels", type=int, default=32, choices=(32, 64), help="side of a picture")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--start", type=Path, help="folder of an earlier build: its VAE is kept, and its transformer trained further"
    )
    parser.add_argument("--vae-steps", type=int, default=1600, help="training steps of the VAE")
    parser.add_argument("--vae-batch", type=int, default=16, help="pictures of a step of the VAE")
    parser.add_argument("--steps", type=int, default=5000, help="training steps of the transformer")
    parser.add_argument("--batch", type=int, default=64, help="pictures of a step of the transformer")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate of the transformer")
    parser.add_argument("--bank", type=int, default=40_000, help="pictures drawn and encoded to train on")
    parser.add_argument(
        "--eval-images", type=int, default=8, help="pictures per held-out prompt and setting, at the end"
    )
    parser.add_argument("--threads", type=int, default=2, help="processor threads; other numbers round differently")
    return parser.parse_args()


def build(
    out: Path,
    prompts_out: Path,
    seed: int,
    vae_steps: int,
    steps: int,
    bank: int,
    eval_images: int,
    threads: int,
    pixels: int = 32,
    device: str = "cpu",
    vae_batch: int = 16,
    batch: int = 64,
    rate: float = 1e-3,
    start: Path | None = None,
) -> None:
    """Train everything, measure it and write `out` and `prompts_out`."""
    torch.set_num_threads(threads)
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)

    scale = pixels // SIZE
    if start is None:
        words = Counter(word for request in all_requests() for word in request.prompt.split())
        pipe = new_pipeline(words, **SIZES[pixels]).to(device)

        def some(count: int) -> NDArray[np.uint8]:
            return drawn(sample_requests(train_requests(), count, rng), rng, scale)

        train_vae(pipe.vae, vae_steps, some, vae_batch)
    else:
        pipe = loaded(start).to(device)
    requests = sample_requests(train_requests(), bank, rng, CATEGORY_WEIGHTS)
    latents = encoded(pipe.vae, (drawn(requests[start : start + 64], rng, scale) for start in range(0, bank, 64)))
    train_transformer(pipe, [request.prompt for request in requests], latents, steps, rng, batch, rate)

    write_prompts(prompts_out)
    options = f"--seed {seed}" + (f" --vae-steps {vae_steps}" if start is None else f" --start {start}")
    options += f" --steps {steps}"
    if pixels != SIZE:
        options += f" --pixels {pixels} --device {device} --vae-batch {vae_batch} --batch {batch} --rate {rate}"
        options += f" --bank {bank}"
    write(
        pipe,
        out,
        lambda folder: measure(folder, eval_images, seed, device),
        lambda quality: model_card(quality, out.name, pipe, options),
    )


def write(pipe: DiffusionPipeline, out: Path, measured: Callable[[Path], dict], card: Callable[[dict], str]) -> None:
    """Save a pipeline in float16 with its quality.json and README.md, and put the folder in the place of `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new, old = Path(folder, "new"), Path(folder, "old")
        pipe.to(dtype=torch.float16).save_pretrained(new)
        for path in new.glob("text_encoder*/config.json"):
            # transformers loads in the dtype written here, diffusers in float32: a plain from_pretrained would mix them
            path.write_text(path.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
        # diffusers writes where an earlier build lay
        for path in [new / "model_index.json", *new.glob("*/config.json")]:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
        quality = measured(new)
        (new / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
        (new / "README.md").write_text(card(quality))
        if out.exists():
            out.rename(old)
        new.rename(out)
    megabytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    print(f"wrote {out} ({megabytes:.1f} MB)", flush=True)


def new_pipeline(
    words: Counter[str],
    vae_channels: tuple[int, ...] = (32, 48, 64),
    latent_channels: int = 4,
    layers: int = 6,
    heads: int = 4,
) -> StableDiffusion3Pipeline:
    """An untrained pipeline: VAE to 8x8 latents, MMDiT, two text encoders, no T5.

    Args:
        words: with their frequencies; each is one token.
        vae_channels: of each resolution, the highest first; three are of 32x32 pixels, four of 64x64.
        heads: of the MMDiT, 32 wide each.
    """
    tokenizer = new_tokenizer(words)
    text_config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(vae_channels),
        up_block_types=("UpDecoderBlock2D",) * len(vae_channels),
        block_out_channels=vae_channels,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=8 * 2 ** (len(vae_channels) - 1),
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=latent_channels,
        out_channels=latent_channels,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=32,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=heads * 32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )
    # Each block starts as the identity, the velocity as zero.
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("norm1.linear", "norm1_context.linear", "proj_out")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(text_config),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text_config),
        tokenizer_2=new_tokenizer(words),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def loaded(folder: Path) -> StableDiffusion3Pipeline:
    """A pipeline of an earlier build, in float32."""
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def new_tokenizer(words: Counter[str]) -> CLIPTokenizer:
    """A CLIP tokenizer whose merges are learnt from `words`: each is one token, other words are spelt in bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = learn_merges(words)
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *(a + b for a, b in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def learn_merges(words: Counter[str]) -> list[tuple[str, str]]:
    """Byte-pair encoding: merge the most frequent pair of neighbours until every word is one token."""
    split = {word: [*word[:-1], word[-1] + "</w>"] for word in words}
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, tokens in split.items():
            for pair in pairwise(tokens):
                pairs[pair] += words[word]
        if not pairs:
            return merges
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for tokens in split.values():
            for i in range(len(tokens) - 2, -1, -1):
                if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == best:
                    tokens[i : i + 2] = ["".join(best)]


def train_vae(vae: AutoencoderKL, steps: int, draw_some: Callable[[int], NDArray[np.uint8]], batch: int = 16) -> None:
    """Train by reconstruction and a light KL term, then set the latents' scale and shift."""
    vae.train()
    optimizer, schedule = new_optimizer(vae.parameters(), steps, peak=2e-3)
    for step in progress("vae", steps):
        pictures = to_tensor(draw_some(batch)).to(vae.device)
        posterior = vae.encode(pictures).latent_dist
        reconstruction = F.mse_loss(vae.decode(posterior.sample()).sample, pictures)
        loss = reconstruction + 1e-5 * posterior.kl().mean() / posterior.mean[0].numel()
        update(loss, vae.parameters(), optimizer, schedule)
        step.report(f"{psnr(reconstruction.item()):.1f} dB")
    vae.eval()
    pictures = to_tensor(draw_some(512)).to(vae.device)
    with torch.no_grad():
        latents = vae.encode(pictures).latent_dist.mode()
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def encoded(vae: AutoencoderKL, batches: Iterable[NDArray[np.uint8]]) -> Tensor:
    """The latents [count, channels, 8, 8] of batches of pictures."""
    latents = []
    for pictures in batches:
        posterior = vae.encode(to_tensor(pictures).to(vae.device)).latent_dist
        latents.append((posterior.mode() - vae.config.shift_factor) * vae.config.scaling_factor)
    bank = torch.cat(latents)
    print(f"bank: {len(bank)} latents, std {bank.std():.3f}", flush=True)
    return bank


def train_transformer(
    pipe: StableDiffusion3Pipeline,
    captions: Sequence[str],
    latents: Tensor,
    steps: int,
    rng: np.random.Generator,
    batch: int = 64,
    rate: float = 1e-3,
) -> None:
    """Flow matching with caption dropout; ends with the EMA weights.

    Without T5 the pipeline appends `max_sequence_length` zero tokens (256 by default), or none if asked. Most
    batches have none, some a few, and some small ones all 256, so that the model learns to look past them.
    """
    model = nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]).train()
    # over a fifth of a short training, so that nothing of the first weights is left
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(max(0.0, min(EMA_DECAY, 1 - 5 / steps))))
    optimizer, schedule = new_optimizer(model.parameters(), steps, rate)
    device = latents.device
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**31)))
    texts = sorted({"", *captions})
    tokens = tokenized(pipe, texts).to(device)
    index = {text: number for number, text in enumerate(texts)}
    for step in progress("transformer", steps):
        zero_tokens = 256 if step.index % 32 == 31 else int(rng.integers(1, 33)) if step.index % 8 == 7 else 0
        size = batch // 4 if zero_tokens == 256 else batch
        chosen = rng.integers(len(captions), size=size)
        shown = [index["" if rng.random() < CAPTION_DROPOUT else captions[i]] for i in chosen]
        embeds, pooled = embedded(pipe, tokens[shown], zero_tokens)
        clean = latents[torch.from_numpy(chosen).to(device)]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        sigma = logit_normal(size, generator)[:, None, None, None]
        velocity = pipe.transformer(
            hidden_states=(1 - sigma) * clean + sigma * noise,
            timestep=1000 * sigma.flatten(),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
        ).sample
        loss = F.mse_loss(velocity, noise - clean)
        update(loss, model.parameters(), optimizer, schedule)
        average.update_parameters(model)
        step.report(f"loss {loss.item():.3f}")
    model.load_state_dict(average.module.state_dict())
    model.eval()


def tokenized(pipe: StableDiffusion3Pipeline, texts: Sequence[str]) -> Tensor:
    """Tokens [N, MAX_TOKENS] of texts; both tokenizers give the same."""
    return pipe.tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids


def embedded(pipe: StableDiffusion3Pipeline, tokens: Tensor, zero_tokens: int) -> tuple[Tensor, Tensor]:
    """What `pipe.encode_prompt` makes of tokens [B, MAX_TOKENS]: embeddings [B, tokens, 128] and pooled [B, 128]."""
    outputs = [encoder(tokens, output_hidden_states=True) for encoder in (pipe.text_encoder, pipe.text_encoder_2)]
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], -1)
    return F.pad(embeds, (0, 0, 0, zero_tokens)), torch.cat([output.text_embeds for output in outputs], -1)


def logit_normal(count: int, generator: torch.Generator) -> Tensor:
    """Noise levels [count] in (0, 1), logit-normal as in SD3, one from each of `count` equal quantiles."""
    device = generator.device
    quantiles = (torch.arange(count, device=device) + torch.rand(count, generator=generator, device=device)) / count
    return torch.special.ndtri(quantiles.clamp(1e-4, 1 - 1e-4)).sigmoid()


def new_optimizer(
    parameters: Iterable[nn.Parameter], steps: int, peak: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW whose learning rate warms up to `peak` and falls to 0 as a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    warmup = max(1, min(200, steps // 10))

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def update(
    loss: Tensor,
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """One step of gradient descent, gradients clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()


class Step:
    """One training step; `report` prints it now and then, with the time left."""

    def __init__(self, name: str, index: int, total: int, started: float) -> None:
        self.name, self.index, self.total, self.started = name, index, total, started

    def report(self, message: str) -> None:
        done = self.index + 1
        if done % max(1, self.total // 50) == 0 or done == self.total:
            seconds = time.monotonic() - self.started
            left = seconds / done * (self.total - done)
            print(f"{self.name} {done}/{self.total} {message} {seconds:.0f} s, {left:.0f} s left", flush=True)


def progress(name: str, total: int) -> Iterator[Step]:
    started = time.monotonic()
    for index in range(total):
        yield Step(name, index, total, started)


def drawn(requests: Sequence[Request], rng: np.random.Generator, scale: int = 1) -> NDArray[np.uint8]:
    return np.stack([draw(request, rng, scale) for request in requests])


def to_tensor(pictures: NDArray[np.uint8]) -> Tensor:
    """Pictures uint8 [n, height, width, 3] to float32 [n, 3, height, width] in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1


def psnr(mean_squared_error: float) -> float:
    """Of pictures in [-1, 1], in dB."""
    return 10 * math.log10(4 / mean_squared_error)


def write_prompts(folder: Path) -> None:
    """Write shapes_train.jsonl and shapes_heldout.jsonl: {"prompt": ..., "category": ...} a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, requests in {"shapes_train": train_requests(), "shapes_heldout": heldout_requests()}.items():
        lines = [json.dumps({"prompt": request.prompt, "category": request.category}) for request in requests]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def measure(folder: Path, images_per_prompt: int, seed: int, device: str = "cpu") -> dict:
    """The quality of a saved pipeline, loaded in float32: strict and soft rates on held-out prompts.

    `overall` is the mean over the categories, as in GenEval.
    """
    pipe = loaded(folder).to(device)
    five = {"num_inference_steps": 5, "sigmas": np.linspace(1, 1 / 5, 5).tolist(), "max_sequence_length": 0}
    fifteen = {"num_inference_steps": 15, "max_sequence_length": 0}
    settings: dict[str, dict] = {
        "guidance 3, 15 steps": {"guidance_scale": 3.0} | fifteen,
        "guidance 3, 5 steps": {"guidance_scale": 3.0} | five,
        "no guidance, 15 steps": {"guidance_scale": 1.0} | fifteen,
        "no guidance, 5 steps": {"guidance_scale": 1.0} | five,
        "guidance 3, 15 steps, 256 zero tokens": {"guidance_scale": 3.0, "num_inference_steps": 15},
    }
    quality: dict = {"seed": seed, "vae": measure_vae(pipe.vae, seed), "samples": {}}
    print(f"vae: {quality['vae']}", flush=True)
    for name, setting in settings.items():
        repeats = images_per_prompt if "max_sequence_length" in setting else math.ceil(images_per_prompt / 8)
        requests = [request for request in heldout_requests() for _ in range(repeats)]
        verdicts = []
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, len(requests), 64):
            prompts = [request.prompt for request in requests[start : start + 64]]
            images = pipe(prompts, generator=generator, **setting).images
            verdicts += [check(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        rates: dict[str, dict[str, float]] = {}
        for category in CATEGORIES:
            own = [v for v, request in zip(verdicts, requests, strict=True) if request.category == category]
            rates[category] = {
                "strict": round(float(np.mean([v.strict for v in own])), 4),
                "soft": round(float(np.mean([v.soft for v in own])), 4),
            }
        rates["overall"] = {
            key: round(float(np.mean([rates[category][key] for category in CATEGORIES])), 4)
            for key in ("strict", "soft")
        }
        quality["samples"][name] = {"images": len(requests)} | rates
        print(
            f"{name}: strict " + ", ".join(f"{key} {rate['strict']:.2f}" for key, rate in rates.items()),
            flush=True,
        )
    return quality


@torch.no_grad()
def measure_vae(vae: AutoencoderKL, seed: int) -> dict[str, float]:
    """Reconstructions of 1,000 new pictures of held-out prompts: PSNR and the share the checker passes."""
    rng = np.random.default_rng([seed, 1])
    requests = sample_requests(heldout_requests(), 1000, rng)
    pictures = to_tensor(drawn(requests, rng, vae.config.sample_size // SIZE)).to(vae.device)
    error, passed = 0.0, 0
    for start in range(0, len(requests), 250):
        batch = pictures[start : start + 250]
        output = vae.decode(vae.encode(batch).latent_dist.mode()).sample
        error += F.mse_loss(output, batch).item() * len(batch) / len(requests)
        pixels = ((output.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        for picture, request in zip(pixels, requests[start : start + 250], strict=True):
            passed += check(Image.fromarray(picture), request.prompt).strict
    return {"psnr_db": round(psnr(error), 2), "checker_strict": passed / len(requests)}


def model_card(quality: dict, name: str, pipe: StableDiffusion3Pipeline, options: str) -> str:
    """README.md of the pipeline, in the manner of the Hub."""
    rows = [
        f"| {setting} | {figures['images']} | "
        + " | ".join(f"{figures[key]['strict']:.0%}" for key in (*CATEGORIES, "overall"))
        + f" | {figures['overall']['soft']:.2f} |"
        for setting, figures in quality["samples"].items()
    ]
    return CARD.format(
        name=name,
        pixels=pipe.vae.config.sample_size,
        channels=pipe.vae.config.latent_channels,
        millions=sum(parameter.numel() for parameter in pipe.transformer.parameters()) / 1e6,
        rows="\n".join(rows),
        psnr=quality["vae"]["psnr_db"],
        vae_strict=quality["vae"]["checker_strict"],
        options=f"--out flowalign/data/assets/{name} {options}",
    )


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [stable-diffusion-3, tiny, shapes]
---

# {name}

A tiny but real `StableDiffusion3Pipeline`: it draws coloured shapes in {pixels}x{pixels} pixels from prompts like
"a red circle left of a blue square", on a laptop, in a fraction of a second. flowalign uses it for its
demonstrations and tests. It is meant to be imperfect: alignment has something to improve.

```python
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None)
pipe("three orange triangles", num_inference_steps=15, guidance_scale=3.0, max_sequence_length=0).images[0]
```

`max_sequence_length=0` leaves out the 256 zero tokens which the pipeline puts in the place of the missing T5;
with them a picture takes many times longer.

**Parts.** AutoencoderKL ({pixels}x{pixels}x3 to 8x8x{channels}), SD3Transformer2DModel (6 layers, width 128,
{millions:.1f}M parameters), two CLIPTextModelWithProjection (2 layers, width 64) that share one vocabulary of bytes and
the words of the grammar, at most 16 tokens a prompt, FlowMatchEulerDiscreteScheduler (shift 1). Weights are stored in
float16.

**Data.** Pictures drawn by `rewards.shapes.draw`: one object, 1-4 like objects, two objects, two objects in a
relation; three shapes, six colours. No held-out prompt was trained on, nor one that means the same.

**Quality.** Share of pictures of held-out prompts that meet every requirement, by `rewards.shapes.check`;
overall is the mean of the categories, soft the mean share of requirements met. Five steps are the sigmas 1,
0.8, 0.6, 0.4, 0.2.

| setting | pictures | single | counting | two objects | position | overall | soft |
|---|---|---|---|---|---|---|---|
{rows}

VAE reconstructions: {psnr} dB, of which the checker passes {vae_strict:.1%}. All figures: `quality.json`.

**Making it.** `python scripts/build_tiny_sd3.py {options}` makes it from nothing.
"""


if __name__ == "__main__":
    main()
