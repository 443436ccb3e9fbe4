"""Adapters and single files that a training starts from, on the shipped tiny Stable Diffusion 3."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.base import fitting_lora
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training.building import build_policy
from tests.flowalign.small_run import small_run

TINY = ASSETS / "tiny_sd3"
PROMPTS = ["a red circle", "two blue squares"]
FILE = "pytorch_lora_weights.safetensors"


def finished(policy: DiffusersPolicy) -> Tensor:
    """Latents of two samples."""
    return policy.sample(PROMPTS, [1, 2], steps=3).trajectory.final


def plain(adapter: Path | str) -> Tensor:
    """Latents of the same samples by plain diffusers with an adapter."""
    pipe = StableDiffusion3Pipeline.from_pretrained(TINY, text_encoder_3=None, tokenizer_3=None)
    pipe.load_lora_weights(str(adapter))
    pipe.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    call = {"num_inference_steps": 3, "guidance_scale": 1.0, "max_sequence_length": 0, "output_type": "latent"}
    return pipe(PROMPTS, generator=generator, **call).images


def moved(policy: DiffusersPolicy) -> None:
    """Put the trained weights anywhere else."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture(scope="module")
def adapter(tiny_policy: Callable[..., DiffusersPolicy], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter that changes the pictures, of a rank and a scale that no default has."""
    policy = tiny_policy()
    policy.add_lora(3, 5.0, ["attn.to_q", "attn.add_v_proj"])
    moved(policy)
    folder = tmp_path_factory.mktemp("adapter")
    policy.save(folder)
    return folder


def test_training_starts_from_an_adapter_which_the_reference_keeps(
    tiny_policy: Callable[..., DiffusersPolicy], adapter: Path, tmp_path: Path
) -> None:
    policy = tiny_policy()
    base = finished(policy)
    policy.start_from_lora(adapter / FILE)
    assert policy.lora_config is not None and (policy.lora_config.r, policy.lora_config.lora_alpha) == (3, 5)
    start = finished(policy)
    assert not torch.allclose(start, base, atol=0.01)
    torch.testing.assert_close(start, plain(adapter), atol=1e-4, rtol=0)
    with policy.reference():
        assert torch.equal(finished(policy), start)
    assert {name.split(".")[-2] for name in policy.trainable()} == {"default"}
    moved(policy)
    trained = finished(policy)
    with policy.reference():
        assert torch.equal(finished(policy), start)
    assert torch.equal(finished(policy), trained) and not torch.allclose(trained, start, atol=0.01)
    # what is saved is the whole of it
    policy.save(tmp_path)
    torch.testing.assert_close(plain(tmp_path), trained, atol=1e-4, rtol=0)


def test_a_lora_of_the_denoiser_alone_raises_no_alarm(
    tiny_policy: Callable[..., DiffusersPolicy],
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="diffusers")
    tiny_policy().load(adapter / FILE)
    assert not caplog.records
    # diffusers by itself, before and after
    plain(adapter)
    assert "No LoRA keys associated to CLIPTextModelWithProjection" in caplog.text


def test_a_run_that_starts_from_an_adapter_is_at_its_reference_first(adapter: Path, tmp_path: Path) -> None:
    changes = [f"model.lora.path={adapter}", "algorithm.kl_weight=0.1", "training.iterations=2", "training.previews=0"]
    run = small_run(
        "tiny_sd3/flow_grpo",
        tmp_path,
        *changes,
        "training.group_size=2",
        "training.prompts_per_iteration=2",
        whole=True,
    )
    run.train()
    first, second = run.metrics.read()
    assert first["policy/kl"] == 0 and second["policy/kl"] > 0
    before, after = (load_file(folder / FILE) for folder in (adapter, run.folder / "lora"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def test_adapters_that_do_not_fit_are_refused(
    tiny_policy: Callable[..., DiffusersPolicy], adapter: Path, tmp_path: Path
) -> None:
    tensors = load_file(adapter / FILE)
    (name, value), *_ = tensors.items()
    save_file({name.replace("transformer.", "unet."): value}, tmp_path / "other.safetensors")
    save_file({name: value[:1]}, tmp_path / "half.safetensors")
    encoder = {f"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_{k}.weight": v for k, v in
               (("A", torch.zeros(2, 64)), ("B", torch.zeros(64, 2)))}  # fmt: skip
    save_file(tensors | encoder, tmp_path / "both.safetensors")
    for file, says in (("other", "no LoRA for this model"), ("half", "no LoRA"), ("both", "adapts text_encoder too")):
        with pytest.raises(ConfigError, match=f"model.lora.path: .*{says}"):
            tiny_policy().start_from_lora(tmp_path / f"{file}.safetensors")
    with pytest.raises(ConfigError, match="model.lora.path: no file or folder at 'nowhere'"):
        load(recipe("tiny_sd3/flow_grpo"), ["model.lora.path=nowhere"]).check(processes=1)


def test_a_single_file_of_the_denoiser_takes_the_rest_from_its_config(
    tiny_policy: Callable[..., DiffusersPolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy()
    torch.manual_seed(3)
    with torch.no_grad():
        policy.denoiser.proj_out.weight.add_(torch.randn_like(policy.denoiser.proj_out.weight) * 0.05)
    save_file(policy.denoiser.state_dict(), tmp_path / "tuned.safetensors")
    named = [f"model.path={tmp_path}/tuned.safetensors", "model.config=tiny_sd3", "evaluation.prompts=null"]
    loaded = build_policy(load(recipe("tiny_sd3/flow_grpo"), named))
    assert torch.equal(finished(loaded), finished(policy))
    assert not torch.allclose(finished(loaded), finished(tiny_policy()), atol=0.01)
    with pytest.raises(ConfigError, match="is a single file, and .*'[^']+/[^']+', is neither here nor .*model.config"):
        build_policy(load(recipe("tiny_sd3/flow_grpo"), [named[0]]))


def test_what_is_no_lora_or_a_part_of_one_is_refused_in_a_line(
    tiny_policy: Callable[..., DiffusersPolicy], adapter: Path, tmp_path: Path
) -> None:
    with safe_open(adapter / FILE, "pt") as file:
        tensors, settings = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    layers = sorted({name.partition(".lora_")[0] for name in tensors})
    half = {name: value for name, value in tensors.items() if not name.startswith(tuple(layers[::2]))}
    of_others = {name.replace("blocks.0", "blocks.90"): value for name, value in tensors.items()}
    files = {
        "half": (half, settings, "lacks transformer_blocks.0"),
        "downs": ({name: value for name, value in tensors.items() if "lora_A" in name}, settings, "and no "),
        "towers": (of_others, None, "layers that are not there"),
        "no_lora": ({"x": torch.ones(2)}, None, "no LoRA for this model"),
        "shapes": ({name: torch.ones(3, 5) for name in tensors}, None, "no LoRA for this model"),
    }
    for name, (values, metadata, said) in files.items():
        save_file(values, tmp_path / f"{name}.safetensors", metadata)
        with pytest.raises(ConfigError, match=said) as refused, fitting_lora("--lora", tmp_path):
            tiny_policy().load(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(refused.value)
    # by what the file says of itself alone: another program's with fewer layers is whole
    save_file(half, tmp_path / "fewer.safetensors")
    tiny_policy().load(tmp_path / "fewer.safetensors")


def test_sizes_beyond_the_networks_positions_are_refused(tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    with pytest.raises(ConfigError, match="height 40: its network tells 4 positions apart; 32 is the most"):
        tiny_policy().sample(PROMPTS, [1, 2], steps=1, height=40)


@pytest.mark.parametrize(
    "setting", ["clip_skip: 99", "max_sequence_length: -5", "max_sequence_length: x", "device: meta"]
)
def test_settings_of_the_encoding_that_make_no_sense_are_a_line(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition(": ")
    config = load(recipe("tiny_sd3/flow_grpo"), [f"model.encode.{name}={value}"])
    with pytest.raises(ConfigError, match=r"model\.encode") as refused:
        build_policy(config, torch.device("cpu")).sample(PROMPTS, [1, 2], steps=1)
    assert name in str(refused.value)
