"""A policy that writes, then draws: its text's loss beside a plain forward pass of transformers, and what is kept."""

from pathlib import Path

import pytest
import torch

from flowalign.app.loading import load_for_sampling
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

SMALL = [
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "rollout.steps=3",
    "rollout.sigmas=[1.0, 0.7, 0.4]",
]
SMALL += ["rollout.plan={name: all}", "algorithm.kl_weight=0", "training.previews=0", "evaluation.steps=2"]


def run_of(folder: Path, *overrides: str) -> Trainer:
    return small_run("tiny_sd3/uni_grpo", folder, *SMALL, "evaluation.sigmas=[1.0, 0.5]", *overrides)


def test_the_texts_gradient_is_that_of_grpo_on_the_pictures_rewards(tmp_path: Path) -> None:
    run = run_of(tmp_path, "algorithm.text_weight=0.5")
    batch = run.groups.draw(0).batch
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    writer, written = run.algorithm.writer, experience.rollout.written
    texts = writer.decode(written)
    assert experience.rollout.prompts == batch.prompts and len(set(texts)) > 1
    # the last step has no noise
    assert set(experience.items[:, 1].tolist()) == {0, 1}
    loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
    parameters = dict(writer.network.named_parameters())
    gradient = torch.autograd.grad(loss.mean(), list(parameters.values()))
    # a micro-batch without first steps has a gradient of the writer too, of 0: other processes wait for it
    later, _ = run.algorithm.losses(run.policy, experience, experience.items[experience.items[:, 1] == 1])
    assert not any(each.any() for each in torch.autograd.grad(later.sum(), list(parameters.values())))

    total = torch.zeros(())
    for row, text in enumerate(texts):
        ids = writer.tokenizer(f"<s>{batch.prompts[row]}<rewrite>", add_special_tokens=False).input_ids
        assert ids == written.prompt_ids[row][written.prompt_mask[row]].tolist()
        tokens = written.completion_ids[row][written.mask[row]]
        logits = writer.network(torch.cat([torch.tensor(ids), tokens])[None]).logits[0, len(ids) - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert text == writer.tokenizer.decode(tokens, skip_special_tokens=True)
        # the first update's ratio is 1; a picture has one advantage
        total = total - experience.advantage[row, 0] * log_prob.mean()
    # the mean over items is over pictures and their two steps; that of the texts is over pictures
    literal = torch.autograd.grad(0.5 * total / len(texts), list(parameters.values()))
    for name, ours, theirs in zip(parameters, gradient, literal, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_both_networks_move_and_a_run_that_is_loaded_writes_as_it_learned(tmp_path: Path) -> None:
    run = run_of(tmp_path, "training.optimizer.learning_rate=1e-2", "training.ema_decay=null")
    start = {name: value.detach().clone() for name, value in run.learner.parameters.items()}
    run.train()
    moved = {name for name, value in run.learner.parameters.items() if not torch.equal(value, start[name])}
    assert any(name.startswith("writer.") for name in moved) and any("lora" in name for name in moved)
    policy, sampling = load_for_sampling(str(tmp_path / "run"), None, "float32")
    sampled = [each.sample(["please 2 scarlet discs"], [3], **sampling.arguments()) for each in (run.policy, policy)]
    assert torch.equal(sampled[0].written.completion_ids, sampled[1].written.completion_ids)
    torch.testing.assert_close(sampled[0].trajectory.latents, sampled[1].trajectory.latents)
    policy.writer = None
    plain = policy.sample(["please 2 scarlet discs"], [3], **sampling.arguments())
    assert plain.written is None and not torch.equal(plain.trajectory.latents, sampled[1].trajectory.latents)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("rollout.share_start_noise=true", "drawn from different texts"),
        ("algorithm.step_fraction=0.5", "step_fraction"),
        ("algorithm.writer.shown=plain", "has no {text}"),
        ("rollout.overlap=2", "overlap"),
        ("algorithm.text_loss=reg_grpo", "looks at a whole group"),
        ("algorithm.text_loss=no_such", "algorithm.text_loss"),
    ],
)
def test_what_cannot_work_is_refused(change: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        run_of(tmp_path, change)
