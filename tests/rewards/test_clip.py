"""The dual-encoder rewards on the tiny CLIP that comes with flowalign, against transformers used by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

from rewards import score
from rewards.clip import CLIPImage, CLIPScore, GoalBaseline, LambdaHarmonic, PickScore
from rewards.shapes import draw, heldout_requests, sample_requests

TINY_CLIP = str(Path(__file__).parents[2] / "rewards" / "shapes" / "tiny_clip")


@pytest.fixture(scope="module")
def pictures():
    """Six drawn pictures with their prompts, wider than the model wants them: cropped, by an odd margin.

    None is resized: transformers resizes tensors, these rewards resize as the checkpoints were trained.
    """
    rng = np.random.default_rng(0)
    requests = sample_requests(heldout_requests(), 6, rng)
    return [Image.fromarray(draw(r, rng)).resize((41, 32)) for r in requests], [r.prompt for r in requests]


@pytest.fixture(scope="module")
def vectors(pictures):
    """Unit vectors of the pictures and prompts, by transformers' own processor and model."""
    images, prompts = pictures
    model, processor = AutoModel.from_pretrained(TINY_CLIP).float(), AutoProcessor.from_pretrained(TINY_CLIP)
    with torch.no_grad():
        out = model(**processor(text=prompts, images=images, padding=True, return_tensors="pt"))
    return out.image_embeds, out.text_embeds, model.logit_scale.exp()


def test_clip_score_is_the_models_own_logit(pictures, vectors):
    image, text, scale = vectors
    expected = scale.detach() * (image * text).sum(-1)
    for reward in (CLIPScore(TINY_CLIP, batch_size=4), PickScore(TINY_CLIP, processor=None)):
        torch.testing.assert_close(score(reward, *pictures, [{}] * 6).value, expected, atol=2e-3, rtol=0)


def test_goal_baseline_projects_on_the_line_from_baseline_to_goal(pictures, vectors):
    """Definition 1 of arXiv 2310.12921, literally: with the projection matrix onto the line, and its complement."""
    images, prompts = pictures
    image, goal, _ = (v.detach().double() for v in vectors)
    model, processor = AutoModel.from_pretrained(TINY_CLIP).float(), AutoProcessor.from_pretrained(TINY_CLIP)
    with torch.no_grad():
        base = model.get_text_features(**processor(text=["a picture"], return_tensors="pt")).pooler_output
    base = (base / base.norm())[0].double()
    for alpha in (0.0, 0.3, 1.0):
        expected = []
        for s, g in zip(image, goal, strict=True):
            line = (g - base)[:, None]
            projection = line @ line.T / (line.T @ line)
            projected = alpha * (projection @ (s - g)) + (1 - alpha) * (s - g)
            expected.append(1 - 0.5 * projected.norm() ** 2)
        value = score(GoalBaseline(alpha=alpha, model=TINY_CLIP), images, prompts, [{}] * 6).value
        torch.testing.assert_close(value, torch.stack(expected).float(), atol=1e-4, rtol=0)
    cosine = (image * goal).sum(-1).float()
    value = score(GoalBaseline(alpha=0.0, model=TINY_CLIP), images, prompts, [{}] * 6).value
    torch.testing.assert_close(value, cosine, atol=1e-4, rtol=0)


def test_clip_i_and_the_harmonic_mean(pictures, vectors):
    images, prompts = pictures
    image, text, _ = (v.detach() for v in vectors)
    references = image.roll(-1, 0)
    metadata = [{"reference": picture} for picture in images[1:] + images[:1]]
    identity = (image * references).sum(-1)
    torch.testing.assert_close(
        score(CLIPImage(TINY_CLIP), images, prompts, metadata).value, identity, atol=1e-4, rtol=0
    )
    likeness = (image * text).sum(-1).clamp(min=1e-3)
    expected = 1 / (0.3 / identity.clamp(min=1e-3) + 0.7 / likeness)
    made = score(LambdaHarmonic(0.3, model=TINY_CLIP), images, prompts, metadata)
    torch.testing.assert_close(made.value, expected, atol=1e-4, rtol=1e-3)
    assert set(made.parts) == {"identity", "prompt"}


def test_the_gradient_raises_the_score(pictures):
    """Pixels at the model's own size: differentiable and plain scores agree, and a small step uphill raises them."""
    _, prompts = pictures
    pixels = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    reward = PickScore(TINY_CLIP, processor=None)
    images = [Image.fromarray((255 * p).byte().permute(1, 2, 0).numpy()) for p in pixels]
    pixels.requires_grad_(True)
    before = reward.score_pixels(pixels, prompts, [{}] * 6).value
    torch.testing.assert_close(before.detach(), score(reward, images, prompts, [{}] * 6).value, atol=1e-3, rtol=1e-4)
    (gradient,) = torch.autograd.grad(before.sum(), pixels)
    after = reward.score_pixels(pixels + 1e-3 * gradient.sign(), prompts, [{}] * 6).value
    assert (after > before).all()


def test_one_model_is_loaded_once():
    assert CLIPScore(TINY_CLIP).encoder is CLIPImage(TINY_CLIP).encoder


def test_impossible_settings_say_so():
    with pytest.raises(ValueError, match="alpha 2 is not in"):
        GoalBaseline(alpha=2, model=TINY_CLIP)
    with pytest.raises(ValueError, match="identity_weight -1 is not in"):
        LambdaHarmonic(-1, model=TINY_CLIP)
