"""UI-S1's advantage against its authors' lines, and traces as an environment that a policy plays."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flowalign.core.record import Record
from flowalign.core.token_advantages import semi_online
from flowalign.errors import ConfigError
from flowalign.policies.environments import Trace
from tests.flowalign.small_run import small_run


def theirs(
    rewards: list[list[float]], group: list[int], gamma: float, weight: float, divided: bool
) -> list[list[float]]:
    """`compute_step_discounted_returns`, `episode_norm_reward` and `step_norm_reward` of uis1/core_uis1.py."""
    returns = []
    for row in rewards:
        made, running = [0.0] * len(row), 0.0
        for t in reversed(range(len(row))):
            if row[t] >= 0.5:
                running = row[t] + gamma * running
                made[t] = running
            else:
                running, made[t] = 0.0, row[t]
        returns.append(made)

    def normal(value: float, pool: list[float]) -> float:
        spread = np.std(pool, ddof=1) + 1e-6 if divided and len(pool) > 1 else 1.0
        return float((value - np.mean(pool)) / spread)

    found = []
    for i, row in enumerate(rewards):
        mates = [j for j, other in enumerate(group) if other == group[i]]
        episodes = [sum(rewards[j]) for j in mates for _ in rewards[j]]
        steps = [[returns[j][t] for j in mates if t < len(rewards[j])] for t in range(len(row))]
        found.append([normal(sum(row), episodes) + weight * normal(returns[i][t], steps[t]) for t in range(len(row))])
    return found


@pytest.mark.parametrize("divided", [False, True])
def test_turns_and_episodes_are_compared_as_by_the_authors(divided: bool) -> None:
    rewards = [[1.0, 0, 1, 1], [1.0, 1], [0.0, 1, 1], [1.0, 1, 1], [0.0, 0], [1.0, 1, 0]]
    group, tokens = [4, 4, 4, 1, 1, 1], 2
    mask = torch.tensor([[t < tokens * len(row) for t in range(8)] for row in rewards])
    turn = torch.arange(8).expand(6, 8) // tokens
    steps = torch.full((6, 8), torch.nan)
    for i, row in enumerate(rewards):
        for k, value in enumerate(row):
            steps[i, tokens * k + tokens - 1] = value
    total = torch.tensor([sum(row) for row in rewards])
    record = Record(
        reward=total,
        group=torch.tensor(group),
        mask=mask,
        log_prob=torch.zeros(6, 8),
        rewards=total[None],
        reward_weights=torch.ones(1),
        steps=steps,
        turn=turn.where(mask, -1),
    )
    made = semi_online(record, gamma=0.6, weight=0.8, scale="group" if divided else "none")
    expected = theirs(rewards, group, 0.6, 0.8, divided)
    for i, row in enumerate(expected):
        for t in range(8):
            assert made[i, t].item() == pytest.approx(row[t // tokens] if mask[i, t] else 0.0, abs=1e-4)


def test_a_trace_goes_on_past_one_wrong_turn() -> None:
    record = {"trace": [{"action": "up", "observation": "a"}, {"action": "left", "observation": "b"}, {"action": "ok"}]}
    trace = Trace(patches=1)
    assert trace.reset("go", record) == "go"
    assert tuple(trace.step(" up "))[:3] == ("a", 1.0, False)
    assert tuple(trace.step("down"))[:3] == ("left\nb", 0.0, False)
    assert tuple(trace.step("ok"))[:3] == ("", 1.0, True)
    strict = Trace(patches=0, pattern="<act>(.*?)</act>")
    strict.reset("go", record)
    assert strict.step("<act>up</act>").done is False and strict.step("left").done is True
    with pytest.raises(ConfigError, match="needs a list of actions under 'trace'"):
        Trace().reset("go", {})


def test_a_policy_learns_from_traces(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}+1=", "trace": [{"action": str(i + 1), "observation": "+"}] * 2} for i in range(4)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = small_run(
        "tiny_lm/turns_gigpo",
        tmp_path,
        f"data.prompts={tmp_path / 'traces.jsonl'}",
        "environment={name: trace, turns: 2, patches: 1}",
        "algorithm.advantage={name: semi_online, gamma: 0.5}",
    )
    experience = run.collect(run.groups.draw(0))
    assert experience.rollout.turn.max() == 1 and experience.advantage.abs().max() > 0
