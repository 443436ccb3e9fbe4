"""Causal videos in chunks: their trajectories, Flow-GRPO on them, and Self-Forcing against a literal version."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.algorithms.matching.self_forcing import finished
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.settings import Sampling
from flowalign.rollouts.draw import Draw
from flowalign.search.engine import Engine
from flowalign.training.building import build_policy
from rewards import Scores
from rewards.base import as_reward
from tests.flowalign.small_run import small_run

TINY = PIPELINES["skyreels_v2_df"]
CALL = TINY.call
STEPS, CHUNKS, FRAMES = 3, 2, 2
"""of each chunk; and the frames of latents in one"""


@pytest.fixture(scope="module")
def policy() -> DiffusersPolicy:
    """Its LoRA is away from zero, so that it and the start weights differ."""
    policy = DiffusersPolicy(build("skyreels_v2_df"), encode_options=TINY.encode)
    policy.add_lora(rank=2, alpha=8)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def roll(policy: DiffusersPolicy, **settings: Any) -> Rollout:
    given = {"steps": STEPS, "kernel": "cps", "eta": 1.0} | CALL | settings
    return policy.sample(["a red circle", "two blue squares"], **given)


def literal_velocity(policy: DiffusersPolicy, rollout: Rollout, x: Tensor, chunk: int, timestep: int) -> Tensor:
    """[B, C, f, H, W] of a chunk, the network called as the method's text says: the frames after it are not there."""
    seen = x[:, :, : (chunk + 1) * FRAMES]
    timesteps = torch.zeros(len(x), seen.shape[2], dtype=torch.long)
    timesteps[:, -FRAMES:] = timestep
    [call] = rollout.conditions.gather(torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long))
    network = policy.denoiser
    network._set_ar_attention(FRAMES)
    given = {"enable_diffusion_forcing": True, "fps": call["fps"], "return_dict": False}
    output = network(seen, timesteps, call["encoder_hidden_states"], **given)
    return output[0][:, :, -FRAMES:]


def test_a_chunk_is_made_of_the_clean_ones_before_it_and_of_nothing_after_it(policy: DiffusersPolicy) -> None:
    rollout = roll(policy)
    trajectory = rollout.trajectory
    # its configuration, which is saved with it, says nothing of the chunks
    assert policy.denoiser.config.num_frame_per_block == 1
    assert trajectory.latents.shape[:4] == (2, CHUNKS * STEPS + 1, 16, CHUNKS * FRAMES)
    assert trajectory.mask.tolist() == [[True, True, False] * CHUNKS] * 2
    policy.pipeline.scheduler.set_timesteps(STEPS)
    timesteps = policy.pipeline.scheduler.timesteps.tolist()
    for step in range(CHUNKS * STEPS):
        chunk, at = divmod(step, STEPS)
        own = slice(chunk * FRAMES, (chunk + 1) * FRAMES)
        x, after = trajectory.latents[:, step], trajectory.latents[:, step + 1]
        with torch.no_grad():
            velocity = literal_velocity(policy, rollout, x, chunk, timesteps[at])
        torch.testing.assert_close(trajectory.velocity[:, step], velocity, atol=1e-5, rtol=1e-5)
        # every other frame stays
        changed = (x != after).flatten(3).any(3).any(1).any(0)
        assert changed.nonzero().flatten().tolist() == list(range(own.start, own.stop))
        sigma, to = trajectory.sigmas[at], trajectory.sigmas[at + 1]
        if at == STEPS - 1:
            torch.testing.assert_close(after[:, :, own], x[:, :, own] - sigma * velocity, atol=1e-5, rtol=1e-5)
        else:
            # by cps with eta 1 the prediction of x0 gets fresh noise, of which the log-probability is
            noise = (after[:, :, own] - (1 - to) * (x[:, :, own] - sigma * velocity)) / to
            expected = torch.distributions.Normal(0, 1).log_prob(noise) - to.log()
            torch.testing.assert_close(trajectory.log_prob[:, step], expected.flatten(1).mean(1), atol=1e-4, rtol=1e-4)


def test_all_frames_at_one_level_is_the_pipelines_own_call(policy: DiffusersPolicy) -> None:
    policy.pipeline.transformer.disable_adapters()
    whole = roll(policy, chunks=1, kernel="ode", eta=None).trajectory
    embeds = policy.encoder.arguments(["a red circle", "two blue squares"], ["", ""], 1.0, None, None)
    made = policy.pipeline(
        prompt=None,
        generator=[torch.Generator().manual_seed(seed) for seed in range(2)],
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        causal_block_size=1,
        output_type="latent",
        **{name: value for name, value in CALL.items() if name != "chunks"},
        **embeds,
    )[0]
    policy.pipeline.transformer.enable_adapters()
    torch.testing.assert_close(whole.final, made, atol=1e-4, rtol=0)


