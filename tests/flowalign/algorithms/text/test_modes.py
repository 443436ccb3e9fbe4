"""A loss on the first token, and thinkers whose solvers are rewarded: against plain forward passes and by hand."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.text.doge import of_stage
from flowalign.core.groups import group_advantage
from flowalign.errors import ConfigError
from tests.flowalign.small_run import small_run

SMALL = ("training.group_size=4", "training.micro_batch_size=16", "rollout.max_new_tokens=4")


def test_the_first_token_learns_the_mode_that_suits_the_prompt(tmp_path: Path) -> None:
    run = small_run("tiny_lm/mode_switching", tmp_path, *SMALL, "algorithm.mode_weight=0.5", "algorithm.easy=0.6")
    experience = run.collect(run.groups.draw(0))
    policy, rollout = run.policy, experience.rollout
    # groups of 3, 2, 4 and 0 right texts
    right = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    experience.reward = right
    experience.advantage = torch.zeros_like(experience.advantage)
    items = torch.arange(16)[:, None]
    made, values = run.algorithm.losses(policy, experience, items)
    long, short = (policy.tokenizer(text, add_special_tokens=False).input_ids[0] for text in "12")
    losses = []
    for row, share in zip(range(16), [0.75] * 4 + [0.5] * 4 + [1.0] * 4 + [0.0] * 4, strict=True):
        with torch.no_grad():
            logits = policy.network(torch.tensor([policy.begin(experience.batch.prompts[row])])).logits[0, -1]
        wanted = short if share >= 0.6 else long
        losses.append(-(logits[wanted] - logits[[long, short]].logsumexp(0)).item())
    mean = torch.tensor(losses) / rollout.mask.sum(1)
    torch.testing.assert_close(values["policy/mode"], mean, atol=1e-4, rtol=1e-4)
    # a token's part of the mean over all tokens
    assert made.mean().item() == pytest.approx(0.5 * sum(losses) / rollout.mask.sum().item(), rel=1e-4)
    made.mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.network.parameters())


def test_modes_of_one_token_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same token"):
        small_run("tiny_lm/mode_switching", tmp_path, "algorithm.short='10'")


def test_a_mode_that_may_be_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="their defaults work"):
        small_run("tiny_lm/mode_switching", tmp_path, "rollout.top_k=2")


def test_thinkers_earn_what_their_solvers_do_and_then_solvers_learn(tmp_path: Path) -> None:
    names = "think: '{prompt}{prompt}', template: '{prompt}{pioneer}={prompt}', solver_from: 0.5"
    run = small_run("tiny_lm/grpo", tmp_path, *SMALL, f"algorithm={{name: doge, {names}}}")
    policy, arguments = run.policy, run.config.rollout.arguments()
    for done, learning in ((0.0, (0, 1)), (0.5, (2, 3))):
        run.algorithm.progress(done)
        experience = run.collect(run.groups.draw(0))
        batch, texts = experience.batch, policy.decode(experience.rollout)
        thinkers = [row for row in range(16) if row % 4 < 2]
        asked = [2 * batch.prompts[row] for row in thinkers]
        notes = policy.sample(asked, [batch.noise_seeds[row] for row in thinkers], **arguments)
        assert policy.decode(notes) == [texts[row] for row in thinkers]
        solved = [f"{batch.prompts[row]}{texts[row]}={batch.prompts[row]}" for row in thinkers]
        answers = policy.sample(solved, [batch.noise_seeds[row + 2] for row in thinkers], **arguments)
        assert policy.decode(answers) == [texts[row + 2] for row in thinkers]
        value = experience.scores.value
        earned = torch.stack([value[row - row % 4 + 2 + row % 2] for row in range(16)])
        halves = torch.tensor([row // 2 for row in range(16)])
        expected = group_advantage(earned, halves, unbiased=True)
        teaches = torch.tensor([row % 4 in learning for row in range(16)])
        torch.testing.assert_close(experience.advantage[:, 0], expected * teaches, atol=1e-5, rtol=1e-5)


def test_rewards_of_a_stage() -> None:
    reward, second = torch.tensor([1.0, 2, 3, 4]), torch.tensor([False, False, True, True])
    group = torch.zeros(4, dtype=torch.long)
    assert of_stage(reward, second, group, False).tolist() == [3, 4, 0, 0]
    assert of_stage(reward, second, group, True).tolist() == [0, 0, 3, 4]
