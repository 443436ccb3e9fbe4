"""Make a tiny but real CLIP preference model of the shapes world.

    python scripts/build_tiny_clip.py --out rewards/shapes/tiny_clip

A `CLIPModel` trained from nothing on drawn pictures and prompts of `rewards.shapes`: to tell a prompt's picture from
other prompts' pictures, and from one that is wrong in a single thing (a colour, a shape, the number, the places). It
is measured on the held-out prompts and written as float16 safetensors with its tokenizer, picture settings and
quality.json. It loads with AutoModel, AutoTokenizer and AutoImageProcessor, so also as `pick_score`.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

from rewards.shapes import CATEGORIES, Request, Thing, draw, heldout_requests, sample_requests, train_requests
from rewards.shapes.grammar import COLOURS, OPPOSITES, RELATIONS, SHAPES
from rewards.vision import CLIP_MEAN, CLIP_STD

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "flowalign" / "data" / "assets" / "tiny_sd3" / "tokenizer"  # made by build_tiny_sd3.py
WEIGHTS = {"single": 0.1, "counting": 0.25, "two_objects": 0.25, "position": 0.4}
SIZE, PATCH = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=96, help="prompts a step, each with a right and a wrong picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = new_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights", flush=True)
    train(model, tokenizer, options.steps, options.batch, np.random.default_rng([options.seed, 0]))
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(options.out)
    quality = {"seed": options.seed, "steps": options.steps} | measure(
        model.float(), tokenizer, np.random.default_rng([options.seed, 1])
    )
    (options.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    print(json.dumps(quality, indent=1))


def new_model(tokenizer) -> CLIPModel:
    tower = {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "image_size": SIZE}
    return CLIPModel(
        CLIPConfig(text_config=tower | text, vision_config=tower | vision | {"patch_size": PATCH}, projection_dim=64)
    )


def train(model: CLIPModel, tokenizer, steps: int, batch: int, rng: np.random.Generator) -> None:
    """CLIP's loss, with the wrong pictures as further candidates, plus a Bradley-Terry loss on each pair."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    begin, hits = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        right = sample_requests(train_requests(), batch, rng, WEIGHTS)
        wrong = [spoiled(request, rng) for request in right]
        picture, text = embed(model, tokenizer, right, right + wrong, rng)
        logits = model.logit_scale.exp() * text @ picture.T  # [batch, 2 batch]
        logits = logits.masked_fill(ambiguous(right, right + wrong), -torch.inf)
        own = torch.arange(batch)
        gap = logits[own, own] - logits[own, own + batch]
        loss = F.cross_entropy(logits, own) + F.cross_entropy(logits[:, :batch].T, own) - F.logsigmoid(gap).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(100))
        hits += (gap > 0).float().mean().item()
        if step % 100 == 0:
            seconds = time.perf_counter() - begin
            print(f"step {step}: loss {loss.item():.3f}, pairs {hits / 100:.3f}, {seconds:.0f} s", flush=True)
            hits = 0.0


def embed(
    model: CLIPModel, tokenizer, prompts: Sequence[Request], drawings: Sequence[Request], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Unit vectors of new drawings [N, D] and of prompts [M, D]."""
    pixels = torch.from_numpy(np.stack([draw(request, rng) for request in drawings])).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    tokens = tokenizer([request.prompt for request in prompts], padding=True, return_tensors="pt")
    picture = model.get_image_features((pixels - mean) / std).pooler_output
    return F.normalize(picture, dim=-1), F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)


def ambiguous(prompts: Sequence[Request], drawings: Sequence[Request]) -> Tensor:
    """[prompts, drawings] bool: a drawing made for another prompt that may show this one as well."""
    by_things: dict[tuple[Thing, ...], list[int]] = {}
    for j, drawing in enumerate(drawings):
        by_things.setdefault(tuple(sorted(drawing.things, key=str)), []).append(j)
    mask = torch.zeros(len(prompts), len(drawings), dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        for j in by_things.get(tuple(sorted(prompt.things, key=str)), []):
            drawing = drawings[j]
            same = prompt.relation is None or drawing.relation is None or places(prompt) == places(drawing)
            mask[i, j] = same and i != j
    return mask


def places(request: Request) -> tuple[Thing, str]:
    """Where things stand, the same for both ways of saying it."""
    first, last = request.things
    swap = request.relation in ("right of", "below")
    return (last, OPPOSITES[request.relation]) if swap else (first, request.relation)


def spoiled(request: Request, rng: np.random.Generator) -> Request:
    """A request that differs from this one in one thing, so that no picture shows both."""
    things, relation = request.things, request.relation
    choices = ["colour", "shape"]
    choices += ["number"] if request.category == "counting" else []
    choices += ["swap"] if len(set(things)) == 2 and set(swapped(things)) != set(things) else []
    choices += ["relation", "relation"] if relation else []
    match rng.choice(choices):
        case "number":
            number = rng.choice([n for n in (1, 2, 3, 4) if n != len(things)])
            return Request("counting", (things[0],) * int(number))
        case "relation":
            return replace(request, relation=str(rng.choice([r for r in RELATIONS if r != relation])))
        case "swap":
            return replace(request, things=swapped(things))
        case kind:
            while True:
                which = rng.integers(len(things))
                new = (
                    replace(things[which], colour=str(rng.choice(COLOURS)))
                    if kind == "colour"
                    else replace(things[which], shape=str(rng.choice(SHAPES)))
                )
                changed = tuple(new if old == things[which] else old for old in things)
                if new not in things:
                    return replace(request, things=changed)


def swapped(things: Sequence[Thing]) -> tuple[Thing, ...]:
    """Two things that have exchanged their colours."""
    first, last = things[0], things[-1]
    return (replace(first, colour=last.colour), replace(last, colour=first.colour))


@torch.no_grad()
def measure(model: CLIPModel, tokenizer, rng: np.random.Generator, pairs: int = 1000) -> dict:
    """On prompts and pictures it has not seen: how often it prefers the right picture, and finds the right prompt."""
    model.eval()
    preference = {}
    for category in CATEGORIES:
        right = sample_requests(heldout_requests(), pairs, rng, {category: 1.0})
        picture, text = embed(model, tokenizer, right, right + [spoiled(r, rng) for r in right], rng)
        gap = (text * (picture[:pairs] - picture[pairs:])).sum(dim=-1)
        preference[category] = round((gap > 0).float().mean().item(), 4)
    right = list(heldout_requests())
    picture, text = embed(model, tokenizer, right, right, rng)
    order = (text @ picture.T).masked_fill(ambiguous(right, right).T, -torch.inf).argmax(dim=0)
    found = (order == torch.arange(len(right))).float().mean().item()
    return {
        "prefers the right picture to one wrong in one thing": preference
        | {"overall": round(float(np.mean(list(preference.values()))), 4)},
        "pairs a category": pairs,
        f"finds the prompt of a picture among {len(right)}": round(found, 4),
    }


if __name__ == "__main__":
    main()
