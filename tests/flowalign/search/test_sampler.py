"""A search as the sampler of a rollout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.config.sections import RolloutSearch
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from flowalign.search.sampler import SearchSampler
from rewards import score
from samplers import derive_seed
from tests.flowalign.small_run import small_run

SEARCH = "rollout.search={name: best_of_n, budget: samples=3}"


def test_nft_learns_from_the_best_of_n(tmp_path: Path) -> None:
    sampling = ["rollout.steps=2", "rollout.sigmas=null", "training.group_size=2"]
    trainer = small_run("tiny_sd3/nft", tmp_path, SEARCH, *sampling)
    sampler: Any = trainer.sampler
    kept: list[tuple[Rollout, Batch]] = []
    found = sampler.found

    def watched(batch: Batch) -> Rollout:
        rollout = found(batch)
        # each is the best of three plain samples of its own noises, of the weights that sampled
        for row in (0, 5):
            first = derive_seed(batch.seeds[row], batch.noise_seeds[row])
            plain = sampler.policy.sample([batch.prompts[row]] * 3, range(first, first + 3), steps=2)
            scores = score(trainer.scorer.reward, plain.images, plain.prompts, [batch.metadata[row]] * 3).value
            expected = plain.trajectory.final[int(scores.argmax())]
            torch.testing.assert_close(rollout.trajectory.final[row], expected, atol=1e-5, rtol=0)
        kept.append((rollout, batch))
        return rollout

    sampler.found = watched
    trainer.train()
    [(_, batch)] = kept
    [line] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    # three of each search, and the one that is learned from
    assert line["reward_calls"] == 4 * len(batch) == 32
    assert line["search/gain"] > 0


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("flow_grpo", [SEARCH], "rollout.search: 'flow_grpo' learns from the steps that its samples took"),
        ("tdm", [SEARCH], "rollout.search: 'tdm' learns from the steps"),
        ("raft", ["rollout.search={name: evosarch}"], "did you mean 'evosearch'"),
        ("raft", ["rollout.search={budget: seconds=3}"], "rollout.search.budget"),
        ("raft", ["rollout.search={name: fk_steering, strengt: 3}"], "did you mean 'strength'"),
        ("raft", [SEARCH, "rollout.overlap=2"], "overlap: 1 works"),
        ("raft", [SEARCH, "algorithm.stochastic=true"], "algorithm.stochastic: false works"),
    ],
)
def test_searches_that_cannot_be_learned_from_are_refused(name: str, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(recipe(f"tiny_sd3/{name}"), overrides).check(processes=1)


def test_methods_that_follow_gradients_do_not_sample_for_a_training() -> None:
    with pytest.raises(ConfigError, match="rollout.search: das follows gradients"):
        SearchSampler(RolloutSearch(name="das"), sampler=None, scorer=None)  # type: ignore[arg-type]
