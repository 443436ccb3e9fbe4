"""Every example of docs/extending.md, in a file of its own as the page says, trains for an iteration and is used."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from flowalign import registry
from flowalign.data import ASSETS
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.storage import load_pipeline
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
EXAMPLE = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```\n\n```(yaml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = {name: (code, settings) for name, code, _, settings in EXAMPLE.findall(PAGE)}
Metrics = dict[str, float]


def overrides(values: dict[str, Any], parent: str = "") -> Iterator[str]:
    """The settings of a page as of the command line; what is chosen by name is set whole."""
    for key, value in values.items():
        if isinstance(value, dict) and "name" not in value:
            yield from overrides(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}={json.dumps(value)}"


def train(folder: Path, *settings: str, **more: Any) -> tuple[Trainer, Metrics]:
    trainer = small_run("tiny_sd3/flow_grpo", folder, "training.group_size=4", *settings, whole=True, **more)
    trainer.train()
    (metrics,) = trainer.metrics.read()
    return trainer, metrics


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """What the recipe gives as it is."""
    return train(tmp_path_factory.mktemp("plain"))[1]


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's file, imported from a folder on the path."""
    name = request.param
    (tmp_path / f"{name}.py").write_text(EXAMPLES[name][0])
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def vivid(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    assert isinstance(trainer.scorer.reward, module.Vivid) and trainer.scorer.reward.colours == 4
    price = 0.01 * (metrics["reward/colours"] - 4)
    assert price > 0 and metrics["reward/mean"] == pytest.approx(metrics["reward/saturation"] - price, abs=1e-4)


def root_sde(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    assert trainer.sampler.kernel is module.root_sde
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    x, v = torch.ones(2, 3), torch.full((2, 3), 0.5)
    level, later = torch.full((2, 1), 0.8), torch.full((2, 1), 0.6)
    mean, std = module.root_sde(x, v, level, later, torch.zeros(2, 1))
    torch.testing.assert_close(mean, x - 0.2 * v)
    assert (std == 0).all()


def every_other(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    batch = trainer.groups.draw(0).batch
    assert trainer.sampler.rollout(batch).mask[0].tolist() == [False, True, False, True, False]


def ranks(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    experience = trainer.collect(trainer.groups.draw(0))
    places = {0.0, *((k / 3) ** 0.5 for k in (1, 2, 3))}
    assert all(min(abs(abs(a) - p) for p in places) < 1e-6 for a in experience.advantage.unique().tolist())


def parabola(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    assert metrics["policy/distance"] == pytest.approx(0, abs=1e-9)


def early_grpo(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    assert type(trainer.algorithm) is module.EarlyGRPO
    assert 0.125 < metrics["policy/step_weight"] < 1


def above_mean(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    experience = trainer.collect(trainer.groups.draw(0))
    reward = experience.reward.view(-1, 4)
    above = (reward - reward.mean(1, keepdim=True)).clamp(min=0) ** 2
    torch.testing.assert_close(experience.advantage, above.flatten())


def second_half(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    experience = trainer.collect(trainer.groups.draw(0))
    assert set(experience.first.tolist()) <= {2, 3, 4} and metrics["policy/kl"] == 0


def short_first(trainer: Trainer, metrics: Metrics, module: ModuleType) -> None:
    assert trainer.selection.drawn == 4
    shortest = sorted(map(len, trainer.prompts.texts))[:4]
    trainer.selection.drawn = 0
    assert [len(prompt) for prompt in trainer.groups.draw(0).batch.prompts[::4]] == shortest


USED: dict[str, Callable[[Trainer, Metrics, ModuleType], None]] = {
    used.__name__: used
    for used in (vivid, root_sde, every_other, ranks, parabola, early_grpo, above_mean, second_half, short_first)
}


def test_the_page_has_an_example_of_every_part():
    assert EXAMPLES.keys() == {*USED, "my_sd3"}


@pytest.mark.parametrize("module", USED, indirect=True)
def test_an_example_is_trained_with(module: ModuleType, plain: Metrics, tmp_path: Path):
    settings = overrides(yaml.safe_load(EXAMPLES[module.__name__][1]))
    trainer, metrics = train(tmp_path, *settings)
    assert metrics["policy/gradient_norm"] > 0
    if module.__name__ != "parabola":  # on the weights that sampled it has the gradient of PPO's clip
        assert metrics["policy/gradient_norm"] != pytest.approx(plain["policy/gradient_norm"], rel=1e-3)
    USED[module.__name__](trainer, metrics, module)


@pytest.mark.parametrize("module", ["my_sd3"], indirect=True)
def test_a_family_of_ones_own_is_trained(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    line = re.search(r'`registry.names\("models"\)\["(\w+)"\] = "([\w.]+)"`', PAGE)
    assert line is not None
    names: dict[str, Any] = {"pipe": load_pipeline(ASSETS / "tiny_sd3", torch.float32)}
    exec(EXAMPLES["my_sd3"][1], names)
    monkeypatch.setitem(registry.names("models"), *line.groups())
    policy = DiffusersPolicy(names["pipe"], encode_options={"max_sequence_length": 0})
    _, metrics = train(tmp_path, policy=policy)
    assert type(policy.family) is module.MySD3
    assert {name.split(".")[-4] for name in policy.trainable()} == {"to_q", "to_k", "to_v"}
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/gradient_norm"] > 0


@pytest.mark.parametrize(
    "settings, figure",
    [
        (["algorithm={name: tests.newcomer.MedianGRPO, late: 0.2}"], "policy/step"),
        (["algorithm={name: tests.newcomer.Margin}", "rollout.share_start_noise=false"], "margin/gap"),
        (
            [
                "algorithm={name: tests.newcomer.LastTwo}",
                "rewards=[{name: tiny_clip}]",
                "rollout.kernel=ode",
                "rollout.share_start_noise=false",
                "training.updates_per_iteration=1",
            ],
            "reward/mean",
        ),
    ],
)
def test_methods_written_from_the_page_alone_run(settings: list[str], figure: str, tmp_path: Path):
    trainer, metrics = train(tmp_path, *settings)
    assert metrics["policy/gradient_norm"] > 0 and figure in metrics
    assert trainer.learner.updates > 0 and (trainer.folder / "lora").is_dir()
