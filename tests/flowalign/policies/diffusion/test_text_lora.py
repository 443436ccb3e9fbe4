"""TexForce: adapters of the text encoders, trained through the embeddings, with the denoiser's or alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.storage import load_pipeline
from flowalign.policies.settings import TextLora
from flowalign.training import Trainer
from tests.flowalign.algorithms.direct.test_direct import Red
from tests.flowalign.small_run import small_run

PROMPTS = ["a red circle", "two blue squares"]
BOTH = ["text_encoder", "text_encoder_2"]


@pytest.fixture(scope="module")
def policy(tiny_policy):
    """Text encoders with adapters that do something, and a denoiser without."""
    policy = tiny_policy()
    torch.manual_seed(0)
    policy.add_text_lora(TextLora(rank=2, encoders=BOTH))
    for parameter in parameters(policy):
        parameter.data += 0.05 * torch.randn_like(parameter)
    return policy


def parameters(policy) -> list[torch.nn.Parameter]:
    return [p for network in policy.companions.values() for p in network.parameters() if p.requires_grad]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_gradient_is_that_of_plain_encoding_and_one_call_of_the_denoiser(policy, guidance: float) -> None:
    rollout = policy.sample(PROMPTS, [1, 2], steps=3, sigmas=[1.0, 0.6, 0.3], guidance=guidance)
    policy.verify(rollout)
    samples, steps = torch.arange(2), torch.tensor([1, 1])
    direction = torch.randn_like(rollout.trajectory.velocity[:, 1])
    velocity = policy.velocity(rollout, samples, steps)
    torch.testing.assert_close(velocity, rollout.trajectory.velocity[:, 1], atol=1e-5, rtol=0)
    mine = torch.autograd.grad((velocity * direction).sum(), parameters(policy))
    pipe, x = policy.pipeline, rollout.trajectory.latents[:, 1]
    embeds, _, pooled, _ = pipe.encode_prompt(
        PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    empty, _, none, _ = pipe.encode_prompt(
        ["", ""], None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    time = 1000 * rollout.trajectory.sigmas[1].expand(2)
    tuned, base = (
        pipe.transformer(x, timestep=time, encoder_hidden_states=texts, pooled_projections=vector)[0]
        for texts, vector in ((embeds, pooled), (empty, none))
    )
    literal = base + guidance * (tuned - base)
    torch.testing.assert_close(velocity, literal, atol=1e-5, rtol=0)
    for own, other in zip(mine, torch.autograd.grad((literal * direction).sum(), parameters(policy)), strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-3)


def test_what_was_encoded_before_an_update_is_not_used_after(policy) -> None:
    first = policy.sample(PROMPTS[:1], [1], steps=2).trajectory.final
    with policy.reference():
        start = policy.sample(PROMPTS[:1], [1], steps=2).trajectory.final
    assert (first - start).abs().max() > 1e-3
    assert torch.equal(policy.sample(PROMPTS[:1], [1], steps=2).trajectory.final, first)
    with torch.no_grad():
        parameters(policy)[1].add_(0.1)
    assert not torch.equal(policy.sample(PROMPTS[:1], [1], steps=2).trajectory.final, first)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trainer:
    """Of two iterations: the reward's gradient trains both text encoders and the denoiser."""
    folder = tmp_path_factory.mktemp("texforce")
    own = [
        "training.iterations=2",
        "training.previews=0",
        "training.checkpoint_every=1",
        "model.text_lora.denoiser=true",
    ]
    run = small_run("tiny_sd3/texforce_direct", folder, *own, reward=Red(), whole=True)
    run.train()
    return run


def test_plain_diffusers_loads_all_adapters(run) -> None:
    """And makes the picture that the policy makes."""
    file = load_file(run.folder / "lora" / "pytorch_lora_weights.safetensors")
    assert {key.split(".")[0] for key in file} == {"transformer", *BOTH}
    pipe = load_pipeline(ASSETS / "tiny_sd3", torch.float32)
    arguments = {"num_inference_steps": 3, "guidance_scale": 1.0, "max_sequence_length": 0, "output_type": "np"}

    def made() -> np.ndarray:
        return pipe(PROMPTS[0], generator=torch.Generator().manual_seed(5), **arguments).images[0]

    before = made()
    pipe.load_lora_weights(run.folder / "lora")
    assert pipe.text_encoder.peft_config and pipe.text_encoder_2.peft_config and pipe.transformer.peft_config
    rollout = run.policy.sample(PROMPTS[:1], [5], steps=3)
    pixels = run.policy.decode_pixels(rollout.trajectory.final)[0].permute(1, 2, 0).detach().numpy()
    np.testing.assert_allclose(made(), pixels, atol=1e-4)
    assert abs(made() - before).max() > 1e-2


def test_a_policy_samples_with_text_encoders_from_a_file(run, tiny_policy, tmp_path: Path) -> None:
    """Also of a file that adapts nothing else, and when it is read again."""
    file = load_file(run.folder / "lora" / "pytorch_lora_weights.safetensors")
    texts = {key: value for key, value in file.items() if key.startswith("text_encoder")}
    save_file(texts, tmp_path / "pytorch_lora_weights.safetensors")
    policy = tiny_policy()
    plain = policy.sample(PROMPTS[:1], [5], steps=2).trajectory.final
    policy.load(tmp_path)
    adapted = policy.sample(PROMPTS[:1], [5], steps=2).trajectory.final
    assert (adapted - plain).abs().max() > 1e-3
    policy.load(tmp_path)
    assert torch.equal(policy.sample(PROMPTS[:1], [5], steps=2).trajectory.final, adapted)


def test_a_run_goes_on_with_its_text_encoders(run) -> None:
    """Bit for bit, from a checkpoint that holds all that is trained."""
    whole = load_file(run.checkpoints.newest() / "trainable.safetensors")
    assert {key.split(".")[0] for key in whole} >= {"transformer_blocks", *BOTH}
    last = run.checkpoints.newest()
    last.rename(last.with_name("kept"))
    again = Trainer(run.config, reward=Red(), resume=True, progress=False)
    assert again.iteration == 1
    again.train()
    for key, value in load_file(again.checkpoints.newest() / "trainable.safetensors").items():
        assert torch.equal(value, whole[key]), key


def test_what_text_encoders_do_not_go_with_is_refused(tiny_policy) -> None:
    for name, override, message in (
        ("nft", "model.text_lora={rank: 2}", "nft learns from clean samples"),
        ("draft", "model={path: tiny_sd3, lora: null, text_lora: {rank: 2}}", "not trained whole"),
        ("texforce", "rollout.negative_prompt=ugly", "empty negative_prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe(f"tiny_sd3/{name}"), ["rollout.guidance=2", override]).check(1)
    with pytest.raises(ConfigError, match="has no 'text_encoder_3'"):
        tiny_policy().add_text_lora(TextLora(encoders=["text_encoder_3"]))
