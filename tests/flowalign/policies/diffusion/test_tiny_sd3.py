"""The shipped tiny pipeline: it loads as any SD3 does, draws well, and its script is reproducible."""

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from rewards.shapes import all_requests, check, heldout_requests, train_requests

ROOT = Path(__file__).parents[4]
ASSETS = ROOT / "flowalign" / "data" / "assets"
TINY = ASSETS / "tiny_sd3"
SINGLES = [request.prompt for request in train_requests() if request.category == "single"]


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(TINY, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def strict_rate(pipe: StableDiffusion3Pipeline, prompts: list[str], **settings: object) -> float:
    images = pipe(prompts, generator=torch.Generator().manual_seed(0), **settings).images
    return float(np.mean([check(image, prompt).strict for image, prompt in zip(images, prompts, strict=True)]))


def test_it_is_small_and_in_half_precision(pipe: StableDiffusion3Pipeline) -> None:
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) <= 12e6
    assert len(list(TINY.rglob("*.safetensors"))) == 4
    half = StableDiffusion3Pipeline.from_pretrained(TINY, text_encoder_3=None, tokenizer_3=None, dtype=torch.float16)
    stored = half.transformer.state_dict()
    for name, value in pipe.transformer.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[name].float()), name


def test_latents_have_about_unit_variance(pipe: StableDiffusion3Pipeline) -> None:
    latents = pipe(
        SINGLES[:4], guidance_scale=1.0, num_inference_steps=8, max_sequence_length=0, output_type="latent"
    ).images
    assert latents.shape == (4, 4, 8, 8)
    assert 0.7 < latents.std().item() < 1.3


@pytest.mark.parametrize(
    "settings",
    [
        {"num_inference_steps": 12, "guidance_scale": 3.0},
        {"num_inference_steps": 12, "guidance_scale": 1.0},
        {"num_inference_steps": 5, "sigmas": [1.0, 0.8, 0.6, 0.4, 0.2], "guidance_scale": 1.0},
    ],
)
def test_it_draws_single_objects(pipe: StableDiffusion3Pipeline, settings: dict) -> None:
    assert strict_rate(pipe, (2 * SINGLES)[:16], max_sequence_length=0, **settings) >= 0.75


def test_it_draws_as_well_with_the_zero_tokens_of_a_missing_t5(pipe: StableDiffusion3Pipeline) -> None:
    assert strict_rate(pipe, SINGLES[:8], num_inference_steps=8, guidance_scale=3.0) >= 0.7


def test_the_plain_call_draws_well(pipe: StableDiffusion3Pipeline) -> None:
    """28 steps at guidance 7, the pipeline's defaults, leave a picture that still holds what was asked."""
    assert strict_rate(pipe, SINGLES[:4]) >= 0.5


def test_every_prompt_fits_the_tokenizer_one_token_a_word(pipe: StableDiffusion3Pipeline) -> None:
    prompts = [request.prompt for request in all_requests()]
    for tokens, prompt in zip(pipe.tokenizer(prompts).input_ids, prompts, strict=True):
        assert len(tokens) == len(prompt.split()) + 2 <= pipe.tokenizer.model_max_length
        assert pipe.tokenizer.decode(tokens, skip_special_tokens=True) == prompt
    assert pipe.text_encoder.config.eos_token_id == pipe.tokenizer.eos_token_id != 2
    assert pipe.tokenizer.get_vocab() == pipe.tokenizer_2.get_vocab()


def test_prompt_lists_are_those_of_the_grammar() -> None:
    for name, requests in {"shapes_train": train_requests(), "shapes_heldout": heldout_requests()}.items():
        lines = (ASSETS / "prompts" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"prompt": request.prompt, "category": request.category} for request in requests
        ]


def test_measured_quality_is_in_the_intended_range() -> None:
    quality = json.loads((TINY / "quality.json").read_text())
    assert quality["vae"]["psnr_db"] >= 34
    assert quality["vae"]["checker_strict"] >= 0.98
    assert 0.45 <= quality["samples"]["guidance 3, 15 steps"]["overall"]["strict"] <= 0.70
    assert 0.40 <= quality["samples"]["no guidance, 5 steps"]["counting"]["strict"] <= 0.65


def test_the_script_makes_the_same_files_from_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short builds; measuring them is left out, for it takes longer than they do."""
    script = load_script()
    quality = json.loads((TINY / "quality.json").read_text())
    monkeypatch.setattr(script, "measure", lambda *_: quality)
    settings = {"vae_steps": 2, "steps": 9, "bank": 64, "eval_images": 1, "threads": torch.get_num_threads()}
    digests = []
    for run in ("first", "again"):
        out = tmp_path / run
        script.build(out=out / "tiny", prompts_out=out / "prompts", seed=0, **settings)
        digests.append({str(file.relative_to(out)): digest(file) for file in out.rglob("*") if file.is_file()})
    assert digests[0] == digests[1]
    assert len([name for name in digests[0] if name.endswith(".safetensors")]) == 4


def test_the_script_goes_on_from_a_build_in_64_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script()
    monkeypatch.setattr(script, "measure", lambda *_: json.loads((TINY / "quality.json").read_text()))
    settings = {"vae_steps": 1, "steps": 9, "bank": 8, "eval_images": 1, "threads": torch.get_num_threads()}
    settings |= {"pixels": 64, "prompts_out": tmp_path / "prompts", "batch": 4, "vae_batch": 2}
    script.build(out=tmp_path / "first", seed=0, **settings)
    script.build(out=tmp_path / "second", seed=1, start=tmp_path / "first", **settings)
    first, second = (script.loaded(tmp_path / name) for name in ("first", "second"))
    assert first.vae.config.sample_size == 64 and first.transformer.config.in_channels == 8
    for name, value in first.vae.state_dict().items():
        assert torch.equal(value, second.vae.state_dict()[name]), name
    assert not torch.equal(first.transformer.proj_out.weight, second.transformer.proj_out.weight)
    # which a shipped build would carry from the machine that made it
    for file in (tmp_path / "second").rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), file
    assert f"--start {tmp_path / 'first'}" in (tmp_path / "second" / "README.md").read_text()


@torch.no_grad()
def test_the_script_embeds_as_the_pipeline_does(pipe: StableDiffusion3Pipeline) -> None:
    script = load_script()
    for zero_tokens in (0, 7):
        own = script.embedded(pipe, script.tokenized(pipe, ["", *SINGLES[:2]]), zero_tokens)
        embeds, _, pooled, _ = pipe.encode_prompt(
            ["", *SINGLES[:2]], None, None, do_classifier_free_guidance=False, max_sequence_length=zero_tokens
        )
        assert torch.equal(own[0], embeds) and torch.equal(own[1], pooled)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tiny_sd3", ROOT / "scripts" / "build_tiny_sd3.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
