"""A run that several commands look at."""

from pathlib import Path
from typing import Any

import pytest

from flowalign.training import Trainer
from tests.flowalign.training.small_run import settings


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations on the tiny pipeline, evaluated before and after; a test that writes into it takes a copy."""
    evaluation = {"prompts": "shapes_heldout", "limit": 4, "samples_per_prompt": 2, "save_samples": 4, "steps": 3}
    changes: dict[str, Any] = {"training.iterations": 2, "training.optimizer.learning_rate": 3e-2}
    changes |= {"training.previews": 0, "training.checkpoint_every": 0, "evaluation": evaluation}
    return Trainer(settings(tmp_path_factory.mktemp("trained"), **changes), progress=False).train().folder