def test_the_gradient_is_of_each_chunks_last_step_and_of_no_context(policy: DiffusersPolicy) -> None:
    rollout = roll(policy, until=1)
    trajectory = rollout.trajectory
    assert len(trajectory.sigmas) == 3 and trajectory.latents.shape[1] == CHUNKS * 2 + 1
    video = finished(policy, rollout, torch.arange(2))
    torch.testing.assert_close(video, trajectory.final, atol=1e-5, rtol=1e-5)
    policy.pipeline.scheduler.set_timesteps(STEPS)
    timestep, sigma = policy.pipeline.scheduler.timesteps.tolist()[1], policy.pipeline.scheduler.sigmas[1]
    chunks = []
    for chunk in range(CHUNKS):
        # finished chunks, this one after its first step, and noise
        x = torch.cat([*(c.detach() for c in chunks), trajectory.latents[:, chunk * 2 + 1, :, chunk * FRAMES :]], 2)
        own = x[:, :, chunk * FRAMES : (chunk + 1) * FRAMES]
        chunks.append(own - sigma * literal_velocity(policy, rollout, x, chunk, timestep))
    literal = torch.cat(chunks, 2)
    torch.testing.assert_close(video, literal, atol=1e-5, rtol=1e-5)
    weight, parameters = torch.randn_like(video), list(policy.trainable().values())
    made, expected = (torch.autograd.grad((weight * v).sum(), parameters) for v in (video, literal))
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


class Bright:
    name = "bright"

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(torch.tensor([sum(picture.convert("L").tobytes()) / 1e5 for picture in samples]))


def run_of(method: str, folder: Path, *own: str) -> Any:
    given = ["model.path=skyreels_v2_df", "model.encode={}", f"rollout.steps={STEPS}", "rollout.sigmas=null"]
    given += ["training.group_size=2", "training.prompts_per_iteration=1", "training.previews=0"]
    given += ["training.micro_batch_size=2", "model.lora={rank: 2, alpha: 8}", "rollout.share_start_noise=false"]
    given += [f"rollout.{side}={length}" for side, length in CALL.items()]
    given += [f"rewards=[{{name: per_frame, reward: {{name: '{__name__}:Bright'}}, frames: 2}}]"]
    tiny = DiffusersPolicy(build("skyreels_v2_df"), encode_options=TINY.encode)
    return small_run(method, folder, *given, *own, policy=tiny)


def test_a_saved_lora_makes_the_same_video_in_plain_diffusers(policy: DiffusersPolicy, tmp_path: Path) -> None:
    ours = roll(policy, kernel="ode", eta=None, guidance=2.0).trajectory.final
    policy.save(tmp_path)
    pipe = build("skyreels_v2_df")
    pipe.load_lora_weights(tmp_path)
    made = pipe(
        prompt=["a red circle", "two blue squares"],
        negative_prompt=["", ""],
        generator=[torch.Generator().manual_seed(seed) for seed in range(2)],
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        causal_block_size=FRAMES,
        ar_step=STEPS,
        output_type="latent",
        **{name: value for name, value in CALL.items() if name != "chunks"},
        **TINY.encode,
    )[0]
    torch.testing.assert_close(ours, made, atol=1e-4, rtol=0)


def test_flow_grpo_learns_from_every_chunk(tmp_path: Path) -> None:
    run = run_of("tiny_sd3/flow_grpo", tmp_path, "rollout.plan={name: all}", "algorithm.kl_weight=0.1")
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    assert experience.items.tolist() == [[row, step] for row in range(2) for step in (0, 1, 3, 4)]
    actions = run.algorithm.actions(run.policy, experience, experience.items)
    torch.testing.assert_close(actions.ratio, torch.ones(8), atol=1e-5, rtol=0)
    levels = experience.rollout.trajectory.sigmas.diff()
    torch.testing.assert_close(actions.dt, levels[[0, 1]].repeat(4))
    run.train()
    assert max(p.abs().max() for n, p in run.policy.network.named_parameters() if "lora_B" in n) > 0


