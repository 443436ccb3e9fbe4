"""The page does what the trainer does: the same pictures, rewards and weights, bit for bit, without flowalign."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flowalign.config import load
from flowalign.training import Trainer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "flow_grpo_in_one_page.py"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_update_equals_the_trainers(page: ModuleType, tmp_path: Path) -> None:
    settings = {"iterations": 1, "prompts_per_iteration": 4, "updates_per_iteration": 1, "previews": 0}
    overrides = [f"training.{key}={value}" for key, value in settings.items()]
    overrides += ["evaluation.prompts=null", f"output={tmp_path}", "name=run"]
    trainer = Trainer(load(ROOT / "configs" / "tiny_sd3" / "short_flow_grpo.yaml", overrides), progress=False)
    before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
    trainer.train()
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())

    pipeline = page.load(seed=0)
    own = {name: p for name, p in pipeline.transformer.named_parameters() if p.requires_grad}
    assert own.keys() == before.keys() and all(torch.equal(own[name], before[name]) for name in own)
    [rewards] = page.train(pipeline, iterations=1, prompts_per_iteration=4, updates=1, seed=0)

    assert rewards.mean().item() == metrics["reward/mean"]
    assert rewards.std(correction=0).item() == metrics["reward/std"]
    assert any(not torch.equal(own[name], before[name]) for name in own)
    for name, p in trainer.policy.trainable().items():
        assert torch.equal(own[name], p), name


def test_runs_without_flowalign() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    code = (
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__'); assert 'flowalign' not in sys.modules"
    )
    arguments = [str(SCRIPT), "--iterations", "1", "--prompts", "2", "--updates", "1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("iteration 0: mean reward 0.")
