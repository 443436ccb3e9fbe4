"""A small real league: equal budgets, a table that can be read back, and no run done twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.evaluation.power import detectable
from flowalign.evaluation.statistics import ranks
from flowalign.training.league import WORLDS, LeagueBudget, _plot, _rank, could_have_seen, judged, run_league

SMALL = [
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.updates_per_iteration=1",
    "training.previews=0",
    "evaluation.limit=2",
    "evaluation.where={category: [single]}",
]
CONFIGS = [recipe("tiny_sd3/flow_grpo_early"), recipe("tiny_sd3/single_step")]


def league(folder: Path) -> Path:
    return run_league(CONFIGS, 2, LeagueBudget.parse("forwards=150"), folder, "tiny_clip", SMALL, 1, first_seed=5)


def test_every_run_uses_up_the_same_budget_and_none_is_done_twice(tmp_path: Path, capsys) -> None:
    table = league(tmp_path)
    results = json.loads((tmp_path / "league.json").read_text())["results"]
    assert set(results) == {"base", "flow_grpo_early", "single_step"}
    for name in ("flow_grpo_early", "single_step"):
        first, second = results[name]
        assert first["forwards"] >= 150 and second["forwards"] >= 150
        # an iteration of two groups of four takes at most 60 more
        assert max(first["forwards"], second["forwards"]) < 150 + 60
        assert first["kl"] > 0 and first != second
        metrics = [json.loads(line) for line in (tmp_path / f"{name}-seed5" / "metrics.jsonl").open()]
        assert metrics[0]["learning_rate"] > metrics[-1]["learning_rate"] > 0
    assert results["base"][0]["kl"] == 0
    text = table.read_text()
    assert text.startswith("| algorithm | rank | strict |") and "| base | " in text
    assert text.count("\n") == 7 and "With 2 seeds each, a difference of " in text
    assert all(name in text for name in ("base", "flow_grpo_early", "single_step"))
    assert (tmp_path / "league.png").stat().st_size > 1000

    done = {path: path.read_bytes() for path in tmp_path.glob("*-seed*/metrics.jsonl")}
    assert len(done) == 4
    # one run is lost: it alone is done again, to the same figures
    (tmp_path / "flow_grpo_early-seed6" / "league.json").unlink()
    assert league(tmp_path).read_text() == text
    assert {path: path.read_bytes() for path in done} == done
    # figures of other settings would stand in the table as this league's
    with pytest.raises(
        ConfigError, match=r"flow_grpo_early-seed5 was trained with other settings \(.*group_size: 4 -> 6\)"
    ):
        run_league(
            CONFIGS,
            2,
            LeagueBudget.parse("forwards=150"),
            tmp_path,
            None,
            [*SMALL, "training.group_size=6"],
            1,
            first_seed=5,
        )
    with pytest.raises(
        ConfigError, match="flow_grpo_early-seed5 was judged with --pictures 1 and --panel tiny_clip; the same"
    ):
        run_league(CONFIGS, 2, LeagueBudget.parse("forwards=150"), tmp_path, "tiny_clip", SMALL, 3, first_seed=5)
    # as a league of an earlier version has it
    (tmp_path / "base.json").write_text(json.dumps(results["base"][0]))
    with pytest.raises(ConfigError, match="base.json: nothing of the start weights as flow_grpo_early is judged"):
        league(tmp_path)


def test_each_way_of_judging_has_its_own_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """nft's recipe samples by a solver of second order, the demo's by Euler's rule."""
    configs = [recipe("tiny_sd3/demo"), recipe("tiny_sd3/nft")]
    budget = LeagueBudget.parse("forwards=50")
    with pytest.raises(ConfigError, match=r"demo and nft .* \(sampling.order 1 against 2\); .*--any-sampling takes"):
        run_league(configs, 1, budget, tmp_path, None, SMALL, 2)
    table = run_league(configs, 1, budget, tmp_path, None, SMALL, 2, any_sampling=True).read_text()
    results = json.loads((tmp_path / "league.json").read_text())["results"]
    assert set(results) == {"base, as demo", "base, as nft", "demo", "nft"}
    assert all(results[name][0]["kl"] == 0 and f"| {name} | " in table for name in ("base, as demo", "base, as nft"))
    assert results["base, as demo"][0]["diversity"] != results["base, as nft"][0]["diversity"]
    assert set(json.loads((tmp_path / "base.json").read_text())) == {judged(load(path, SMALL)) for path in configs}
    # the same solver and another reward: their figures are not to be ranked
    other = tmp_path / "other.yaml"
    other.write_text(f"extends: {configs[0]}\nrewards: [{{name: jpeg_size}}]\n")
    message = (
        r"demo and other .* \(rewards shapes \(strict_weight 0.5\) against jpeg_size\); --set evaluation.rewards=... or"
    )
    with pytest.raises(ConfigError, match=message):
        run_league([configs[0], other], 1, budget, tmp_path, None, SMALL, 2)


