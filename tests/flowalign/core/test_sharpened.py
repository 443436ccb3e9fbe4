"""Sharpened advantages: literal versions over lists, and gradients by autograd."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowalign.core import sharpened
from flowalign.core.groups import group_advantage
from flowalign.core.record import Record
from flowalign.data.batches import draw_batch
from flowalign.rollouts.language import gathered_influence
from flowalign.rollouts.sampler import Sampled
from tests.flowalign.small_run import small_run

GROUP = torch.arange(4).repeat_interleave(4)
MASK = torch.arange(5) < torch.tensor([5, 3, 1, 4] * 4)[:, None]


def record(reward: Tensor, **more: Tensor) -> Record:
    log_prob = -torch.rand(16, 5, generator=torch.Generator().manual_seed(0))
    return Record(
        reward=reward,
        group=GROUP,
        mask=MASK,
        log_prob=log_prob,
        rewards=reward[None],
        reward_weights=torch.ones(1),
        **more,
    )


def verdicts() -> Tensor:
    return torch.tensor([1.0, 0, 0, 1] + [0.0] * 4 + [1.0] * 4 + [0.0, 0, 0, 1])


def test_rewards_above_a_threshold_are_squeezed_and_those_below_stretched() -> None:
    reward = torch.rand(16, generator=torch.Generator().manual_seed(1))
    changed = [
        0.8 + 0.01 * math.log(1 + r - 0.8) if r >= 0.8 else 0.8 - (math.exp(0.8 - r) - 1) / (math.e - 1)
        for r in reward.tolist()
    ]
    expected = group_advantage(torch.tensor(changed), GROUP, eps=1e-6, unbiased=True)
    torch.testing.assert_close(sharpened.asymmetric(record(reward)), expected, atol=1e-4, rtol=1e-4)


def test_unlikely_good_members_gain_at_most_half_their_advantage() -> None:
    given = record(verdicts())
    made, plain = sharpened.novel(given), group_advantage(given.reward, GROUP, eps=1e-6, unbiased=True).tolist()
    likelihood = [row[on].mean().item() for row, on in zip(given.log_prob, MASK, strict=True)]
    gains = []
    for i, advantage in enumerate(plain):
        mean = sum(likelihood[i // 4 * 4 : i // 4 * 4 + 4]) / 4
        bonus = min(max(2.5 * (1 - math.exp(likelihood[i] - mean)), 0), 0.5 * advantage) if advantage > 0 else 0
        assert made[i].item() == pytest.approx(advantage + bonus, abs=1e-5)
        gains.append(bonus)
    assert max(gains) > 0 and min(gains) == 0


def test_a_step_pays_for_the_divergence_that_follows() -> None:
    """The lines of the authors' ray_trainer.py (step_split 'length') and of `left_fill_by_next_nonzero`."""
    given = record(verdicts(), reference=-torch.rand(16, 5, generator=torch.Generator().manual_seed(2)))
    made = sharpened.process_kl(given, eta=3.0, step=2)
    assert given.reference is not None
    gap = (given.log_prob - given.reference) * MASK
    rest = gap.sum(1, keepdim=True) - gap.cumsum(1) + gap
    outcome = group_advantage(given.reward, GROUP, eps=1e-6, unbiased=True)
    scores = outcome[:, None] * MASK - rest / 3.0
    ends = (torch.arange(1, 6) % 2 == 0).repeat(16, 1) & MASK
    ends[torch.arange(16), MASK.sum(1) - 1] = True
    for row in range(16):
        for t in range(int(MASK[row].sum())):
            end = next(e for e in range(t, 5) if ends[row, e])
            assert made[row, t].item() == pytest.approx(scores[row, end].item(), abs=1e-5)
    assert not made[~MASK].any()


def test_influence_is_the_inner_product_of_gradients_by_the_head() -> None:
    torch.manual_seed(3)
    head, hidden, drawn = torch.randn(7, 3, requires_grad=True), torch.randn(6, 3), torch.randint(7, (6,))
    right = torch.tensor([True, True, False, False, True, False])
    log_probs = (hidden @ head.T).log_softmax(1)
    chosen = log_probs[torch.arange(6), drawn]
    gradients = torch.stack([torch.autograd.grad(each, head, retain_graph=True)[0].flatten() for each in chosen])
    error = torch.nn.functional.one_hot(drawn, 7) - log_probs.detach().exp()
    made = sharpened.influence_of(error, hidden, right)
    torch.testing.assert_close(made, gradients @ gradients[right].sum(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [0.2, -0.2])
def test_tokens_learn_by_what_they_do_to_right_texts(bias: float) -> None:
    influence = torch.randn(16, 5, generator=torch.Generator().manual_seed(4)) + 1
    given = record(verdicts(), influence=influence)
    made = sharpened.hidden_reward(given, bias=bias, threshold=0.5)
    plain = group_advantage(given.reward, GROUP, eps=1e-6, unbiased=True).tolist()
    dropped = 0
    for start in range(0, 16, 4):
        rows = range(start, start + 4)
        right = [i for i in rows if given.reward[i] > 0.5]
        means = [sum(influence[i][MASK[i]].tolist()) / int(MASK[i].sum()) for i in right]
        for i in rows:
            for t in range(5):
                expected = plain[i] if MASK[i, t] else 0.0
                if 0 < len(right) < 4:
                    thr = math.copysign(1.0, plain[i]) * influence[i, t].item()
                    expected *= (1 + bias * math.copysign(1.0, thr)) * (abs(thr) > 0.5 * min(means))
                    dropped += bool(MASK[i, t]) and expected == 0
                assert made[i, t].item() == pytest.approx(expected, abs=1e-5)
    assert dropped > 0


@torch.no_grad()
def test_influence_of_a_runs_texts_is_transformers_own(tmp_path: Path) -> None:
    run = small_run("tiny_lm/grpo", tmp_path, "algorithm.advantage={name: hidden_reward}", "training.group_size=4")
    batch = draw_batch(run.prompts, 0, 4, 4, 0, False)
    rollout = run.sampler.rollout(batch)
    scores = run.scorer.score(run.policy.decode(rollout), batch)
    sampled = Sampled(rollout=rollout, batch=batch, scores=scores, sampler=run.sampler, scorer=run.scorer)
    made = gathered_influence(sampled, run.processes)
    policy, right = run.policy, scores.value > 0.5
    seen = {}
    for row in range(4):
        prompt, text = rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.completion_ids[row][rollout.mask[row]]
        out = policy.network(torch.cat([prompt, text])[None], output_hidden_states=True)
        places = slice(len(prompt) - 1, len(prompt) + len(text) - 1)
        seen[row] = text, out.logits[0, places].softmax(-1), out.hidden_states[-1][0, places]
    columns = torch.cat([text for text, _, _ in seen.values()]).unique()
    for row, (text, chance, hidden) in seen.items():
        for t in range(len(text)):
            total = 0.0
            error = (columns == text[t]).float() - chance[t, columns]
            for other in (i for i in seen if right[i]):
                for k, token in enumerate(seen[other][0]):
                    there = (columns == token).float() - seen[other][1][k, columns]
                    total += float(error @ there) * float(hidden[t] @ seen[other][2][k])
            assert made[row, t].item() == pytest.approx(total, rel=1e-3, abs=1e-3)
    assert made.abs().max() > 0
