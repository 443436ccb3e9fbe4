"""Richer prompts: what is sampled under them, what is learned under the plain ones, and who teaches."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.text.hinted import failed_alone
from flowalign.algorithms.text.serial import decayed
from flowalign.errors import ConfigError
from flowalign.policies.language.teacher_forcing import scored
from tests.flowalign.small_run import small_run

SMALL = ("model.lora=null", "training.group_size=4", "training.micro_batch_size=16", "rollout.max_new_tokens=4")


def test_hinted_members_are_sampled_with_the_hint_and_scored_without(tmp_path: Path) -> None:
    run = small_run("tiny_lm/hinted", tmp_path, *SMALL, "algorithm.members=2", "algorithm.when=always")
    experience = run.collect(run.groups.draw(0))
    rollout, batch, policy = experience.rollout, experience.batch, run.policy
    assert rollout.prompts == batch.prompts
    rich = [
        f"{prompt}{record['answer']}={prompt}" if row % 4 >= 2 else prompt
        for row, (prompt, record) in enumerate(zip(batch.prompts, batch.metadata, strict=True))
    ]
    again = policy.sample(rich, batch.noise_seeds, **run.config.rollout.arguments())
    assert torch.equal(again.completion_ids, rollout.completion_ids)
    # under the plain prompts each text alone has these log-probabilities
    now, _ = policy.log_probs(rollout, torch.arange(len(rollout)))
    torch.testing.assert_close(now, rollout.log_prob, atol=1e-4, rtol=0)
    plain = torch.tensor([row % 4 < 2 for row in range(len(rollout))])
    torch.testing.assert_close(rollout.log_prob[plain], again.log_prob[plain], atol=1e-4, rtol=0)
    assert (rollout.log_prob - again.log_prob)[~plain].abs().max() > 1e-3


def test_a_hint_counts_where_nobody_else_was_right() -> None:
    reward = torch.tensor([0.0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0])
    hinted = torch.tensor([False, False, False, True] * 3)
    group = torch.arange(3).repeat_interleave(4)
    changed = failed_alone(reward, hinted, group, 0.5)
    assert changed.tolist() == pytest.approx([0, 0, 0, 1, 1, 0, 0, 1 / 3, 0, 0, 0, 0])
    second = changed[4:8] - changed[4:8].mean()
    assert second[3].item() == pytest.approx(0, abs=1e-6)


def test_the_teacher_is_the_model_itself_shown_a_right_and_the_commonest_wrong_text(tmp_path: Path) -> None:
    run = small_run(
        "tiny_lm/self_distilled",
        tmp_path,
        *SMALL,
        "algorithm.template='{prompt}{right}={prompt}{wrong}={prompt}'",
        "algorithm.weight=0.5",
        "algorithm.reward_weight=0",
        "training.snapshots={slow: {decay: 1.0}}",
        "algorithm.weights=slow",
    )
    groups = run.groups.draw(0)
    experience = run.collect(groups)
    rollout, batch, policy = experience.rollout, experience.batch, run.policy
    texts, reward = policy.decode(rollout), experience.reward.tolist()
    taught = 0
    for start in range(0, 16, 4):
        members = range(start, start + 4)
        right = [texts[i] for i in members if reward[i] >= 0.5]
        wrong = [texts[i] for i in members if reward[i] < 0.5]
        for i in members:
            if not right or not wrong:
                assert experience.advantage[i].abs().max() == 0
                continue
            taught += 1
            prompt = batch.prompts[i]
            commonest = max(wrong, key=wrong.count)
            rich = f"{prompt}{right[0]}={prompt}{commonest}={prompt}"
            teacher = scored(policy, [rich], [texts[i]]).log_prob[0]
            length = int(rollout.mask[i].sum())
            ended = min(length, len(teacher))
            expected = 0.5 * (teacher[:ended] - rollout.log_prob[i][:ended])
            torch.testing.assert_close(experience.advantage[i][:ended], expected, atol=1e-3, rtol=0)
    assert taught > 0 and experience.metrics["policy/taught"] == taught / 16


def test_a_serial_group_is_one_text_cut_and_asked_for_its_answer(tmp_path: Path) -> None:
    run = small_run("tiny_lm/serial", tmp_path, *SMALL)
    experience = run.collect(run.groups.draw(0))
    rollout, batch, policy = experience.rollout, experience.batch, run.policy
    tokens = [row[mask].tolist() for row, mask in zip(rollout.completion_ids, rollout.mask, strict=True)]
    (lead,) = policy.tokenizer("=", add_special_tokens=False).input_ids
    alone = policy.sample(batch.prompts[3::4], batch.noise_seeds[3::4], **run.config.rollout.arguments())
    now, _ = policy.log_probs(rollout, torch.arange(len(rollout)))
    torch.testing.assert_close(now.where(rollout.mask, 0), rollout.log_prob, atol=1e-4, rtol=0)
    for number in range(4):
        *cut, whole = tokens[4 * number : 4 * number + 4]
        assert whole == alone.completion_ids[number][alone.mask[number]].tolist()
        thought = [token for token in whole if token not in policy.ends]
        places = [
            next(i for i, token in enumerate([*thought, -1]) if row[: i + 1] != [*thought, -1][: i + 1]) for row in cut
        ]
        assert places == sorted(places) and all(1 <= place <= max(1, len(thought)) for place in places)
        # an answer goes on after the thought's beginning and the lead, which teaches nothing
        for member, (row, place) in enumerate(zip(cut, places, strict=True)):
            assert row[:place] == thought[:place] and row[place] == lead and len(row) > place + 1
            weight = experience.loss_weight[4 * number + member][: len(row)]
            assert weight[place] == 0 and (weight != 0).sum() == len(row) - 1
        assert (experience.loss_weight[4 * number + 3][: len(whole)] != 0).all()


def test_right_answers_earn_half_of_the_right_one_before() -> None:
    reward, group = torch.tensor([0.0, 1, 0, 1, 1, 1, 1, 0]), torch.tensor([0] * 5 + [1] * 3)
    assert decayed(reward, group, 2.0).tolist() == [0, 1, 0, 0.5, 0.25, 1, 0.5, 0]


def test_what_a_template_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no 'guidance' with the prompt"):
        small_run("tiny_lm/hinted", tmp_path, "algorithm.template='{guidance}{prompt}'")
    with pytest.raises(ConfigError, match="it has no {prompt}"):
        small_run("tiny_lm/hinted", tmp_path, "algorithm.template='{answer}'")
    with pytest.raises(ConfigError, match="leave none of a group of 8"):
        small_run("tiny_lm/hinted", tmp_path, "algorithm.members=8")
    with pytest.raises(ConfigError, match="no snapshot is called 'slow'"):
        small_run("tiny_lm/self_distilled", tmp_path, "algorithm.weights=slow")
