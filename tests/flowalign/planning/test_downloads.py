"""What configurations take from the hub, told from a cache that a test makes; nothing is loaded."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.planning.downloads import Download, chosen, downloads, here, missing
from flowalign.planning.dry_run import dry_run

SD3 = "stabilityai/stable-diffusion-3.5-medium"
INDEX = {
    "_class_name": "P",
    "vae": ["diffusers", "V"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "t5": [None, None],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def keep(cache: Path, repository: str, *files: str) -> None:
    """Put files of a repository into the cache, as the hub's client does."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    for file in files:
        path = folder / "snapshots" / "abc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(INDEX if file == "model_index.json" else {"weight_map": {"w": "part-2.safetensors"}})
        )


def named(config: str, *overrides: str) -> list[tuple[str, str]]:
    return [(one.repository, one.part) for one in downloads(load(recipe(config), list(overrides)))]


def test_a_recipe_names_its_model_its_rewards_and_its_panel(cache: Path) -> None:
    assert named("tiny_sd3/demo") == []
    clip = ("openai/clip-vit-large-patch14", "network")
    detector = ("facebook/mask2former-swin-small-coco-instance", "network")
    assert named("sd3/flow_grpo_geneval") == [(SD3, "pipeline"), detector, clip]
    panel = "[{name: image_reward}, {name: hpsv2, version: v2.0}, {name: normalized, rewards: [{name: aesthetic}]}]"
    assert named("sd3/flow_grpo_ocr", f"evaluation.panel={panel}", "data.prompts=owner/texts") == [
        (SD3, "pipeline"),
        ("zai-org/ImageReward", "ImageReward.pt"),
        ("google-bert/bert-base-uncased", "reader"),
        ("xswu/HPSv2", "HPS_v2_compressed.pt"),
        clip,
        ("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"),
        ("owner/texts", "data set"),
    ]
    judge = "[{name: vlm_judge, template: alignment, judge: {model: Qwen/Qwen2.5-VL-7B-Instruct}}]"
    assert ("Qwen/Qwen2.5-VL-7B-Instruct", "network") in named("sd3/flow_grpo", f"rewards={judge}")


def test_teachers_are_named(cache: Path) -> None:
    several = "algorithm.teachers=[{path: owner/teacher, lora: owner/its-lora}, {guidance: 3}]"
    teachers = [("owner/teacher", "pipeline"), ("owner/its-lora", "network")]
    assert named("tiny_sd3/opd", several) == teachers
    assert named("tiny_lm/kdrl", "algorithm.teacher=owner/teacher") == [("owner/teacher", "network")]
    assert named("tiny_sd3/uni_grpo", "algorithm.writer.path=owner/writer") == [("owner/writer", "network")]


def test_rewards_name_their_weights_their_base_and_their_pipeline(cache: Path) -> None:
    dina = "liuhuohuo/DiNa-LRM-SD35M-12layers"
    chosen = "rewards=[{name: video_reward}, {name: dina}, {name: clip_t5}, {name: edit_reward}, {name: deqa}]"
    assert set(named("sd3/flow_grpo", chosen, "evaluation.rewards=null", "evaluation.panel=[]")) == {
        (SD3, "pipeline"),
        ("KwaiVGI/VideoReward", "checkpoint-11352/model.pth"),
        ("KwaiVGI/VideoReward", "model_config.json"),
        ("Qwen/Qwen2-VL-2B-Instruct", "reader"),
        (dina, "checkpoint/backbone_lora/adapter_model.safetensors"),
        (dina, "checkpoint/rm_head.pt"),
        (dina, "config.json"),
        ("zhiqiulin/clip-flant5-xl", "network"),
        ("openai/clip-vit-large-patch14-336", "network"),
        ("google/flan-t5-xl", "reader"),
        ("TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508", "model.safetensors"),
        ("XiaomiMiMo/MiMo-VL-7B-SFT-2508", "reader"),
        ("zhiyuanyou/DeQA-Score-Mix3", "network"),
    }
    also = "data.also=[{prompts: owner/more}]"
    assert ("owner/more", "data set") in named("sd3/flow_grpo", also)


def test_what_is_loaded_of_a_repository_is_what_is_used() -> None:
    files = ["model_index.json", "all.safetensors", "vae/config.json", "vae/diffusion.safetensors", "vae/diffusion.bin"]
    files += ["vae/diffusion.fp16.safetensors", "other/model.safetensors", "tokenizer/vocab.json", "page.png"]
    kept = ["model_index.json", "tokenizer/vocab.json", "vae/config.json", "vae/diffusion.safetensors"]
    assert chosen(files, "pipeline", ["vae", "tokenizer"]) == kept
    assert chosen(["config.json", "model.bin", "tf_model.h5"], "network") == ["config.json", "model.bin"]
    assert chosen(["config.json", "model.safetensors", "merges.txt"], "reader") == ["config.json", "merges.txt"]
    assert chosen(["a.pt", "b.pt"], "b.pt") == ["b.pt"]


def test_a_part_that_is_missing_is_noticed(cache: Path) -> None:
    pipeline, network = Download("model.path", "a/pipe", "pipeline"), Download("rewards", "a/net", "network")
    assert here(pipeline) is None and here(network) is None
    keep(cache, "a/pipe", "model_index.json", "vae/diffusion.safetensors")
    assert here(pipeline) is None
    keep(cache, "a/pipe", "tokenizer/vocab.json")
    assert here(pipeline) is not None
    keep(cache, "a/net", "model.safetensors.index.json", "part-1.safetensors")
    assert here(network) is None
    keep(cache, "a/net", "part-2.safetensors")
    assert here(network) is not None
    assert here(Download("rewards", "a/net", "head.pt")) is None


def test_offline_it_is_said_at_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(cache, "facebook/mask2former-swin-small-coco-instance", "model.safetensors")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["fetch", *arguments])
        return int(left.value.code or 0), *capsys.readouterr()

    code, out, _ = run("sd3/flow_grpo_geneval", "--check")
    lines = [line.split()[:2] for line in out.splitlines()]
    assert code == 1 and lines == [
        ["missing", SD3],
        ["here", "facebook/mask2former-swin-small-coco-instance"],
        ["missing", "openai/clip-vit-large-patch14"],
    ]
    code, out, err = run("sd3/flow_grpo_geneval")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"offline, and not on this machine: {SD3}, openai/clip" in err
    assert run("tiny_sd3/demo")[:2] == (0, "tiny_sd3/demo takes nothing from the hub\n")


def test_a_dry_run_says_what_is_missing_and_how_long_the_recipe_takes(cache: Path) -> None:
    config = load(recipe("tiny_sd3/flow_grpo"), ["rewards=[{name: pick_score}]", "training.iterations=7"])
    report = dry_run(config, full=True)
    assert [one.repository for one in missing(config)] == [line.split(" for ")[0] for line in report.missing]
    assert any("flowalign fetch gets it" in line for line in report.lines())
    # one group of 24 was tried
    one = report.seconds["rollout"] + report.seconds["update"]
    assert report.projected == pytest.approx(one * 24 * 7)
