"""The direct engine on videos: gradients of rewards of their frames."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer
from rewards import Scores, Spec
from rewards.frames import PerFrame


class Red:
    """Mean red of a picture."""

    name = "red"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(torch.tensor([sum(image.getdata(0)) / len(image.getdata(0)) / 255 for image in samples]))

    def score_pixels(self, pixels: Tensor, prompts: Any, metadata: Any) -> Scores:
        return Scores(pixels[:, 0].mean((1, 2)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    build("wan").save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("a red circle\ntwo blue squares\n")
    return folder


def trainer(folder: Path, output: Path, algorithm: dict[str, Any], **training: Any) -> Trainer:
    sampling = {"steps": 2, "guidance": 1.0, "batch_size": 4, "kernel": "ode", "eta": 0.0} | PIPELINES["wan"].call
    values = {
        "model": {"path": str(folder / "model"), "lora": {"rank": 2, "alpha": 4}, "encode": PIPELINES["wan"].encode},
        "data": {"prompts": str(folder / "prompts.txt")},
        "rewards": [{"name": "per_frame", "reward": {"name": "tiny_clip"}, "frames": 2}],
        "algorithm": algorithm,
        "rollout": sampling,
        "evaluation": {"prompts": None},
        "training": {"prompts_per_iteration": 2, "group_size": 2, "micro_batch_size": 4, "previews": 0} | training,
        "output": str(output),
        "name": "run",
    }
    values["training"]["optimizer"] = {"learning_rate": 0.1, "warmup_updates": 0, "schedule": "constant"}
    return Trainer(values, reward=PerFrame(Red(), frames=2, attenuation=0.5), progress=False)


def test_the_gradient_is_that_of_the_chosen_frames(model: Path, tmp_path: Path) -> None:
    """Through all steps: that of a literal walk and of the first and the last frame, which PerFrame weighs alike."""
    run = trainer(model, tmp_path, {"name": "draft", "last_steps": 2}, iterations=1)
    policy: DiffusersPolicy = run.policy
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.trainable().values():
        parameter.data.normal_(generator=generator, std=0.2)
    experience = run.collect(run.groups.draw(0))
    rollout, trained = experience.rollout, list(policy.trainable().values())
    x, sigmas = rollout.trajectory.latents[:, 0], rollout.trajectory.sigmas
    rows = torch.arange(len(x))
    for step in range(2):
        x = x + (sigmas[step + 1] - sigmas[step]) * policy.velocity(rollout, rows, torch.full_like(rows, step), x)
    videos = (policy.family.decode(policy.pipeline, x) / 2 + 0.5).clamp(0, 1)
    reward = (videos[:, 0, 0].mean((1, 2)) + videos[:, 0, -1].mean((1, 2))) / 2
    literal = torch.autograd.grad(-reward.sum(), trained)
    losses, _ = run.algorithm.losses(policy, experience, experience.items)
    torch.testing.assert_close(losses, -reward)
    for own, expected in zip(torch.autograd.grad(losses.sum(), trained), literal, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-7, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in literal) > 1e-5


@pytest.mark.parametrize("algorithm", [{"name": "draft"}, {"name": "instruct_video", "strength": 1.0}])
def test_a_video_model_is_trained_by_the_gradient_of_its_frames(
    algorithm: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    run = trainer(model, tmp_path, algorithm, iterations=1)
    before = [parameter.clone() for parameter in run.policy.trainable().values()]
    run.train()
    [line] = run.metrics.read()
    assert 0 < line["reward/mean"] < 1 and line["policy/gradient_norm"] > 1e-6
    moved = [float((a - b).abs().max()) for a, b in zip(run.policy.trainable().values(), before, strict=True)]
    assert max(moved) > 1e-3 and (run.folder / "lora").is_dir()