def test_a_league_says_which_difference_it_could_have_seen() -> None:
    """The spread of two algorithms with deviations 0.1 and 0.2 of three seeds is pooled: 4 degrees of freedom."""
    rows = {"base": [0.2], "one": [0.4, 0.5, 0.6], "two": [0.3, 0.5, 0.7]}
    sentence = could_have_seen({name: [{"reward": value} for value in values] for name, values in rows.items()})
    assert sentence is not None and f"a difference of {detectable(0.025**0.5, 3):.3f} (" in sentence
    assert could_have_seen({"one": [{"reward": 0.5}]}) is None


def test_ranks_have_intervals_over_prompts_and_seeds() -> None:
    """What is better on every prompt and seed is first for certain; what differs by a prompt or a seed is not."""
    rng = np.random.default_rng(0)
    noise = rng.random((3, 40)).tolist()
    better, other = [[v + 0.5 for v in row] for row in noise], [row[::-1] for row in noise]
    found = ranks({"last": [[v - 1 for v in row] for row in noise], "one": noise, "best": better, "other": other})
    assert found["best"] == (1, 1) and found["last"] == (4, 4)
    assert found["one"] == found["other"] == (2, 3)
    # alike: the better rank for both
    assert ranks({"a": [[0.5, 0.5]], "b": [[0.5, 0.5]]}) == {"a": (1, 1), "b": (1, 1)}


def test_what_was_judged_on_other_prompts_has_no_rank(caplog) -> None:
    results = {"base": [{"by_prompt": [0.5, 0.5]}], "other": [{"by_prompt": [0.5]}]}
    _rank(results)
    assert "no ranks" in caplog.text and not any("rank" in rows[0] for rows in results.values())
    # a league that was begun before there were ranks
    _rank({"base": [{"by_prompt": [0.5]}], "old": [{}]})


def test_another_world_has_its_own_prompts_and_reward() -> None:
    config = load(recipe("tiny_sd3/demo"), [*WORLDS["relations"]])
    assert [entry.name for entry in config.rewards] == ["relations"]
    assert config.data.where == {} and config.evaluation.prompts == "relations_heldout"
    config.check(processes=1)
    config = load(recipe("tiny_sd3/demo"), [*WORLDS["spelling"]])
    assert config.model.path == "tiny_speller" and config.evaluation.prompts == "spelling_heldout"
    config.check(processes=1)
    with pytest.raises(ConfigError, match="did you mean 'relations'"):
        run_league(CONFIGS, 1, LeagueBudget.parse("forwards=10"), Path("nowhere"), None, [], 1, "relation")


def test_rewards_without_a_part_strict_are_drawn_too(tmp_path: Path) -> None:
    _plot({"base": [{"reward": 0.1}], "one": [{"reward": 0.2}, {"reward": 0.3}]}, tmp_path / "league.png")
    assert (tmp_path / "league.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "text",
    [
        *("forwards", "minutes=3", "seconds=long", "seconds=inf", "seconds=nan", "seconds=-1"),
        *("forwards=inf", "forwards=nan", "reward_calls=0.5"),
    ],
)
def test_a_budget_that_makes_no_sense_says_what_would(text: str) -> None:
    with pytest.raises(ConfigError, match="give seconds=60"):
        LeagueBudget.parse(text)


def test_a_league_of_a_recipe_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a league compares models of pictures"):
        run_league([recipe("tiny_lm/grpo")], 1, LeagueBudget.parse("forwards=50"), tmp_path, None, [], 1)
