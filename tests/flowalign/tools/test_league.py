"""A small real league: equal budgets, a table that can be read back, and no run done twice."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.config import recipe
from flowalign.errors import ConfigError
from flowalign.tools.league import Budget, _plot, diversity, run_league
from flowalign.training.evaluation import Evaluated

SMALL = [
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.updates_per_iteration=1",
    "training.previews=0",
    "evaluation.limit=2",
    "evaluation.where={category: [single]}",
]
CONFIGS = [recipe("tiny_sd3/demo"), recipe("tiny_sd3/single_step")]


def league(folder: Path) -> Path:
    return run_league(CONFIGS, 2, Budget.parse("forwards=150"), folder, "tiny_clip", SMALL, 1)


def test_every_run_uses_up_the_same_budget_and_none_is_done_twice(tmp_path: Path, capsys) -> None:
    table = league(tmp_path)
    results = json.loads((tmp_path / "league.json").read_text())["results"]
    assert set(results) == {"base", "demo", "single_step"}
    for name in ("demo", "single_step"):
        first, second = results[name]
        assert first["forwards"] >= 150 and second["forwards"] >= 150
        # an iteration of two groups of four takes at most 60 more
        assert max(first["forwards"], second["forwards"]) < 150 + 60
        assert first["kl"] > 0 and first != second
        metrics = [json.loads(line) for line in (tmp_path / f"{name}-seed0" / "metrics.jsonl").open()]
        assert metrics[0]["learning_rate"] > metrics[-1]["learning_rate"] > 0
    assert results["base"][0]["kl"] == 0
    text = table.read_text()
    assert text.count("\n") == 5 and all(name in text for name in ("base", "demo", "single_step"))
    assert (tmp_path / "league.png").stat().st_size > 1000

    done = {path: path.read_bytes() for path in tmp_path.glob("*-seed*/metrics.jsonl")}
    assert len(done) == 4
    # one run is lost: it alone is done again, to the same figures
    (tmp_path / "demo-seed1" / "league.json").unlink()
    assert league(tmp_path).read_text() == text
    assert {path: path.read_bytes() for path in done} == done


def test_diversity_is_the_distance_of_pictures_of_one_prompt() -> None:
    def flat(level: int) -> Image.Image:
        return Image.fromarray(np.full((4, 4, 3), level, np.uint8))

    pictures = [flat(0), flat(51), flat(0), flat(0)]
    result = Evaluated(["a", "a", "b", "b"], [{}] * 4, [0] * 4, [0.0] * 4, {}, pictures, [0, 1, 2, 3])
    # 0.2 apart, and not at all
    assert diversity(result) == pytest.approx(0.1)


def test_rewards_without_a_part_strict_are_drawn_too(tmp_path: Path) -> None:
    _plot({"base": [{"reward": 0.1}], "one": [{"reward": 0.2}, {"reward": 0.3}]}, tmp_path / "league.png")
    assert (tmp_path / "league.png").stat().st_size > 1000


@pytest.mark.parametrize("text", ["forwards", "minutes=3", "seconds=long"])
def test_a_budget_that_makes_no_sense_says_what_would(text: str) -> None:
    with pytest.raises(ConfigError, match="give seconds=60"):
        Budget.parse(text)
