"""DiNa-LRM against the authors' own code on the same weights and latents (originals/README.md), and on a small SD3."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file

from flowalign.data.files import ASSETS
from rewards import score, spec_of
from rewards.latent import DiNa, Head, Trunk, merge_lora

ORIGINALS = Path(__file__).parent / "originals"
SPEC = importlib.util.spec_from_file_location("originals_inputs", ORIGINALS / "inputs.py")
inputs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(inputs)
RECORDED = json.loads((ORIGINALS / "scores.json").read_text())
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
TRUNK = "backbone.base_model.model."


def drawn(shapes):
    return {name: torch.from_numpy(array) for name, array in inputs.weights(shapes).items()}


def lora(trunk):
    """Shapes of the LoRA of a trunk, by the names of its layers."""
    layers = [name for name, module in trunk.named_modules() if name.endswith(ADAPTED) and hasattr(module, "weight")]
    return {name: tuple(trunk.get_submodule(name).weight.shape) for name in layers}


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
    """On the shipped small Stable Diffusion 3, from files as they are published."""
    folder, model = tmp_path_factory.mktemp("dina"), str(ASSETS / "tiny_sd3")
    transformer = SD3Transformer2DModel.from_pretrained(model, subfolder="transformer")
    trunk = Trunk(transformer, 2, [1, 2], [1, 2])
    shapes = {f"base_model.model.{layer}.lora_A.weight": (4, size[1]) for layer, size in lora(trunk).items()}
    shapes |= {f"base_model.model.{layer}.lora_B.weight": (size[0], 4) for layer, size in lora(trunk).items()}
    save_file(drawn(shapes), folder / "adapter_model.safetensors")
    head = Head(transformer.inner_dim, (2, 2), queries=2, heads=4)
    torch.save(drawn({name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}), folder / "rm_head.pt")
    settings = inputs.DINA | {"num_transformer_layers": 2, "visual_head_idx": [1, 2], "text_head_idx": [1, 2]}
    (folder / "config.json").write_text(json.dumps({"model": settings}))
    files = {"weights": "adapter_model.safetensors", "head": "rm_head.pt", "config": "config.json"}
    files = {name: str(folder / file) for name, file in files.items()}
    return DiNa(sigmas=(0.4, 0.7), **files, pipeline=model, batch_size=2, device="cpu", dtype="float32")


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
