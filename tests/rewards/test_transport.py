"""PISCES: transport plans against an exact solver, the map between Gaussians, and what agreeing pictures are worth."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import linprog

from rewards import score
from rewards.shapes import draw, heldout_requests, parse, sample_requests
from rewards.shapes.clip import TINY_CLIP
from rewards.transport import PISCES, gaussian_map, partial_plan


def test_the_plan_is_the_linear_programs() -> None:
    """Of little entropy, half of the mass: as scipy's exact solver finds it."""
    torch.manual_seed(0)
    cost, weight = torch.rand(1, 4, 5, dtype=torch.float64), torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    plan = partial_plan(cost, weight, 0.5, 0.002, iterations=3000)
    rows = np.kron(np.eye(4), np.ones(5))
    columns = np.kron(np.ones(4), np.eye(5))
    exact = linprog(
        cost.flatten().numpy(),
        A_ub=np.concatenate([rows, columns]),
        b_ub=np.concatenate([weight[0].numpy(), np.full(5, 0.2)]),
        A_eq=np.ones((1, 20)),
        b_eq=[0.5],
    )
    assert abs(float(plan.sum()) - 0.5) < 1e-3
    assert abs(float((plan * cost).sum()) - exact.fun) < 2e-3
    assert (plan.sum(2) <= weight + 1e-3).all() and (plan.sum(1) <= 0.2 + 1e-3).all()


def test_the_map_takes_one_gaussian_to_the_other() -> None:
    torch.manual_seed(0)
    source, goal = torch.randn(500, 6) @ torch.randn(6, 6), torch.randn(500, 6) @ torch.randn(6, 6)
    matrix = gaussian_map(source, goal, ridge=0.0)
    torch.testing.assert_close(matrix, matrix.T, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(torch.cov((source @ matrix).T), torch.cov(goal.T), atol=1e-2, rtol=1e-2)
    # gradients of convex functions are the maps of least cost
    assert torch.linalg.eigvalsh(matrix).min() > 0


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Pictures with their prompts, and a file of them."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("real")
    requests = sample_requests(heldout_requests(), 24, rng)
    pictures = [Image.fromarray(draw(request, rng)) for request in requests]
    with open(folder / "real.jsonl", "w") as lines:
        for i, (picture, request) in enumerate(zip(pictures, requests, strict=True)):
            picture.save(folder / f"{i}.png")
            lines.write(json.dumps({"prompt": request.prompt, "target": f"{i}.png"}) + "\n")
    return pictures, [request.prompt for request in requests], str(folder / "real.jsonl")


def test_pictures_are_worth_more_for_their_own_prompt(drawn) -> None:
    pictures, prompts, real = drawn
    reward = PISCES(str(TINY_CLIP), real=real, device="cpu")
    own = score(reward, pictures, prompts, [{}] * 24)
    other = score(reward, pictures, prompts[1:] + prompts[:1], [{}] * 24)
    assert own.parts["quality"].mean() > other.parts["quality"].mean() + 0.05
    torch.testing.assert_close(own.value, (own.parts["quality"] + own.parts["semantic"]) / 2)
    without = score(PISCES(str(TINY_CLIP), device="cpu"), pictures, prompts, [{}] * 24)
    torch.testing.assert_close(without.value, own.parts["semantic"], atol=1e-5, rtol=0)


def test_a_video_of_one_picture_is_worth_that_picture(drawn) -> None:
    """And the same as pixels."""
    _, _, real = drawn
    picture = Image.fromarray(draw(parse("two blue squares"), np.random.default_rng(3)))
    pixels = torch.tensor(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    one = score(PISCES(str(TINY_CLIP), real=real, device="cpu"), [picture], ["two blue squares"], [{}]).value
    film = PISCES(str(TINY_CLIP), real=real, frames=3, device="cpu")
    video = score(film, [[picture] * 5], ["two blue squares"], [{}]).value
    frames = pixels[:, :, None].expand(-1, -1, 5, -1, -1).clone().requires_grad_()
    mine = film.score_pixels(frames, ["two blue squares"], [{}]).value
    torch.testing.assert_close(video, one, atol=1e-3, rtol=0)
    torch.testing.assert_close(mine.detach(), video, atol=1e-4, rtol=0)
    [gradient] = torch.autograd.grad(mine.sum(), frames)
    assert gradient[:, :, [0, 2, 4]].any() and not gradient[:, :, [1, 3]].any()
