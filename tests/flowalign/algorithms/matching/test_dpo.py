"""Diffusion-DPO on the shipped tiny Stable Diffusion 3, against a slow and literal version of it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.app.gallery.runs import read_run
from flowalign.config import load, recipe
from flowalign.data import Preferences
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from rewards.shapes import draw, parse
from tests.flowalign.small_run import small_run

PROMPTS = ["a red circle", "a blue square", "two green triangles"]


@pytest.fixture
def votes(tmp_path: Path) -> Path:
    """Pairs of a drawing of the prompt and one of another prompt."""
    rng = np.random.default_rng(0)
    with open(tmp_path / "votes.jsonl", "w") as lines:
        for i, prompt in enumerate(PROMPTS):
            for name, text in (("chosen", prompt), ("rejected", PROMPTS[i - 1])):
                Image.fromarray(draw(parse(text), rng)).save(tmp_path / f"{name}{i}.png")
            record = {"prompt": prompt, "chosen": f"chosen{i}.png", "rejected": f"rejected{i}.png", "rater": "Ada"}
            lines.write(json.dumps(record) + "\n")
    return tmp_path / "votes.jsonl"


def trainer(votes: Path, *overrides: str, resume: bool = False) -> Trainer:
    own = [
        *("training.iterations=2", "training.prompts_per_iteration=2", "training.group_size=2"),
        *(f"data.prompts={votes}", "algorithm.beta=1000", "algorithm.min_pairs=1"),
    ]
    return small_run("tiny_sd3/dpo", votes.parent, *own, *overrides, resume=resume)


def test_pictures_are_encoded_to_latents_that_decode_to_them(tiny_policy, votes: Path) -> None:
    policy = tiny_policy()
    images = [Image.open(votes.parent / f"chosen{i}.png") for i in range(3)]
    back = policy.decode_latents(policy.encode(images, batch_size=2))
    for image, other in zip(images, back, strict=True):
        assert np.abs(np.asarray(image).astype(int) - np.asarray(other)).mean() < 6


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_conditions_of_noised_samples_are_those_of_a_rollout(tiny_policy, votes: Path, guidance: float) -> None:
    """At a rollout's noise levels, though no network ran to learn them."""
    policy = tiny_policy()
    sigmas = [1.0, 0.7, 0.2]
    rollout = policy.sample(PROMPTS, [1, 2, 3], steps=3, sigmas=sigmas, guidance=guidance)
    final = rollout.trajectory.final
    policy.forwards = 0
    clean = policy.clean(PROMPTS, final, [1, 2, 3], levels=torch.tensor(sigmas), guidance=guidance)
    assert policy.forwards == 0
    # each sample at a level of its own
    rows, steps = torch.arange(3), torch.tensor([2, 0, 1])
    noised = clean.noised(rows, steps, [1, 2, 3])
    torch.testing.assert_close(noised.sigma, rollout.trajectory.sigmas[steps])
    x = rollout.trajectory.latents[rows, steps]
    with torch.no_grad():
        mine = policy.velocity_of(clean, noised, x)
    torch.testing.assert_close(mine, rollout.trajectory.velocity[rows, steps], atol=1e-5, rtol=0)
    # the denoiser is itself again
    again = policy.sample(PROMPTS, [1, 2, 3], steps=3, sigmas=sigmas, guidance=guidance)
    assert torch.equal(again.trajectory.final, rollout.trajectory.final)


