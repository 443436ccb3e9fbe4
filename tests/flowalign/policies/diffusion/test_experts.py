"""Two denoisers of one trajectory on several processes: which of them a process asks differs from step to step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.config import load
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion.experts import Experts
from flowalign.training import Trainer
from tests.flowalign.training.processes import together

HERE = Path(__file__).parents[2] / "training"


@pytest.fixture(autouse=True)
def named_by_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`recording` is imported in this process too."""
    monkeypatch.syspath_prepend(HERE)


def prepare(folder: Path, steps: dict[str, Any]) -> Path:
    """A folder with a small run of Wan 2.2 14B, and what `together` reads."""
    tiny = PIPELINES["wan22_14b"]
    build("wan22_14b").save_pretrained(folder / "model")
    prompts = [{"prompt": text} for text in ("a red circle", "two blue squares")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    values = {
        "model": {"path": str(folder / "model"), "lora": {"rank": 2, "alpha": 4}, "encode": tiny.encode},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rewards": [{"name": "per_frame", "reward": {"name": "recording:brightness"}, "frames": 2}],
        "algorithm": {"name": "flow_grpo", "loss": {"clip_range": 0.01}},
        "rollout": {"steps": 4, "guidance": 2.0} | tiny.call | steps,
        "training": {
            "iterations": 2,
            "prompts_per_iteration": 2,
            "group_size": 2,
            "micro_batch_size": 1,
            "checkpoint_every": 2,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        },
        "output": str(folder),
        "name": "run",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "launch.yaml").write_text("{}")
    return folder


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "checkpoints" / "checkpoint-000002" / "trainable.safetensors")


def test_what_was_asked_for_nothing_has_no_gradient() -> None:
    """Zeros would have Adam move it, by momentum and decay, as one process does not."""
    linear = [torch.nn.Linear(3, 3) for _ in range(2)]
    network = Experts({"high": Answering(linear[0]), "low": Answering(linear[1])})
    network.always = True
    for number in (0, 1):
        network.zero_grad()
        network(torch.ones(2, 3), torch.full((2,), number))[0].sum().backward()
        assert linear[number].weight.grad.any() and not linear[1 - number].weight.grad.any()
        network.drop_unused()
        assert linear[number].weight.grad.any() and linear[1 - number].weight.grad is None


class Answering(torch.nn.Module):
    """A network that answers as diffusers' do."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.network(hidden_states),)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_ask_different_networks_train_as_one(tmp_path: Path) -> None:
    """Where both are asked in every update, and where a plan of one step never asks one of them."""
    cases: dict[str, dict[str, Any]] = {"all": {}, "window": {"plan": {"name": "window", "start": 2, "size": 1}}}
    asked = {"all": {"transformer", "transformer_2"}, "window": {"transformer_2"}}
    for name, steps in cases.items():
        Trainer(load(prepare(tmp_path / name, steps) / "config.yaml"), progress=False).train()
    two = [prepare(tmp_path / f"{name}2", steps) for name, steps in cases.items()]
    together(2, *two)
    for name in cases:
        one, other = trained(tmp_path / name), trained(tmp_path / f"{name}2")
        # LoRA's second factor starts at zero
        assert {key.split(".")[1] for key, value in one.items() if "lora_B" in key and value.any()} == asked[name]
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, atol=2e-6, rtol=1e-3)
