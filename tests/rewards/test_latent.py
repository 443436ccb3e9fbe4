"""DiNa-LRM against the authors' own code on the same weights and latents (originals/README.md), and on a small SD3."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel

from rewards import Latents, RewardError, score, spec_of
from rewards.latent import DiNa, Head, Trunk, merge_lora
from tests.rewards import published
from tests.rewards.published import drawn, inputs, lora

RECORDED = json.loads((Path(__file__).parent / "originals" / "scores.json").read_text())
TRUNK = "backbone.base_model.model."


def given(trunk, head):
    """A trunk and a head with the inputs' weights, which are drawn by the authors' names."""
    adapted = lora(trunk)
    names = {}
    for name in trunk.state_dict():
        layer, _, end = name.rpartition(".")
        names[name] = f"{TRUNK}{layer}.base_layer.{end}" if layer in adapted else f"{TRUNK}{name}"
    tensors = drawn({names[name]: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()})
    trunk.load_state_dict({name: tensors[theirs] for name, theirs in names.items()})
    rank = inputs.DINA["lora_config"]["r"]
    shapes = {f"{TRUNK}{layer}.lora_A.default.weight": (rank, size[1]) for layer, size in adapted.items()}
    shapes |= {f"{TRUNK}{layer}.lora_B.default.weight": (size[0], rank) for layer, size in adapted.items()}
    # as peft saves them
    tensors = {name.removeprefix("backbone.").replace(".default", ""): t for name, t in drawn(shapes).items()}
    merge_lora(trunk, tensors, 2.0)
    own = {f"reward_head.{name}": tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    head.load_state_dict({name.removeprefix("reward_head."): tensor for name, tensor in drawn(own).items()})


def test_gives_the_scores_of_the_original_at_one_noise_level_and_at_two():
    transformer = SD3Transformer2DModel(**inputs.SD3)
    trunk = Trunk(transformer, inputs.DINA["num_transformer_layers"], [1, 3], [2, 3]).eval()
    head = Head(transformer.inner_dim, (2, 2), queries=2, heads=4).eval()
    given(trunk, head)
    known = inputs.latents()
    embeds, pooled = torch.from_numpy(known["embeds"]), torch.from_numpy(known["pooled"])
    levels = []
    for noised, time in zip(known["latents"], known["times"]):
        with torch.no_grad():
            levels.append(trunk(torch.from_numpy(noised), embeds, pooled, torch.full((3,), time)))
    with torch.no_grad():
        one, two = head(levels[:1]), head(levels)
    torch.testing.assert_close(one, torch.tensor(RECORDED["dina/one"]), atol=1e-4, rtol=0)
    torch.testing.assert_close(two, torch.tensor(RECORDED["dina/two"]), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def dina(tmp_path_factory):
    return DiNa(sigmas=(0.4, 0.7), **published.dina(tmp_path_factory.mktemp("dina")))


def test_latents_are_scored_as_the_picture_they_are_of(dina):
    assert spec_of(dina).differentiable and all(abs(s - t) < 1e-3 for s, t in zip(dina.sigmas, (0.4, 0.7)))
    size = 32
    pictures = [image.resize((size, size)) for image in inputs.pictures()[:3]]
    prompts = ["a red circle", "two blue squares", "a red circle"]
    values = score(dina, pictures, prompts, [{}] * 3).value
    assert len(set(values.tolist())) == 3
    pixels = torch.stack([torch.tensor(list(image.tobytes())).view(size, size, 3) for image in pictures])
    pixels = (pixels.permute(0, 3, 1, 2) / 255).requires_grad_()
    latents = dina._encoded(2 * pixels.detach() - 1)
    torch.testing.assert_close(dina.score_latents(latents, prompts).value, values, atol=1e-4, rtol=1e-4)
    value = dina.score_pixels(pixels, prompts, [{}] * 3).value
    torch.testing.assert_close(value.detach(), values, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(value.sum(), pixels)
    assert gradient.flatten(1).norm(dim=1).min() > 0
    swapped = score(dina, pictures[:1], prompts[1:2], [{}]).value
    assert swapped.item() != values[0].item()
    with pytest.raises(RewardError, match=r"dina': it knows latents of .* not of \('AutoencoderKL', 0.13025, None\)"):
        dina.score_latents(Latents(latents.values, ("AutoencoderKL", 0.13025, None)), prompts)