def literal_logits(run: Trainer, votes: Path, batch, beta: float) -> torch.Tensor:
    """One network call a picture, with the transformer and the VAE called directly."""
    pipe, logits = run.policy.pipeline, []
    for i in range(len(batch)):
        record = batch.metadata[i]
        gains = []
        for key in ("chosen", "rejected"):
            pixels = torch.from_numpy(np.array(Image.open(record[key]))).permute(2, 0, 1)[None] / 127.5 - 1
            x0 = pipe.vae.encode(pixels).latent_dist.mean
            x0 = (x0 - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
            experience = run.collect(Draw(run.sampler, run.scorer, batch))
            noised = experience.noised(experience.items)
            noise, sigma = noised.noise[i], noised.sigma[i]
            x = (1 - sigma) * x0 + sigma * noise
            embeds, _, pooled, _ = pipe.encode_prompt(
                batch.prompts[i], None, None, do_classifier_free_guidance=False, max_sequence_length=0
            )
            errors = []
            for adapter in (True, False):
                (pipe.transformer.enable_adapters if adapter else pipe.transformer.disable_adapters)()
                made = pipe.transformer(
                    x, timestep=1000 * sigma[None], encoder_hidden_states=embeds, pooled_projections=pooled
                ).sample
                errors.append(((noise - x0) - made).pow(2).mean())
            pipe.transformer.enable_adapters()
            gains.append(errors[1] - errors[0])
        logits.append(beta / 2 * (gains[0] - gains[1]))
    return torch.stack(logits)


def test_the_loss_is_the_literal_one(votes: Path) -> None:
    run = trainer(votes)
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
        batch = draw_batch(run.prompts, 0, 3, 2, 0, False)
        experience = run.collect(Draw(run.sampler, run.scorer, batch))
        loss, values = run.algorithm.losses(run.policy, experience, experience.items)
        logits = literal_logits(run, votes, batch, beta=1000)
    assert logits.abs().min() > 0.1
    torch.testing.assert_close(values["preference/logit"], logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(loss, (1 + (-logits.double()).exp()).log().float(), rtol=1e-3, atol=1e-3)


def test_noise_and_level_are_the_pairs_and_levels_are_spread_over_its_members(votes: Path) -> None:
    run = trainer(votes)
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 3, 2, 0, True)))
    rejected = experience.items + torch.tensor([len(experience.batch), 0])
    noised = experience.noised(torch.cat([experience.items, rejected]))
    chosen, rejected = noised.sigma.chunk(2)
    assert torch.equal(chosen, rejected)
    assert torch.equal(*noised.noise.chunk(2)) and not torch.equal(noised.noise[0], noised.noise[1])
    assert not torch.equal(*noised.x0.chunk(2))
    low, high = chosen.view(3, 2).unbind(1)
    assert (low < 0.5).all() and (high > 0.5).all() and (low > 0).all() and (high < 1).all()


def test_training_starts_at_log_two_and_turns_to_the_chosen_ones(votes: Path) -> None:
    run = trainer(votes, "training.iterations=8", "training.updates_per_iteration=1", f"algorithm.heldout={votes}")
    assert run.algorithm.measure(run.sampler) == {"preference/accuracy": 0.5}
    forwards = run.policy.forwards
    run.train()
    first, *_, last = run.metrics.read()
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["preference/logit"] == 0 and first["preference/accuracy"] == 0.5
    assert last["policy/loss"] < 0.5 and last["preference/accuracy"] > 0.5
    assert run.algorithm.measure(run.sampler)["preference/accuracy"] == 1
    # 2 pairs x 2 levels x 2 pictures, policy and reference, and the rollout checked before; measuring does not count
    assert run.policy.forwards - forwards == 8 * 2 * 2 * 2 * 2 + 8


def test_an_evaluation_tells_the_accuracy_and_shows_groups_without_advantages(votes: Path) -> None:
    small = ["evaluation.prompts=shapes_heldout", "evaluation.limit=2", "evaluation.samples_per_prompt=1"]
    run = trainer(votes, *small, f"algorithm.heldout={votes}", "training.iterations=1", "training.previews=1")
    run.train()
    first, last = run.evaluator.lines.read()
    assert first["preference/accuracy"] == 0.5 and last["preference/accuracy"] > 0.5
    read = read_run(run.folder, "run")
    assert not read.notes and [moment.iteration for moment in read.previews] == [0, 1]
    assert all(member["advantage"] is None for member in read.previews[0].groups[0]["members"])
    assert read.series["held-out preference/accuracy"][0] == (0, 0.5)


def test_a_resumed_run_is_the_uninterrupted_one(votes: Path) -> None:
    whole = trainer(votes, "name=whole")
    whole.train()
    half = trainer(votes, "name=half", "training.checkpoint_every=1")
    half.config.training.iterations = 1
    half.train()
    resumed = trainer(votes, "name=half", "training.checkpoint_every=1", resume=True)
    assert resumed.iteration == 1
    resumed.train()
    assert all(torch.equal(whole.learner.parameters[name], value) for name, value in resumed.learner.parameters.items())


def test_preferences_may_be_one_raters(votes: Path) -> None:
    assert len(Preferences.read(str(votes), {"rater": ["Ada"]})) == 3
    with pytest.raises(ConfigError, match="no preference is left where"):
        Preferences.read(str(votes), {"rater": ["Bob"]})


def test_prompts_without_pictures_are_refused_before_a_model_loads(tmp_path: Path) -> None:
    config = load(recipe("tiny_sd3/dpo"), ["data.prompts=shapes_train"])
    with pytest.raises(ConfigError, match="no preferences at 'shapes_train'"):
        config.check(processes=1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a cat"}\n')
    config = load(recipe("tiny_sd3/dpo"), [f"data.prompts={tmp_path / 'prompts.jsonl'}"])
    with pytest.raises(ConfigError, match="line 1: no file name under the key 'chosen'"):
        config.check(processes=1)
