"""Methods that learn from files, on tiny pipelines of all kinds: diffusion models, edits and videos too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.algorithms.matching.base import MatchingExperience
from flowalign.algorithms.matching.inpo import inverted
from flowalign.algorithms.matching.pairs import PairMatching
from flowalign.config import load, recipe
from flowalign.data import Judged, Labels, Targets
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.registry import resolve
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from flowalign.training.building import build_policy
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
    own += [f"algorithm={{name: {method}}}"]
    own += ["algorithm.min_pairs=1"] if issubclass(resolve("algorithms", method), PairMatching) else []
    return small_run("tiny_sd3/dpo", to, *own, *overrides, **more)


def collected(run: Trainer, iteration: int = 1) -> MatchingExperience:
    batch = draw_batch(run.prompts, iteration, 2, 2, 0, False)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    assert isinstance(experience, MatchingExperience)
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
        # whose scheduler rounds timesteps down
        embeds, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False, **tiny.encode)
        made = pipe.transformer(x, timestep=(1000 * sigma[None]).long(), encoder_hidden_states=embeds).sample
        return (made - (noise - x0)).square().mean()
    # a step of the pipeline's own call from these latents to 0
    source = ImageOps.fit(Image.open(folder / "2.png").convert("RGB"), (tiny.call["width"], tiny.call["height"]))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    out = pipe(
        image=source,
        prompt=prompt,
        guidance_scale=1.0,
        latents=policy.family.pack(x),
        sigmas=[float(sigma)],
        num_inference_steps=1,
        output_type="latent",
        max_area=tiny.call["height"] * tiny.call["width"],
        _auto_resize=False,
        **tiny.encode,
        **tiny.call,
    ).images
    velocity = (x - policy.family.unpack(out, policy.family.size(pipe, tiny.call))) / sigma
    return (velocity - (noise - x0)).square().mean()


def test_inversion_returns_the_picture(folder: Path, tmp_path: Path) -> None:
    """Down again along the ODE, the nearer the smaller the steps are."""
    apart = []
    for steps in (10, 40):
        run = trainer(
            "inpo", folder / "png-pairs.jsonl", tmp_path / str(steps), f"rollout.steps={steps}", "rollout.sigmas=null"
        )
        clean = collected(run).clean
        samples = torch.arange(0, 8, 2)
        states = inverted(run.policy, clean, samples)
        x, sigmas = states[:, 0], torch.cat([clean.sigmas, torch.zeros(1)])
        assert sigmas[0] == 1
        with torch.no_grad():
            for level in range(steps):
                at = clean.noised_by(samples, torch.full((4,), level), x)
                x = x + (sigmas[level + 1] - sigmas[level]) * run.policy.velocity_of(clean, at, x)
        apart.append(float((x - clean.x0[samples]).square().mean() / clean.x0[samples].square().mean()))
    assert apart[1] < 0.01 and apart[1] < apart[0] / 4


def test_inpo_learns_from_the_states_that_inversion_reaches(folder: Path, tmp_path: Path) -> None:
    run = trainer("inpo", folder / "png-pairs.jsonl", tmp_path)
    experience = collected(run)
    noised = experience.noised(torch.tensor([[1, 0], [5, 0]]))
    levels = experience.level_index[[1, 5], 0]
    # two of a line have different levels, its two pictures the same
    assert levels[0] == levels[1] != experience.level_index[0, 0]
    states = inverted(run.policy, experience.clean, torch.tensor([0, 4]))
    torch.testing.assert_close(noised.x, states[torch.arange(2), levels], atol=1e-4, rtol=1e-4)


def test_soars_experience_leads_back_to_the_pictures(folder: Path, tmp_path: Path) -> None:
    run = trainer("soar", folder / "png.jsonl", tmp_path, "algorithm.points=3")
    experience = collected(run)
    assert experience.level_index.shape == (4, 4) and len(experience.items) == 16 == 2 * run.algorithm.items(run.config)
    first = torch.cartesian_prod(torch.arange(4), torch.tensor([0]))
    on_line, off_line = experience.noised(first), experience.noised(first + torch.tensor([0, 2]))
    # later points are above where the step led
    assert (off_line.sigma > on_line.sigma - 0.1).all()
    # on the line the noise is a normal draw, off it not the same
    assert not torch.allclose(on_line.noise, off_line.noise, atol=1e-3)
    torch.testing.assert_close(off_line.velocity, (off_line.x - off_line.x0) / off_line.s, atol=1e-4, rtol=1e-4)
    loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
    assert loss.shape == (16,)


@pytest.mark.parametrize("method", ["sft", "kto", "soar", "sdpo", "mapo", "inpo"])
def test_learning_from_files_makes_them_more_probable(method: str, folder: Path, tmp_path: Path) -> None:
    data = folder / ("png.jsonl" if method in ("sft", "soar") else "png-pairs.jsonl")
    beta = {"kto": 100, "sdpo": 300, "inpo": 300, "mapo": 0.1}.get(method)
    own = [] if beta is None else [f"algorithm.beta={beta}"]
    if method == "soar":
        own = ["algorithm.points=2"]
    run = trainer(method, data, tmp_path, "training.iterations=4", "training.optimizer.learning_rate=2e-3", *own)
    # the same pictures at the same levels by the same noise, before and after
    experience = collected(run)

    def measured() -> float:
        with torch.no_grad():
            loss, values = run.algorithm.losses(run.policy, experience, experience.items)
        return float((values["matching/error"] if method in ("sft", "soar") else loss).mean())

    before = measured()
    run.train()
    assert measured() < before
    if method == "kto":
        # at the start nobody gains
        assert run.metrics.read()[0]["kto/offset"] == 0


def test_a_preference_is_a_good_and_a_bad_target(folder: Path) -> None:
    labels = Labels.read(str(folder / "png-pairs.jsonl"))
    assert len(labels) == 6 and [record["label"] for record in labels.metadata] == [True, False] * 3
    assert Path(labels.metadata[0]["target"]) == folder / "0.png"
    for share, kinds in ((0.8, (12, 3)), (0.25, (3, 9))):
        drawn = [record["label"] for record in labels.with_share(share).metadata]
        assert (sum(drawn), len(drawn) - sum(drawn)) == kinds
    assert Targets.read(str(folder / "png.jsonl")).metadata[1]["target"] == str(folder / "1.png")


@pytest.mark.parametrize(
    "method, record, message",
    [
        ("sft", {"prompt": "a"}, "line 1: no file name under the key 'target'"),
        ("sft", {"prompt": "a", "target": "none.png"}, "line 1: no picture at"),
        ("dpo", {"prompt": "a", "chosen": "0.png"}, "line 1: no file name under the key 'rejected'"),
        ("kto", {"prompt": "a", "target": "0.png"}, "line 1: 'label' is not true"),
        ("kto", {"prompt": "a", "target": "0.png", "label": "maybe"}, "line 1: 'label' is not true"),
        ("kto", {"prompt": "a", "target": "0.png", "label": True}, "all 1 labelled targets are good; it takes bad"),
        ("soar", {"prompt": "a", "target": "0.png", "levels": "schedule"}, "algorithm.levels: a step from a point"),
    ],
)
def test_files_that_cannot_be_learned_from_are_refused(
    method: str, record: dict[str, Any], message: str, folder: Path
) -> None:
    levels = [f"algorithm.levels.name={record.pop('levels')}"] if "levels" in record else []
    file = lines(folder / "bad.jsonl", [record])
    config = load(recipe("tiny_sd3/dpo"), [f"data.prompts={file}", f"algorithm={{name: {method}}}", *levels])
    with pytest.raises(ConfigError, match=message):
        config.check(processes=1)


def test_pictures_are_refused_where_videos_are_made_and_videos_where_pictures_are(folder: Path) -> None:
    config = load(recipe("tiny_sd3/dpo"), [f"data.prompts={folder / 'gif.jsonl'}", "algorithm={name: sft}"])
    with pytest.raises(ConfigError, match=r"StableDiffusion3Pipeline makes pictures, and .*0.gif is a video"):
        build_policy(config)
    config.data.prompts = str(folder / "png.jsonl")
    with pytest.raises(ConfigError, match=r"WanPipeline makes videos, and .*0.png is a picture"):
        config.build_algorithm().check_pipeline(config, "WanPipeline")


@pytest.mark.parametrize("method", ["seppo", "rpo"])
def test_pictures_of_the_data_meet_the_policys_samples(method: str, folder: Path, tmp_path: Path) -> None:
    run = trainer(method, folder / "png.jsonl", tmp_path)
    run.train()
    experience = collected(run)
    count = len(experience.batch)
    targets = run.policy.encode([Image.open(record["target"]) for record in experience.batch.metadata])
    torch.testing.assert_close(experience.clean.x0[:count], targets)
    shared = bool((experience.level_index[:count] == experience.level_index[count:]).all())
    assert shared == (method == "seppo")
    if method == "rpo":
        assert experience.noise_seeds[:count] != experience.noise_seeds[count:]
        assert set(experience.reward.tolist()) <= {0.0, 1.0}


def test_srum_weighs_the_error_of_each_place_by_its_reward(folder: Path, tmp_path: Path) -> None:
    regions = [{"box": [0.0, 0.5, 0.5, 1.0], "reward": 1.0}, {"box": [0.5, 0.0, 1.0, 0.5], "reward": -0.5}]
    judged = {"prompt": "a red circle", "target": "0.png", "regions": regions, "background": 0.25, "anchor": "1.png"}
    run = trainer("srum", lines(folder / "judged.jsonl", [judged] * 2), tmp_path)
    experience = collected(run)
    with torch.no_grad():
        loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
        points = run.algorithm.points(run.policy, experience, experience.items)
    x0, velocity, noise = points.noised.x0, points.velocity, points.noised.noise
    height, width = (side // 2 for side in x0.shape[-2:])
    rewards = torch.full(x0.shape[-2:], 0.25)
    rewards[height:, :width], rewards[:height, width:] = 1.0, -0.5
    own = (rewards * (velocity - (noise - x0)).square()).mean((1, 2, 3))
    anchor = run.policy.encode([Image.open(folder / "1.png")])
    torch.testing.assert_close(loss, own + 0.1 * (velocity - (noise - anchor)).square().mean((1, 2, 3)))
    bad = lines(folder / "bad.jsonl", [judged | {"regions": [{"box": [0, 0, 32, 32], "reward": 1}]}])
    with pytest.raises(ConfigError, match="line 1: 'regions' is no list of records like"):
        Judged.read(str(bad))
