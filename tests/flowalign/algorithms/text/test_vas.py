"""Value Augmented Sampling: the distribution and the returns against one token at a time, and a policy that stays."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.text.critic import ValuedExperience
from flowalign.algorithms.text.vas import ValueGuide
from flowalign.errors import ConfigError
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

SMALL = ("training.group_size=4", "training.micro_batch_size=16", "rollout.max_new_tokens=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    made = small_run("tiny_lm/vas", tmp_path_factory.mktemp("vas"), *SMALL, "algorithm={name: vas, candidates: 5}")
    torch.manual_seed(0)
    torch.nn.init.normal_(made.algorithm.critic.head.weight)
    return made


def test_texts_are_drawn_by_logits_and_centred_values(run: Trainer) -> None:
    policy, value = run.policy, run.algorithm.critic
    assert isinstance(policy.guide, ValueGuide) and policy.guide.beta == 3
    rows = [policy.begin("17+25=") + policy.tokenizer("4", add_special_tokens=False).input_ids, policy.begin("3+4=")]
    ids, mask = policy.padded(rows, ["", ""], 0)
    logits = policy.last_logits(input_ids=ids, attention_mask=mask.long())
    made = policy.guide(ids, mask, logits)
    for row, own, moved in zip(rows, logits, made, strict=True):
        best = own.topk(5).indices.tolist()
        values = {}
        for token in best:
            alone = torch.tensor([[*row, token]])
            hidden = value.backbone(input_ids=alone).last_hidden_state[0, -1]
            values[token] = value.head(hidden).item()
        mean = sum(values.values()) / 5
        expected = own.clone()
        for token in best:
            expected[token] += 3 * (values[token] - mean)
        torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)


def test_the_value_learns_lambda_returns_and_the_policy_stays(run: Trainer) -> None:
    experience = run.collect(run.groups.draw(0))
    assert isinstance(experience, ValuedExperience)
    rollout, policy = experience.rollout, run.policy
    # drawn without the guide
    torch.testing.assert_close(
        policy.log_probs(rollout, torch.arange(len(rollout)))[0], rollout.log_prob, atol=1e-4, rtol=0
    )
    value, reward = run.algorithm.critic(policy, rollout, torch.arange(len(rollout))), experience.scores.value
    row, taken = 3, int(rollout.mask[3].sum())
    ids = [*policy.begin(rollout.prompts[row]), *rollout.completion_ids[row, :taken].tolist()]
    for t in range(taken):
        # the value is that of the state with the token
        before_next = torch.tensor([ids[: len(ids) - taken + t + 1]])
        hidden = run.algorithm.critic.backbone(input_ids=before_next).last_hidden_state[0, -1]
        assert value[row, t].item() == pytest.approx(run.algorithm.critic.head(hidden).item(), abs=1e-4)
    for row in range(len(rollout)):
        last = int(rollout.mask[row].sum()) - 1
        returns = reward[row].item()
        assert experience.returns[row, last].item() == pytest.approx(returns, abs=1e-5)
        for t in reversed(range(last)):
            returns = 0.05 * value[row, t + 1].item() + 0.95 * returns
            assert experience.returns[row, t].item() == pytest.approx(returns, abs=1e-4)
    before = [p.detach().clone() for p in policy.network.parameters()]
    old, *_ = run.algorithm.losses(policy, experience, experience.items)
    error = 0.5 * ((value - experience.returns) ** 2)[rollout.mask].mean()
    assert old.mean().item() == pytest.approx(error.item(), rel=1e-4)
    metrics = run.iterate()
    assert metrics["policy/gradient_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.network.parameters(), strict=True))
    drawn = policy.sample(["17+25="] * 4, range(4), max_new_tokens=4)
    policy.guide, guide = None, policy.guide
    plain = policy.sample(["17+25="] * 4, range(4), max_new_tokens=4)
    policy.guide = guide
    assert not torch.equal(drawn.log_prob, plain.log_prob)


@pytest.mark.parametrize("setting", ["rollout.continuous_batching=true", "model.draws={}", "algorithm.kl_weight=0.1"])
def test_what_a_value_does_not_go_with_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        small_run("tiny_lm/vas", tmp_path, setting)


def test_settings_of_a_loss_that_is_not_computed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_run("tiny_lm/vas", tmp_path, "algorithm.loss={name: gspo}", "algorithm.entropy_share=0.5")
    assert "algorithm.loss, algorithm.entropy_share" in caplog.text
