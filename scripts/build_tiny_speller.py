"""Make the second embedded world: a tiny StableDiffusion3Pipeline, trained from nothing on drawn words.

    python scripts/build_tiny_speller.py

Draws pictures of the words of `rewards.spelling`, trains as `build_tiny_sd3.py` does, and writes the pipeline with its
measured quality, and beside it the prompts. Every tenth word is held out: no training of any kind sees it.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from build_tiny_sd3 import encoded, new_pipeline, to_tensor, train_transformer, train_vae, write
from diffusers import StableDiffusion3Pipeline
from numpy.typing import NDArray
from PIL import Image

from rewards import score
from rewards.spelling import SpellingReward, draw, prompt_of, words

ASSETS = Path(__file__).parent.parent / "flowalign" / "data" / "assets"
PROMPTS = {"train": 1000, "heldout": 100}
FIVE = np.linspace(1, 1 / 5, 5).tolist()
SETTINGS = {
    "guidance 3, 15 steps": {"guidance_scale": 3.0, "num_inference_steps": 15},
    "guidance 3, 5 steps": {"guidance_scale": 3.0, "num_inference_steps": 5, "sigmas": FIVE},
    "no guidance, 15 steps": {"guidance_scale": 1.0, "num_inference_steps": 15},
    "no guidance, 5 steps": {"guidance_scale": 1.0, "num_inference_steps": 5, "sigmas": FIVE},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny_speller", help="folder of the pipeline")
    parser.add_argument("--prompts-out", type=Path, default=ASSETS / "prompts", help="folder of the two prompt lists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=2000, help="training steps of the VAE, 16 pictures each")
    parser.add_argument("--steps", type=int, default=6000, help="training steps of the transformer, 64 pictures each")
    parser.add_argument("--bank", type=int, default=40_000, help="pictures drawn and encoded to train on")
    parser.add_argument("--eval-images", type=int, default=4, help="pictures per held-out prompt and setting")
    parser.add_argument("--threads", type=int, default=1, help="processor threads; other numbers round differently")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    rng = np.random.default_rng(given.seed)
    train, heldout = split()

    sentence = prompt_of("").split()
    pipe = new_pipeline(Counter(sentence), vae_channels=(24, 32, 48), latent_channels=8, layers=4, heads=3)
    train_vae(pipe.vae, given.vae_steps, lambda count: drawn(rng.choice(train, count), rng))
    shown = rng.choice(train, given.bank).tolist()
    latents = encoded(pipe.vae, (drawn(shown[start : start + 64], rng) for start in range(0, given.bank, 64)))
    train_transformer(pipe, [prompt_of(word) for word in shown], latents, given.steps, rng)

    for name, own in {"train": train, "heldout": heldout}.items():
        lines = [json.dumps({"prompt": prompt_of(word), "text": word}) + "\n" for word in own[: PROMPTS[name]]]
        (given.prompts_out / f"spelling_{name}.jsonl").write_text("".join(lines))
    prompts = [prompt_of(word) for word in heldout[: PROMPTS["heldout"]]]
    options = f"--seed {given.seed} --vae-steps {given.vae_steps} --steps {given.steps}"
    write(
        pipe,
        given.out,
        lambda folder: measure(folder, prompts, given.eval_images, given.seed),
        lambda quality: model_card(quality, options),
    )


def split() -> tuple[list[str], list[str]]:
    """The words to train on and those held out, both shuffled."""
    shuffled = np.random.default_rng(0).permutation(words()).tolist()
    count = len(shuffled) // 10
    return shuffled[count:], shuffled[:count]


def drawn(some: Sequence[str], rng: np.random.Generator) -> NDArray[np.uint8]:
    return np.stack([draw(word, rng) for word in some])


def measure(folder: Path, prompts: Sequence[str], repeats: int, seed: int) -> dict:
    """The quality of a saved pipeline, loaded in float32: what can be read of held-out prompts."""
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    quality: dict = {"seed": seed, "vae": measure_vae(pipe, seed), "samples": {}}
    print(f"vae: {quality['vae']}", flush=True)
    for name, setting in SETTINGS.items():
        generator = torch.Generator().manual_seed(seed)
        images, asked = [], [prompt for prompt in prompts for _ in range(repeats)]
        for start in range(0, len(asked), 50):
            some = asked[start : start + 50]
            images += pipe(some, generator=generator, max_sequence_length=0, **setting).images
        quality["samples"][name] = {"images": len(images)} | rates(images, asked)
        print(name, quality["samples"][name], flush=True)
    return quality


def rates(images: Sequence[Image.Image], prompts: Sequence[str]) -> dict[str, float]:
    scores = score(SpellingReward(), images, prompts, [{}] * len(prompts))
    return {part: round(scores.parts[part].mean().item(), 4) for part in ("strict", "soft")}


@torch.no_grad()
def measure_vae(pipe: StableDiffusion3Pipeline, seed: int) -> dict[str, float]:
    """What can be read of reconstructions of 500 new pictures of held-out words."""
    rng = np.random.default_rng([seed, 1])
    some = rng.choice(split()[1], 500).tolist()
    output = pipe.vae.decode(pipe.vae.encode(to_tensor(drawn(some, rng))).latent_dist.mode()).sample
    images = pipe.image_processor.postprocess(output)
    return rates(images, [prompt_of(word) for word in some])


def model_card(quality: dict, options: str) -> str:
    """README.md of the pipeline, in the manner of the Hub."""
    rows = [
        f"| {name} | {own['images']} | {own['strict']:.0%} | {own['soft']:.2f} |"
        for name, own in quality["samples"].items()
    ]
    return CARD.format(rows="\n".join(rows), vae=quality["vae"]["strict"], options=options)


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [stable-diffusion-3, tiny, text-rendering]
---

# tiny_speller

A tiny but real `StableDiffusion3Pipeline` that writes: words of three and four letters in 32x32 pixels, from prompts
like 'a sign that says "bat"'. flowalign trains it where a conclusion should not rest on counting shapes. It is meant to
be imperfect: alignment has something to improve.

```python
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None)
pipe('a sign that says "bat"', num_inference_steps=15, guidance_scale=3.0, max_sequence_length=0).images[0]
```

**Parts.** AutoencoderKL (32x32x3 to 8x8x8), SD3Transformer2DModel (4 layers, width 96), two
CLIPTextModelWithProjection (2 layers, width 64) that read the quoted word letter by letter. Weights are stored in
float16.

**Data.** Words drawn by `rewards.spelling.draw`: consonant, vowel, consonant, some with a vowel at the end; 19 letters
of 5 x 7 pixels, anywhere in the picture. Every tenth word is held out, no training sees it.

**Quality.** Share of pictures of held-out prompts in which the word can be read to the letter and there is next to no
other ink (`rewards.spelling`); soft is 1 - normalised edit distance.

| setting | pictures | strict | soft |
|---|---|---|---|
{rows}

Of the VAE's reconstructions {vae:.1%} can be read so. All figures: `quality.json`.

**Making it.** `python scripts/build_tiny_speller.py {options}` makes it from nothing.
"""


if __name__ == "__main__":
    main()
