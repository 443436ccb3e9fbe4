"""Every recipe goes through a rollout and an update on random weights, without a network."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.planning.dry_run import at_hand, dry_run
from flowalign.planning.random_models import FAMILIES, byte_tokenizer, random_pipeline, tiny_name
from flowalign.planning.tiny_pipelines import PIPELINES
from flowalign.rollouts.pictures import DiffusionSampler
from tests.flowalign.training.processes import run_together

FILES = ("dpo", "sdpo", "mapo", "inpo", "rpo", "seppo", "kto", "sft", "soar", "srum", "dpo_offline")
"""recipes of methods that learn from files"""
RECIPES = sorted(
    f"{path.parent.name}/{path.stem}"
    for path in recipe("").parent.glob("*/*.yaml")
    # of launchers; from files and questions, which are the user's own
    if path.parent.name not in ("tiny_emu3", "tiny_vlm", "qwen_vl", "accelerate") and path.stem not in FILES
)
TEXTS = [name for name in RECIPES if name.startswith(("tiny_lm/", "qwen/"))]
# the same methods as in tiny_lm; a test of its own tries qwen/dr_grpo
LIKE_TINY = [f"qwen/{name}" for name in ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "remax", "rloo")]
# what differs between the tiny pipelines' families is in their conformance suite: one recipe of each model folder, and
# each algorithm on the shipped model; and of step pairs the one whose threshold depends on DDPM's noise
DDPM = ("sd15/ddpo", "sd15/lpo", "sd15/texforce")
# another reward than tiny_sd3/draft, which a dry run replaces
ALIKE = ("tiny_sd3/draft_mass", "tiny_sd3/pisces")
TRIED = [name for name in RECIPES if name.startswith("tiny_sd3/") or name.endswith("/flow_grpo") or name in DDPM]
TRIED = [name for name in TRIED if name not in ALIKE]
# whose rewards, start noise and teacher a dry run replaces
TRIED += [*(name for name in TEXTS if name not in LIKE_TINY), "sd3/gardo", "flux/hypernoise", "sd3/opd", "sd3/uni_grpo"]
# rewards of two modalities, by their names
TRIED += ["ltx2/omni_nft"]
# chunks of a causal video model
TRIED += ["skyreels_v2/self_forcing"]


@pytest.mark.parametrize("name", TRIED)
def test_a_recipe_runs_dry(name: str) -> None:
    # as many steps alike; they are learned from in a few updates
    fewer = ["rollout.steps=8", "training.updates_per_iteration=4"] if name in DDPM else []
    fewer += ["rollout.steps=3", "algorithm.levels.count=2"] if name == "ltx2/omni_nft" else []
    report = dry_run(load(recipe(name), fewer))
    assert report.trained > 0 and 0 < report.parameters < 5e6
    assert min(report.seconds.values()) > 0 and report.peak_memory > 1e7
    # a method that learns from lines of texts has one of them
    assert report.samples >= (1 if "text_" in name or name.endswith(("gkd", "token_dpo")) else 2)


def test_a_recipe_that_learns_from_files_runs_dry_and_samples_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        Image.new("RGB", (64, 64), (200 * i, 0, 0)).save(tmp_path / f"{i}.png")
    lines = [{"prompt": f"red {i}", "chosen": "1.png", "rejected": "0.png"} for i in range(4)]
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(DiffusionSampler, "rollout", None)
    report = dry_run(
        load(recipe("sd3/dpo_offline"), ["algorithm.min_pairs=4", f"data.prompts={tmp_path / 'votes.jsonl'}"])
    )
    # its files are opened and encoded in the time of a rollout
    assert report.trained > 0 and report.seconds["rollout"] > 0


def test_recipes_of_published_size_are_valid_whatever_is_on_this_machine() -> None:
    for config in (load(recipe(name)) for name in LIKE_TINY):
        lists = (config.data, *config.data.also, config.evaluation, *config.evaluation.also)
        at_hand(config, {str(one.prompts) for one in lists}).check(processes=1)


def test_prompts_of_the_hub_are_missing_and_stood_in_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe("qwen/dr_grpo")), "--dry-run"])
    assert stopped.value.code == 0
    assert "not on this machine: nlile/hendrycks-MATH-benchmark for data.prompts" in capsys.readouterr().out


def test_two_processes_try_a_recipe_out_and_one_reports(tmp_path: Path) -> None:
    run_together(2, try_out, tmp_path)
    assert "peak memory" in (tmp_path / "0").read_text() and (tmp_path / "1").read_text() == ""


def try_out(rank: int, folder: Path) -> None:
    with open(folder / str(rank), "w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit) as left:
        main(["train", str(recipe("tiny_sd3/flow_grpo")), "--dry-run"])
    assert not left.value.code


def test_every_recipes_model_is_known_by_its_name() -> None:
    for config in (load(recipe(name)) for name in RECIPES if name not in TEXTS):
        assert tiny_name(config.model.path) in PIPELINES


@pytest.mark.parametrize("name", ["tiny_vlm/judge", "qwen_vl/judge"])
def test_a_judges_recipe_runs_dry_on_questions_of_pictures(name: str, tmp_path: Path) -> None:
    for i in range(4):
        Image.new("RGB", (32, 32), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    pairs = [(0, 1, "first"), (3, 2, "second")]
    lines = [{"prompt": "redder?", "image": [f"{a}.png", f"{b}.png"], "answer": right} for a, b, right in pairs]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [f"{section}.prompts={tmp_path / 'questions.jsonl'}" for section in ("data", "evaluation")]
    report = dry_run(load(recipe(name), own))
    assert report.trained > 0 and report.samples >= 4 and "tokens" in report.length


def test_a_language_model_of_full_size_is_built_from_its_configuration_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (ASSETS / "tiny_lm").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe("tiny_lm/grpo")), f"model.path={tmp_path}", "--dry-run", "--full"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    assert "LlamaForCausalLM: 0.4945M random weights, 0.4945M trained" in told and "at most 5 tokens" in told


def test_any_text_comes_back_from_bytes() -> None:
    tokens = byte_tokenizer()
    ids = tokens("two 🐈, naïvely\n").input_ids
    assert tokens.decode(ids) == "two 🐈, naïvely\n" and len(ids) == len("two 🐈, naïvely\n".encode())


def test_names_mean_the_pipeline_they_are_loaded_with() -> None:
    assert tiny_name("black-forest-labs/FLUX.1-dev") == "flux"
    assert tiny_name("black-forest-labs/FLUX.2-klein-4B") == "flux2_klein"
    assert tiny_name("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") == "wan"
    assert tiny_name("Wan-AI/Wan2.2-I2V-A14B-Diffusers") == "wan22_14b_i2v"
    assert tiny_name("kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers") == "kandinsky5_i2v"
    assert tiny_name("hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v") == "hunyuan_video15_i2v"
    assert tiny_name("tiny_sd3") == "sd35"
    assert set(FAMILIES.values()) <= PIPELINES.keys()
    assert all(prefix == prefix.lower() for prefix in FAMILIES)
    with pytest.raises(ConfigError, match="someone/something.*--full"):
        tiny_name("someone/something")


def test_full_size_is_built_from_configuration_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (ASSETS / "tiny_sd3").rglob("*.json"):
        copy = tmp_path / file.relative_to(ASSETS / "tiny_sd3")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    pipeline = random_pipeline(str(tmp_path), torch.bfloat16, torch.device("cpu"))
    own = sum(p.numel() for p in pipeline.transformer.parameters())
    assert pipeline.transformer.dtype == torch.bfloat16 and pipeline.text_encoder_3 is None
    overrides = [f"model.path={tmp_path}", "training.group_size=2"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe("tiny_sd3/flow_grpo")), *overrides, "--dry-run", "--full"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    assert f"StableDiffusion3Pipeline: {own / 1e6:.4g}M random weights" in told and "peak memory" in told


def test_missing_configuration_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(recipe("flux/flow_grpo"))
    with pytest.raises(ConfigError, match="hf download black-forest-labs/FLUX.1-dev --exclude"):
        dry_run(config, full=True)
