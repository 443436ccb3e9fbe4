"""Rewards of latents and of sounds in training: what a sampler hands over, and that nothing is decoded for nobody."""

import numpy as np
import pytest
import torch

from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.runs.metrics import MetricsFile
from rewards import Latents, WeightedSum, score
from rewards.latent import DiNa
from rewards.shapes.mass import ShapesMass
from rewards.shapes.reward import ShapesReward
from rewards.sound import CLAP
from tests.flowalign.small_run import small_run
from tests.rewards import published

QUICK = ["training.group_size=4", "training.previews=0"]


@pytest.fixture(scope="module")
def dina(tmp_path_factory):
    return DiNa(of="latents", **published.dina(tmp_path_factory.mktemp("dina")))


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    return CLAP(published.clap(tmp_path_factory.mktemp("clap")), device="cpu")


def decoded(trainer):
    """How often the VAE has decoded, counted from now on."""
    counts = []
    trainer.policy.pipeline.vae.decoder.register_forward_hook(lambda *_: counts.append(1))
    return counts


def trained(trainer):
    """Whether training moved a weight."""
    before = [own.clone() for own in trainer.policy.network.parameters()]
    trainer.train()
    return any(not torch.equal(own, was) for own, was in zip(trainer.policy.network.parameters(), before, strict=True))


@pytest.mark.parametrize("recipe", ["flow_grpo", "dense_grpo", "draft"])
def test_latents_are_scored_in_training_and_nothing_is_decoded(dina, recipe, tmp_path):
    trainer = small_run(f"tiny_sd3/{recipe}", tmp_path, *QUICK, reward=dina)
    counts = decoded(trainer)
    assert trained(trainer) and not counts
    assert MetricsFile(tmp_path / "run" / "metrics.jsonl").read()[0]["reward/mean"] != 0
    rollout = trainer.policy.sample(["a red circle", "two blue squares"], steps=5)
    samples = trainer.sampler.decode(rollout)
    assert torch.equal(samples[1].latents.values, rollout.trajectory.final[1])
    values = score(dina, samples, rollout.prompts, [{}] * 2).value
    whole = Latents(rollout.trajectory.final, samples[0].latents.vae)
    torch.testing.assert_close(values, dina.score_latents(whole, rollout.prompts).value, atol=1e-4, rtol=1e-4)
    assert not counts


def test_a_reward_of_pictures_beside_it_gets_the_same_samples_decoded_and_people_see_them(dina, tmp_path):
    own = ["evaluation.prompts=shapes_heldout", "evaluation.limit=1", "evaluation.save_samples=1"]
    own += ["training.previews=1", "training.prompts_per_iteration=1"]
    both = WeightedSum([dina, ShapesReward()], [0.1, 1.0])
    trainer = small_run("tiny_sd3/flow_grpo", tmp_path, *QUICK, *own, reward=both)
    trainer.train()
    [line] = MetricsFile(tmp_path / "run" / "metrics.jsonl").read()
    assert 0 <= line["reward/shapes"] <= 1
    assert line["reward/mean"] == pytest.approx(0.1 * line["reward/dina"] + line["reward/shapes"], abs=1e-5)
    samples = trainer.sampler.decode(trainer.policy.sample(["a red circle"], steps=5))
    assert samples[0].picture.size == (32, 32) and samples[0].latents.values.shape == (4, 8, 8)
    evaluations = MetricsFile(tmp_path / "run" / "evaluations.jsonl").read()
    assert all("all/dina" in line and "all/statistics/brightness" in line for line in evaluations)
    assert list((tmp_path / "run" / "samples").rglob("*.png"))
    with pytest.raises(ConfigError, match="some score latents and others pixels"):
        small_run("tiny_sd3/draft", tmp_path / "draft", *QUICK, reward=WeightedSum([dina, ShapesMass()]))


def test_a_sound_is_what_the_pipeline_would_return(clap, tmp_path):
    tiny = PIPELINES["ltx2"]
    policy = DiffusersPolicy(build("ltx2"), encode_options=tiny.encode)
    own = ["model.path=ltx2", "model.encode={}", "rollout.share_start_noise=false", "rollout.sigmas=null"]
    own += [f"rollout.{side}={length}" for side, length in tiny.call.items()]
    trainer = small_run("tiny_sd3/flow_grpo", tmp_path, *QUICK, *own, reward=clap, policy=policy)
    rollout = trainer.policy.sample(["a dog", "a bell"], [3, 4], steps=2, **tiny.call)
    sounds = [sample.sound for sample in trainer.sampler.decode(rollout)]
    # the same call of the pipeline alone
    pipe = build("ltx2")
    arguments = policy.family.arguments(1.0)
    made = pipe(
        ["a dog", "a bell"],
        num_inference_steps=2,
        generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)],
        output_type="pt",
        **arguments,
        **tiny.call,
        **tiny.encode,
    )
    for sound, wave in zip(sounds, made.audio, strict=True):
        np.testing.assert_allclose(sound.waveform, wave.float().numpy(), atol=1e-4)
        assert sound.rate == pipe.vocoder.config.output_sampling_rate
    assert trained(trainer)
    [line] = MetricsFile(tmp_path / "run" / "metrics.jsonl").read()
    assert -1 <= line["reward/mean"] <= 1 and line["reward/std"] > 0


def test_sounds_that_nobody_makes_are_refused_before_anything_loads(clap, tmp_path):
    named = ["rewards=[{name: per_frame, reward: {name: clap, model: nowhere}}]"]
    with pytest.raises(ConfigError, match="rewards: 'per_frame' scores sound, and StableDiffusion3Pipeline makes none"):
        small_run("tiny_sd3/flow_grpo", tmp_path, *QUICK, *named)
    policy = DiffusersPolicy(build("ltx2"), encode_options=PIPELINES["ltx2"].encode)
    named = ["model.path=ltx2", "rewards=[{name: clap, model: nowhere}]"]
    with pytest.raises(ConfigError, match="rollout.share_start_noise: 'clap' scores sound"):
        small_run("tiny_sd3/flow_grpo", tmp_path, *QUICK, *named, policy=policy)
    with pytest.raises(ConfigError, match="'clap' scores sound, and this model makes texts"):
        small_run("tiny_lm/grpo", tmp_path, named[1])
