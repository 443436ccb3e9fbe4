from pathlib import Path

import pytest

from flowalign.training import Trainer
from tests.flowalign.training.small_run import settings

PHASES = ["base evaluation 6/6", "sampling 8/8", "scoring", "update 2/2", "evaluation 6/6"]


def test_it_names_the_phase_and_how_far_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluation = {"prompts": "shapes_heldout", "limit": 6, "steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    changes = {"training.iterations": 2, "training.previews": 0, "evaluation": evaluation, "rollout.batch_size": 4}
    Trainer(settings(tmp_path, **changes)).train()
    shown = capfd.readouterr().err.replace("\r", "\n")
    assert "2 prompts x 4 = 8 samples an iteration, updates from them: 2; 6 held-out samples before, and" in shown
    places = [shown.find(f"run: {phase}") for phase in PHASES]
    assert -1 not in places and places == sorted(places), shown
    last = shown.splitlines()[-1]
    assert "2/2 [" in last and "reward/mean=" in last
