"""DMD2's discriminator: against its authors' code (originals/record_gan.py), and on tiny pipelines."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import softplus

from flowalign.algorithms.matching.adversarial import AdversarialExperience, Gan, telling_apart
from flowalign.algorithms.matching.dmd2 import DMD2, DMD2Settings
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Noised
from flowalign.rollouts.draw import Draw
from tests.flowalign.small_run import small_run

NUMBERS = load_file(Path(__file__).parent / "originals" / "gan.safetensors")
FEW = [
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.optimizer.schedule=constant",
    # more updates than the fake learns alone; they are not made here
    "training.iterations=20",
]
TEACHER = "algorithm.gan={real: teacher, steps: 2}"


class Recorded:
    """The two networks that the numbers are of."""

    asked = "fake"
    family = None

    def snapshot(self, name: str) -> Any:
        return self.reference(name)

    @contextlib.contextmanager
    def reference(self, name: str = "teacher") -> Any:
        before, self.asked = self.asked, name
        yield
        self.asked = before

    def velocity_of(self, clean: None, noised: Noised) -> Tensor:
        return NUMBERS[self.asked]

    def features_of(self, clean: None, noised: Noised) -> Tensor:
        assert self.asked == "fake"
        return noised.x.tanh()


def noised(x0: Tensor) -> Noised:
    rows = torch.arange(len(x0))
    return Noised(x0, NUMBERS["noise"], NUMBERS["sigma"], rows, rows, torch.ones(len(x0)))


def test_losses_and_gradients_are_those_of_the_authors_lines() -> None:
    algorithm, head = DMD2(DMD2Settings(gan=Gan())), NUMBERS["head"].clone().requires_grad_()
    algorithm.discriminator = lambda features: (features * head).sum((1, 2, 3))
    x0 = NUMBERS["x0"].clone().requires_grad_()
    experience = AdversarialExperience(
        batch=None,
        metrics={},
        items=None,
        clean=None,
        level_index=None,
        noise_seeds=[],
        advantage=None,
        reward=None,
        group=None,
    )
    loss, _ = algorithm.distilled(Recorded(), experience, noised(NUMBERS["x0"]), x0)
    (gradient,) = torch.autograd.grad(loss.mean(), x0)
    # the authors' are halved
    torch.testing.assert_close(gradient / 2, NUMBERS["generator/gradient"], rtol=1e-5, atol=1e-7)
    made, real = (
        algorithm.logit(Recorded(), experience, noised(samples)) for samples in (NUMBERS["x0"], NUMBERS["real"])
    )
    loss = Gan().fake_weight * telling_apart(made, real).mean()
    torch.testing.assert_close(loss.detach()[None], NUMBERS["discriminator/loss"])
    (gradient,) = torch.autograd.grad(loss, head)
    torch.testing.assert_close(gradient, NUMBERS["discriminator/gradient"])


def test_the_gradient_is_of_the_score_network_and_in_the_generator_alone(tmp_path: Path) -> None:
    """Against the chain rule, a network at a time."""
    run = small_run("tiny_sd3/dmd2", tmp_path, *FEW, TEACHER, "algorithm.gan.weight=1000")
    algorithm, policy = run.algorithm, run.policy
    experience = run.collect(run.groups.draw(0))
    parameters = run.learner.parameters
    with torch.no_grad():
        for copy in policy.snapshots.weights["fake"]:
            copy.add_(0.05 * torch.randn_like(copy))
        for parameter in policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    items = experience.items[:2]
    state = experience.states(items)
    x0 = state.clean(policy.velocity_of(experience.generator, state))
    at = x0.detach().requires_grad_()
    with policy.snapshot("fake"):
        logit = algorithm.discriminator(
            policy.features_of(experience.clean, algorithm.diffused(experience, items, state, at))
        )
        (slope,) = torch.autograd.grad(softplus(-logit).sum(), at)
    wanted = torch.autograd.grad(x0, list(policy.trainable().values()), 2000 * slope)
    on = algorithm.losses(policy, experience, items)[0]
    algorithm.settings = algorithm.settings.model_copy(update={"gan": None})
    off = algorithm.losses(policy, experience, items)[0]
    torch.testing.assert_close(on - off, 2000 * softplus(-logit), rtol=1e-3, atol=1e-2)
    (on - off).sum().backward()
    for parameter, gradient in zip(policy.trainable().values(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    assert all(parameters[name].grad is None for name in parameters if name.startswith("discriminator"))


def test_without_it_nothing_is_other_than_before(tmp_path: Path) -> None:
    """The weight of a discriminator that is never asked for its gradient cannot change the generator."""
    least = [TEACHER, "algorithm.gan.weight=1e-30", "algorithm.gan.fake_weight=1e-30"]
    runs = [
        small_run(
            "tiny_sd3/dmd2", tmp_path, *FEW, "algorithm.fake.alone=0", "training.iterations=2", *gan, f"name={name}"
        )
        for name, gan in (("without", []), ("with", least))
    ]
    for run in runs:
        run.train()
    off, on = (run.policy.snapshots.weights["fake"] for run in runs)
    assert len(on) > len(off)
    assert not runs[0].learner.modules
    for mine, theirs in zip(off, on, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_it_learns_to_tell_real_from_made_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    own = [*FEW, "algorithm.gan={real: teacher, steps: 5, fake_weight: 1.0}", "training.iterations=4"]
    own += ["algorithm.fake={updates: 3, alone: 3, learning_rate: 5e-3}", "training.checkpoint_every=1"]
    whole = small_run("tiny_sd3/dmd2", tmp_path, *own, "name=whole", whole=True)
    start = [copy.clone() for copy in whole.policy.snapshots.weights["fake"]]
    whole.train()
    fake = dict(zip(whole.learner.parameters, whole.policy.snapshots.weights["fake"], strict=True))
    head = [name for name in fake if name.startswith("discriminator")]
    moved = {name: not torch.equal(a, b) for (name, a), b in zip(fake.items(), start, strict=True)}
    assert len(head) == 6 and all(moved[name] for name in head)
    half = small_run("tiny_sd3/dmd2", tmp_path, *own, "name=half", whole=True)
    half.config.training.iterations = 2
    half.train()
    resumed = small_run("tiny_sd3/dmd2", tmp_path, *own, "name=half", resume=True, whole=True)
    resumed.train()
    for kept, again in zip(fake.values(), resumed.policy.snapshots.weights["fake"], strict=True):
        assert torch.equal(kept, again)
    # on samples that it has not seen
    algorithm, policy = whole.algorithm, whole.policy
    batch = whole.groups.draw(99).batch
    experience = algorithm.at_once(whole.sampler, whole.scorer, batch)
    with policy.snapshot("fake"), torch.no_grad():
        state = experience.states(experience.items)
        made = algorithm.logit(policy, experience, algorithm.diffused(experience, experience.items, state, state.x0))
        real = algorithm.logit(policy, experience, experience.noised_real(experience.items))
    assert real.mean() > made.mean() + 0.5
    assert float((real[:, None] > made).float().mean()) > 0.7


def test_real_pictures_come_from_files(tmp_path: Path) -> None:
    lines = []
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{colour}.png")
        lines.append(f'{{"prompt": "{number}", "target": "{colour}.png"}}')
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    files = [f"data.prompts={tmp_path}/data.jsonl", "data.where={}", "algorithm.gan={}", "rewards=[{name: jpeg_size}]"]
    run = small_run("tiny_sd3/dmd2", tmp_path, *FEW, *files)
    experience = run.collect(Draw(run.sampler, run.scorer, run.groups.draw(0).batch))
    pictures = [Image.open(record["target"]) for record in experience.batch.metadata]
    torch.testing.assert_close(experience.real, run.policy.encode(pictures))
    at = experience.noised_real(experience.items)
    assert torch.equal(at.x0, experience.real[at.samples])
    assert torch.equal(at.sigma, experience.noised(experience.items).sigma)
    assert not torch.isclose(at.noise, experience.noised(experience.items).noise).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.compile=true"], "model.compile: true: algorithm.gan needs the network's features"),
        (["algorithm.guidance=3"], "algorithm.guidance: algorithm.gan needs"),
        (["model.dtype=float16"], "model.dtype: float16: algorithm.gan needs"),
    ],
)
def test_what_hides_the_features_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe("tiny_sd3/dmd2"), [TEACHER, *changes]).check(processes=1)


def test_a_pipeline_whose_features_are_not_known_is_refused() -> None:
    algorithm = DMD2(DMD2Settings(gan=Gan(real="teacher")))
    config = load(recipe("tiny_sd3/dmd2"), [TEACHER])
    with pytest.raises(ConfigError, match="algorithm.gan: SanaPipeline is not one of the pipelines"):
        algorithm.check_pipeline(config, "SanaPipeline")
    algorithm.check_pipeline(config, "FluxPipeline")
    DMD2(DMD2Settings()).check_pipeline(config, "SanaPipeline")
    assert "shards" not in algorithm.combines and "shards" in DMD2(DMD2Settings()).combines