def test_a_samples_loss_is_distribution_matching_weighed_by_its_reward(tmp_path: Path) -> None:
    """As the authors' lines have it, in the same places: half the squared distance to x0 less the gradient."""
    own = ["algorithm={name: self_forcing, beta: 2.0, fake: {updates: 2}}", "rollout.kernel=cps", "rollout.eta=1.0"]
    run = run_of("tiny_sd3/dmd2", tmp_path, *own, "rollout.plan={name: all}")
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    reward, items = experience.reward, experience.items
    assert reward.std() > 0
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in run.policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss, values = run.algorithm.losses(run.policy, experience, items)
    x0 = finished(run.policy, experience.rollout, items[:, 0])
    noised = experience.noised(items)
    sigma = noised.sigma.view(-1, 1, 1, 1, 1)
    at = (1 - sigma) * x0.detach() + sigma * noised.noise
    with torch.no_grad():
        with run.policy.snapshot("fake"):
            fake = at - sigma * run.policy.velocity_of(experience.clean, noised, at)
        with run.policy.reference():
            assert experience.guided.guidance == (4.0,) and experience.guided.conditions.branches == 2
            teacher = at - sigma * run.policy.velocity_of(experience.guided, noised, at)
    gradient = (fake - teacher) / (x0.detach() - teacher).abs().mean([1, 2, 3, 4], keepdim=True)
    assert gradient.abs().max() > 1e-3
    half = 0.5 * (x0 - (x0 - gradient).detach()).square().flatten(1).mean(1) * torch.exp(2.0 * reward[items[:, 0]])
    parameters = list(run.policy.trainable().values())
    theirs = torch.autograd.grad(half.sum(), parameters)
    made = torch.autograd.grad((loss / 2).sum(), parameters)
    # the authors' normaliser is inside of the square, and ours outside: their gradients are the same
    scale = max(grad.abs().max() for grad in theirs)
    for one, other in zip(made, theirs, strict=True):
        torch.testing.assert_close(one / scale, other / scale, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(values["self_forcing/weight"], torch.exp(2.0 * reward[items[:, 0]]))
    # the scores are of videos whose frames all see each other, at one level
    [call] = experience.clean.conditions.gather(noised.samples, noised.level_index)
    assert call["num_frame_per_block"] == 1 and (call["timestep"] == call["timestep"][:, :1]).all()
    run.train()
    # a reward that does not apply weighs nothing off, and a weight beyond float32 is no weight
    applied = SimpleNamespace(reward=torch.tensor([0.5, torch.nan]))
    torch.testing.assert_close(run.algorithm.credit(applied), torch.tensor([math.e, 1.0]))
    applied.reward = torch.tensor([50.0, 0.0])
    with pytest.raises(ConfigError, match=r"algorithm.beta: exp\(2 \* 50\) is no number; a smaller beta"):
        run.algorithm.credit(applied)


def test_what_does_not_go_with_chunks_is_refused(tmp_path: Path, policy: DiffusersPolicy) -> None:
    with pytest.raises(ConfigError, match="cannot make chunks 3 of 4 frames of latents; 1 or 2 would work"):
        roll(policy, chunks=3)
    with pytest.raises(ConfigError, match="chunks are made by Euler's rule"):
        roll(policy, order=2)
    with pytest.raises(ConfigError, match="rollout.chunks: self_forcing learns from videos made chunk by chunk"):
        run_of("tiny_sd3/dmd2", tmp_path, "algorithm={name: self_forcing}", "rollout.chunks=1")
    with pytest.raises(ConfigError, match="rollout.chunks: 'nft' learns from samples that are made as a whole"):
        run_of("tiny_sd3/nft", tmp_path)
    with pytest.raises(ConfigError, match="rollout.share_start_noise: true: it is of samples made as a whole"):
        run_of("tiny_sd3/flow_grpo", tmp_path, "rollout.share_start_noise=true")
    with pytest.raises(ConfigError, match="chunks: states of samples that are made in chunks are not completed"):
        roll(policy, steps=1).film(0)
    with pytest.raises(ConfigError, match="chunks: a search goes on from states of samples that are made as a whole"):
        Engine(policy, as_reward(Bright()), "a red circle", Sampling.model_validate(CALL))
    config = load(recipe("tiny_sd3/flow_grpo"), ["evaluation.chunks=2"])
    with pytest.raises(ConfigError, match="evaluation.chunks: StableDiffusion3Pipeline makes its samples as a whole"):
        build_policy(config)


def test_rlg_begins_at_its_step_of_each_chunk(policy: DiffusersPolicy) -> None:
    settings: dict[str, Any] = {"kernel": "ode", "eta": None, "rlg": 0.0}
    mixed = roll(policy, rlg_from=1, **settings)
    samples, steps = torch.arange(2).repeat_interleave(CHUNKS * STEPS), torch.arange(CHUNKS * STEPS).repeat(2)
    with torch.no_grad():
        tuned = policy.velocity(replace(mixed, rlg=1.0, rlg_from=0), samples, steps)
        with policy.reference():
            base = policy.velocity(replace(mixed, rlg=1.0, rlg_from=0), samples, steps)
    first = (steps % STEPS == 0).view(-1, 1, 1, 1, 1)
    assert (tuned - base).abs().max() > 1e-3
    torch.testing.assert_close(mixed.trajectory.velocity.flatten(0, 1), tuned.where(first, base), atol=1e-5, rtol=1e-4)


def test_moved_start_noise_is_walked_by_the_start_weights_where_they_are_frozen(policy: DiffusersPolicy) -> None:
    plain = roll(policy, kernel="ode", eta=None)
    with policy.reference():
        base = roll(policy, kernel="ode", eta=None)
    policy.start_noise, policy.frozen = lambda start: start.trajectory.latents[:, 0], True
    moved = roll(policy, kernel="ode", eta=None)
    policy.start_noise, policy.frozen = None, False
    assert moved.unmoved is not None and torch.equal(moved.unmoved, plain.trajectory.latents[:, 0])
    torch.testing.assert_close(moved.trajectory.final, base.trajectory.final, atol=1e-5, rtol=0)
    assert (moved.trajectory.final - plain.trajectory.final).abs().max() > 1e-3
