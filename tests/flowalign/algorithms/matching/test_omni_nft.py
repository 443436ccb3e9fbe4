"""OmniNFT: against its authors' lines (core/originals/README.md), and on a tiny LTX-2."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.algorithms.matching.omni_nft import without
from flowalign.core.advantages import per_reward
from flowalign.core.record import Record
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.rollouts.draw import Draw
from rewards import Scores, Spec
from tests.flowalign.algorithms.matching.made_points import method, points
from tests.flowalign.small_run import small_run

RECORDED = json.loads((Path(__file__).parents[2] / "core" / "originals" / "omni_nft.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in RECORDED["inputs"].items()}
ROUTES = {"pictures": ["videoalign_score", "hpsv3_score_video"], "sound": ["clap_score"]}


def test_the_advantages_of_each_modality_are_its_authors() -> None:
    rewards = torch.tensor(list(RECORDED["rewards"].values()))
    record = Record(
        reward=rewards.sum(0),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask=torch.ones(6, 1, dtype=torch.bool),
        log_prob=torch.zeros(6, 1),
        rewards=rewards,
        reward_weights=torch.tensor(RECORDED["weights"]),
        names=tuple(RECORDED["rewards"]),
    )
    made = {"video": without(record, ROUTES["sound"]), "audio": without(record, ROUTES["pictures"])}
    for side, others in made.items():
        torch.testing.assert_close(per_reward(others), torch.tensor(RECORDED["advantage"][side]), atol=1e-4, rtol=1e-4)


def test_its_loss_is_its_authors() -> None:
    """The gradient is theirs where the size of an error has none; with it, it would be another."""
    algorithm = method("omni_nft", **ROUTES, beta=0.5)
    losses, velocities = [], []
    for side in ("video", "audio"):
        given = {name.removeprefix(f"{side}_"): value for name, value in GIVEN.items() if name.startswith(side)}
        velocities.append(given.pop("velocity").clone().requires_grad_())
        advantage = torch.tensor(RECORDED["advantage"][side])
        at = points(velocities[-1], sigma=torch.tensor(RECORDED["sigma"]), advantage=advantage, **given)
        losses.append(algorithm.penalized(algorithm.loss(at)[0], at)[0])
    loss = torch.stack(losses).mean(0)
    torch.testing.assert_close(loss, torch.tensor(RECORDED["theirs"]["loss"]), rtol=1e-5, atol=0)
    made = torch.autograd.grad(loss.sum(), velocities)
    for side, gradient in zip(("video", "audio"), made, strict=True):
        torch.testing.assert_close(gradient, torch.tensor(RECORDED["detached"][side]), rtol=1e-4, atol=1e-6)
        assert (gradient - torch.tensor(RECORDED["theirs"][side])).abs().max() > 0.1


class Loud:
    name = "loud"
    spec = Spec(needs=frozenset({"sound"}))

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(torch.tensor([float(abs(sound.waveform).mean()) for sound in samples]))


class Bright:
    name = "bright"

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(torch.tensor([sum(picture.convert("L").tobytes()) / 1e4 for picture in samples]))


def test_it_trains_pictures_and_sound_each_by_its_own(tmp_path: Path) -> None:
    tiny = PIPELINES["ltx2"]
    own = ["model.path=ltx2", "model.encode={}", "rollout.sigmas=null", "rollout.order=1", "rollout.steps=3"]
    own += ["training.group_size=2", "training.prompts_per_iteration=2", "training.previews=0"]
    own += [f"rollout.{side}={length}" for side, length in tiny.call.items()]
    own += ["model.lora.targets=[to_q, to_k, to_v]"]
    loud, bright = (f"'{__name__}:{name}'" for name in ("Loud", "Bright"))
    own += [f"rewards=[{{name: per_frame, reward: {{name: {bright}}}, frames: 2}}, {{name: {loud}}}]"]
    own += [f"algorithm={{name: omni_nft, pictures: [per_frame], sound: [{loud}], surgery: {{1: 0.0, 2: 0.5}}}}"]
    policy = DiffusersPolicy(build("ltx2"), encode_options=tiny.encode)
    run = small_run("tiny_sd3/nft", tmp_path, *own, policy=policy)
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    assert experience.sound_advantage.abs().min() > 0 and experience.advantage.abs().min() > 0
    # of the two members of a group each advantage is above 0 for the one whose pictures, or whose sound, scored more
    scored = [value.view(2, 2) for name, value in experience.scores.parts.items() if "/" not in name]
    for value, advantage in zip(scored, (experience.advantage, experience.sound_advantage), strict=True):
        assert ((value - value.mean(1, keepdim=True)).sign() == advantage.view(2, 2).sign()).all()
    both = run.algorithm.both(run.policy, experience, experience.items[:2])
    pictures, sounds = both["pictures"].noised, both["sound"].noised
    assert pictures.sigma.equal(sounds.sigma)
    # the sound as the network has it is what the pipeline's own inverse brings back to what it returned
    pipe, rollout = run.policy.pipeline, experience.rollout
    whole = pipe._denormalize_audio_latents(
        experience.clean.sound, pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    )
    back = pipe._unpack_audio_latents(whole, rollout.sound.shape[2], rollout.sound.shape[3])
    torch.testing.assert_close(back, rollout.sound.float())
    # the last step of the rollout, from its recorded states: its velocity, and the way to the clean sound
    trajectory, rows, last = rollout.trajectory, torch.arange(4), torch.full((4,), 2)
    state = experience.clean.at_states(rows, last, trajectory.latents[:, 2], trajectory.velocity[:, 2])
    heard = rollout.conditions.gather(rows, last)[0]["audio_hidden_states"].float()
    with torch.no_grad(), run.policy.snapshot("old"):
        made, sound = run.policy.velocities_of(experience.clean, state, replace(state, x0=heard, noise=heard))
    torch.testing.assert_close(made, trajectory.velocity[:, 2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(heard - trajectory.sigmas[2] * sound, experience.clean.sound, atol=1e-4, rtol=1e-4)
    # the pictures' gradient in the sound is each block's share of what it would be
    gradients = {}
    for share in ({}, {2: 0.0}, {1: 0.0}, {1: 1.0, 2: 0.0}, {1: 0.5, 2: 0.25}):
        network = build("ltx2").transformer
        fresh = method("omni_nft", pictures=["a"], sound=["b"], surgery=share)
        fresh.operate(network)
        sound = sounds.x.clone().requires_grad_()
        [call] = experience.clean.conditions.gather(pictures.samples, pictures.level_index)
        call["audio_hidden_states"] = sound
        latents = run.policy.family.pack(pictures.x)
        out = network(hidden_states=latents, **{k: v for k, v in call.items() if k != "extra_input"})[0]
        (gradients[str(share)],) = torch.autograd.grad(out.square().sum(), sound)
    whole, none, second, first, mixed = gradients.values()
    assert whole.abs().max() > 0 and none.abs().max() == 0
    torch.testing.assert_close(first + second, whole)
    torch.testing.assert_close(mixed, 0.5 * first + 0.25 * second)
    run.train()
    moved = {name for name, p in run.policy.network.named_parameters() if "lora_B" in name and p.abs().max() > 0}
    assert any("audio_attn1" in name for name in moved) and any("0.attn1" in name for name in moved)
    run.algorithm.settings.sound = ["claps"]
    with pytest.raises(ConfigError, match="no reward of this run is called 'claps'"):
        run.algorithm.check(run.config)


def test_it_wants_a_pipeline_with_sound() -> None:
    algorithm = method("omni_nft", pictures=["a"], sound=["b"])
    with pytest.raises(ConfigError, match="StableDiffusion3Pipeline makes none; nft works"):
        algorithm.check_pipeline(None, "StableDiffusion3Pipeline")  # type: ignore[arg-type]
