"""The gradient window, against finite differences, closed forms, and autograd through the pipeline's own call."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusion3Pipeline, StableDiffusionXLPipeline
from torch import Tensor, nn

from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.window import GradientWindow
from rewards.shapes.clip import TinyCLIP
from samplers import KERNELS, ode
from samplers.trajectory import Recorder

PROMPTS = ["a red circle", "two blue squares"]
SIGMAS = [1.0, 0.6, 0.3]


class LinearFlow:
    """v = A x on vectors of 3, with a trajectory of its own."""

    def __init__(self, steps: int, kernel=ode, eta: float = 0.0) -> None:
        self.model = self._bare = nn.Linear(3, 3, bias=False)
        self.start = torch.randn(4, 3)
        sigmas = torch.linspace(1, 0, steps + 1)
        recorder = Recorder(self.start, sigmas, kernel, torch.full((steps,), eta), range(4))
        with torch.no_grad():
            for _ in range(steps):
                recorder.step(self.model(recorder.x))
        self.rollout = SimpleNamespace(trajectory=recorder.trajectory(), kernel=kernel)

    def velocity(self, rollout, samples: Tensor, steps: Tensor, x: Tensor) -> Tensor:
        return self.model(x)

    @contextlib.contextmanager
    def reference(self):
        kept, self.model = self.model, nn.Linear(3, 3, bias=False)
        nn.init.zeros_(self.model.weight)
        yield
        self.model = kept

    @property
    def weight(self) -> Tensor:
        return self.model.weight

    def window(self, compare: bool = False) -> GradientWindow:
        return GradientWindow(self, self.rollout, torch.arange(4), compare)


def test_a_window_of_no_steps_has_no_gradient() -> None:
    window = LinearFlow(2).window()
    assert not window.walk(window.state(2), 2).requires_grad


def test_a_linear_reward_of_a_linear_flow_has_the_closed_form() -> None:
    """x2 = (I + h A)^2 x0 with h = -1/2, so c.x2 has the gradient h (I + h A)' c x0' + h c ((I + h A) x0)'."""
    flow, c, h = LinearFlow(2), torch.tensor([1.0, -2.0, 0.5]), -0.5
    window = flow.window()
    (window.walk(window.state(0), 0) @ c).sum().backward()
    with torch.no_grad():
        forward, x = torch.eye(3) + h * flow.weight, flow.start
        expected = h * torch.einsum("i,bj->ij", forward.T @ c, x) + h * torch.einsum("i,bj->ij", c, x @ forward.T)
    torch.testing.assert_close(flow.weight.grad, expected)


@pytest.mark.parametrize("kernel,eta", [("ode", 0.0), ("flow_sde", 0.7)])
def test_the_whole_window_is_full_back_propagation(kernel: str, eta: float) -> None:
    """By central differences of sampling again with the same noise; the reward is not linear."""
    flow = LinearFlow(2, KERNELS[kernel], eta)
    window = flow.window()
    window.walk(window.state(0), 0).pow(2).sum().backward()

    def sampled() -> Tensor:
        sigmas = flow.rollout.trajectory.sigmas
        recorder = Recorder(flow.start, sigmas, KERNELS[kernel], torch.full((2,), eta), range(4))
        with torch.no_grad():
            for _ in range(2):
                recorder.step(flow.model(recorder.x))
        return recorder.x.double().pow(2).sum()

    differences = torch.zeros(3, 3)
    for i in range(9):
        with torch.no_grad():
            flow.weight.view(-1)[i] += 1e-2
            above = sampled()
            flow.weight.view(-1)[i] -= 2e-2
            differences.view(-1)[i] = (above - sampled()) / 2e-2
            flow.weight.view(-1)[i] += 1e-2
    torch.testing.assert_close(flow.weight.grad, differences, rtol=2e-3, atol=2e-3)


def test_truncation_leaves_values_bit_for_bit() -> None:
    flow = LinearFlow(5, KERNELS["flow_sde"], 0.7)
    window = flow.window()
    whole = window.walk(window.state(0), 0)
    for first in range(5):
        cut = window.walk(window.state(first), first)
        torch.testing.assert_close(cut, flow.rollout.trajectory.final, atol=1e-6, rtol=0)
        truncated = window.state(0)
        for step in range(5):
            truncated = window.step(truncated, step)
            truncated = truncated.detach() if step < first else truncated
        assert torch.equal(truncated, whole)
    # and fewer steps are another gradient
    gradients = [torch.autograd.grad(window.walk(window.state(k), k).sum(), flow.weight)[0] for k in (0, 3)]
    assert not torch.allclose(*gradients)


