"""Methods that learn from files, on tiny pipelines of all kinds: diffusion models, edits and videos too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor

from flowalign.actors.draw import Draw
from flowalign.algorithms.matching.base import Experience
from flowalign.data.batches import draw_batch
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.tools.tiny_pipelines import PIPELINES, build
from flowalign.training import Trainer
from rewards.shapes import draw, parse
from tests.flowalign.small_run import small_run

PROMPTS = ["a red circle", "a blue square", "two green triangles"]


def lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings and clips, and lists that name them."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for i, prompt in enumerate(PROMPTS):
        Image.fromarray(draw(parse(prompt), rng)).save(folder / f"{i}.png")
        noise = rng.integers(0, 255, (6, 16, 32, 3)).astype(np.uint8)
        first, *rest = (Image.fromarray(frame) for frame in noise)
        first.save(folder / f"{i}.gif", save_all=True, append_images=rest)
    for kind in ("png", "gif"):
        pairs = [{"chosen": f"{i}.{kind}", "rejected": f"{i - 1}.{kind}".replace("-1", "2")} for i in range(3)]
        lines(folder / f"{kind}-pairs.jsonl", [{"prompt": p} | pair for p, pair in zip(PROMPTS, pairs, strict=True)])
        lines(folder / f"{kind}.jsonl", [{"prompt": p, "target": f"{i}.{kind}"} for i, p in enumerate(PROMPTS)])
    edits = [{"prompt": p, "image": "2.png", "chosen": f"{i}.png", "rejected": "2.png"} for i, p in enumerate(PROMPTS)]
    lines(folder / "edits.jsonl", edits[:2])
    return folder


def trainer(method: str, data: Path, to: Path, *overrides: str, **more: Any) -> Trainer:
    own = ["training.prompts_per_iteration=2", "training.group_size=2", f"data.prompts={data}"]
    return small_run("tiny_sd3/dpo", to, *own, f"algorithm={{name: {method}}}", *overrides, **more)


def collected(run: Trainer, iteration: int = 1) -> Experience:
    batch = draw_batch(run.prompts, iteration, 2, 2, 0, False)
    experience = run.algorithm.collect(run.actor, Draw(run.actor, batch))
    assert isinstance(experience, Experience)
    return experience


@pytest.mark.parametrize("name, kind", [("sd15", "png-pairs"), ("flux_kontext", "edits"), ("wan", "gif-pairs")])
def test_dpos_errors_are_those_of_the_plain_network(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    """Of the noise for a diffusion model; for edits beside their source; of videos."""
    tiny = PIPELINES[name]
    policy = DiffusersPolicy(build(name), encode_options=tiny.encode)
    size = [f"rollout.{side}={value}" for side, value in tiny.call.items()]
    run = trainer(
        "dpo", folder / f"{kind}.jsonl", tmp_path, "model.encode={}", "rollout.sigmas=null", *size, policy=policy
    )
    experience = collected(run)
    count = len(experience.batch)
    both = torch.cat([experience.items, experience.items + torch.tensor([count, 0])])
    with torch.no_grad():
        points = run.algorithm.points(policy, experience, both)
    noised = points.noised
    for row in range(2 * count):
        prompt, x0, noise = experience.batch.prompts[row % count], noised.x0[row][None], noised.noise[row][None]
        sigma = noised.sigma[row]
        with torch.no_grad():
            error = literal(name, policy, prompt, x0, noise, sigma, folder)
        assert float(points.error[row]) == pytest.approx(float(error), rel=2e-4)
    assert not torch.equal(noised.x0[0], noised.x0[count])
    assert torch.equal(noised.noise[0], noised.noise[count])


def literal(
    name: str, policy: DiffusersPolicy, prompt: str, x0: Tensor, noise: Tensor, sigma: Tensor, folder: Path
) -> Tensor:
    """The error by the network's own call, with the forward process of the model's training."""
    pipe, tiny = policy.pipeline, PIPELINES[name]
    if name == "sd15":
        scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
        kept = scheduler.alphas_cumprod
        levels = (1 - kept).sqrt() / (kept.sqrt() + (1 - kept).sqrt())
        timestep = (levels - sigma).abs().argmin()
        x = scheduler.add_noise(x0, noise, timestep[None])
        embeds, _ = pipe.encode_prompt(prompt, "cpu", 1, False)
        return (pipe.unet(x, timestep, encoder_hidden_states=embeds).sample - noise).square().mean()
    x = (1 - sigma) * x0 + sigma * noise
    if name == "wan":
        embeds, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False, **tiny.encode)
        made = pipe.transformer(x, timestep=1000 * sigma[None], encoder_hidden_states=embeds).sample
        return (made - (noise - x0)).square().mean()
    # a step of the pipeline's own call from these latents to 0
    source = Image.open(folder / "2.png").convert("RGB").resize((tiny.call["width"], tiny.call["height"]))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    out = pipe(
        image=source,
        prompt=prompt,
        latents=policy.family.pack(x),
        sigmas=[float(sigma)],
        num_inference_steps=1,
        output_type="latent",
        max_area=tiny.call["height"] * tiny.call["width"],
        _auto_resize=False,
        **tiny.call,
    ).images
    velocity = (x - policy.family.unpack(out, policy.family.size(pipe, tiny.call))) / sigma
    return (velocity - (noise - x0)).square().mean()