def test_the_divergence_is_from_the_start_weights() -> None:
    """Which are 0 here, so that it is the mean square of the velocities."""
    flow = LinearFlow(3)
    window = flow.window(compare=True)
    window.walk(window.state(1), 1)
    expected = flow.rollout.trajectory.velocity[:, 1:].square().mean((1, 2))
    torch.testing.assert_close(window.divergence, expected, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def policy(tiny_policy):
    """With an adapter that does something."""
    policy = tiny_policy()
    torch.manual_seed(0)
    policy.add_lora(2, 4)
    for parameter in policy.trainable().values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return policy


def test_the_whole_window_is_autograd_through_the_pipelines_own_call(policy) -> None:
    """With guidance; from the start noise to the pixels."""
    direction = torch.randn(2, 3, 32, 32)
    parameters = list(policy.trainable().values())
    rollout = policy.sample(PROMPTS, [1, 2], steps=3, sigmas=SIGMAS, guidance=3.0)
    window = GradientWindow(policy, rollout, torch.arange(2))
    pixels = policy.decode_pixels(window.walk(window.state(0), 0))
    assert pixels.shape == direction.shape
    mine = torch.autograd.grad((pixels * direction).sum(), parameters)

    pipe = policy.pipeline
    embeds = policy.encoder.arguments(PROMPTS, ["", ""], 3.0, None, None)
    made = StableDiffusion3Pipeline.__call__.__wrapped__(
        pipe,
        **embeds,
        guidance_scale=3.0,
        num_inference_steps=3,
        sigmas=SIGMAS,
        generator=[torch.Generator().manual_seed(seed) for seed in (1, 2)],
        output_type="pt",
    ).images
    torch.testing.assert_close(pixels, made, atol=1e-5, rtol=0)
    theirs = torch.autograd.grad((made * direction).sum(), parameters)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    assert largest > 0.1
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4 * largest, rtol=0)


def test_a_model_of_the_noise_has_the_gradient_of_its_pipelines_own_call() -> None:
    """Stable Diffusion XL's, walked as a flow; by DDIM, with guidance."""
    pipe = build("sdxl")
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False, set_alpha_to_one=True)
    policy = DiffusersPolicy(pipe)
    policy.add_lora(2, 4)
    parameters = list(policy.trainable().values())
    for parameter in parameters:
        parameter.data += 0.05 * torch.randn_like(parameter)
    call = PIPELINES["sdxl"].call
    rollout = policy.sample(PROMPTS, [1, 2], steps=4, guidance=3.0, **call)
    window = GradientWindow(policy, rollout, torch.arange(2))
    pixels = policy.decode_pixels(window.walk(window.state(0), 0))
    made = StableDiffusionXLPipeline.__call__.__wrapped__(
        pipe,
        PROMPTS,
        guidance_scale=3.0,
        num_inference_steps=4,
        generator=[torch.Generator().manual_seed(seed) for seed in (1, 2)],
        output_type="pt",
        **call,
    ).images
    torch.testing.assert_close(pixels, made, atol=1e-4, rtol=0)
    direction = torch.randn_like(pixels)
    mine, theirs = (torch.autograd.grad((own * direction).sum(), parameters) for own in (pixels, made))
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    assert largest > 0.1
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-3 * largest, rtol=0)


def test_pixels_are_worth_what_the_pictures_are(policy) -> None:
    """To the rounding of pictures to 8 bits: half a level of 255, times the slope of the reward."""
    rollout = policy.sample(PROMPTS * 4, range(8), steps=3, sigmas=SIGMAS)
    reward = TinyCLIP(device="cpu")
    pixels = policy.decode_pixels(rollout.trajectory.final).requires_grad_()
    value = reward.score_pixels(pixels, PROMPTS * 4, [{}] * 8).value
    slope = torch.autograd.grad(value.sum(), pixels)[0].abs().sum((1, 2, 3)) / 255 / 2
    gap = (value - reward(policy.decode(rollout), PROMPTS * 4, [{}] * 8).value).abs()
    assert (gap <= slope).all() and gap.max() < 0.1
    assert value.std() > 10 * gap.max()
