"""`flowalign sample` with pictures to fill and to begin videos with, on tiny pipelines saved as folders."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.planning.tiny_pipelines import build


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A picture and a mask of another size than the samples."""
    noise = np.random.default_rng(0).integers(0, 255, (16, 32, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "room.png")
    half = np.zeros((16, 32), np.uint8)
    half[:, 16:] = 255
    Image.fromarray(half).save(tmp_path / "half.png")
    return tmp_path / "room.png", tmp_path / "half.png"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["sample", *arguments])
    return int(stopped.value.code or 0)


def test_a_filled_picture_is_that_of_plain_diffusers(files: tuple[Path, Path], tmp_path: Path) -> None:
    build("sd15_inpaint").save_pretrained(tmp_path / "model")
    picture, mask = files
    given = ["--image", str(picture), "--mask", str(mask), "--height", "8", "--width", "16", "--steps", "2"]
    assert run(str(tmp_path / "model"), "a red sofa", *given, "--seed", "3", "--output", str(tmp_path / "made")) == 0
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "model", safety_checker=None, feature_extractor=None)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False, set_alpha_to_one=True)
    [expected] = pipe(
        "a red sofa",
        image=Image.open(picture).resize((16, 8), Image.Resampling.BICUBIC),
        mask_image=Image.open(mask).resize((16, 8), Image.Resampling.BICUBIC),
        height=8,
        width=16,
        strength=1.0,
        guidance_scale=1.0,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
    ).images
    made = np.asarray(Image.open(tmp_path / "made" / "00000-seed3.png")).astype(int)
    assert made.std() > 1 and np.abs(made - np.asarray(expected).astype(int)).max() <= 1


def test_a_video_has_its_first_frame(files: tuple[Path, Path], tmp_path: Path) -> None:
    build("ltx_i2v").save_pretrained(tmp_path / "model")
    sides = ["--height", "32", "--width", "64", "--num-frames", "9", "--steps", "2"]
    given = ["--image", str(files[0]), "--output", str(tmp_path / "made"), *sides]
    assert run(str(tmp_path / "model"), "a cat walks", *given) == 0
    with Image.open(tmp_path / "made" / "00000-seed0.webp") as video:
        assert video.size == (64, 32) and video.n_frames == 9
    # the schedule that LTX is published with divides 0 by 0 where it has one step
    assert run(str(tmp_path / "model"), "a cat walks", *given[:-1], "1") == 1


def test_pictures_that_a_model_does_not_take_are_refused(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, mask = map(str, files)
    build("ltx_i2v").save_pretrained(tmp_path / "model")
    cases = [
        (["tiny_sd3", "--image", picture], "StableDiffusion3Pipeline makes samples from prompts alone"),
        (["tiny_sd3", "--image", "nowhere.png"], "no picture at nowhere.png"),
        (["tiny_sd3", "--mask", mask], "--image FILE names the picture"),
        ([str(tmp_path / "model")], "takes one picture a sample.*--image"),
        ([str(tmp_path / "model"), "--image", picture, "--mask", mask], "takes no 'mask'.*--mask"),
        ([str(tmp_path / "model"), "--image", picture], "set the height and width"),
    ]
    for (model, *given), says in cases:
        assert run(model, "a red sofa", *given, "--steps", "1", "--output", str(tmp_path / "made")) == 2
        # after what the libraries say while a model loads
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("flowalign: ") and re.search(says, line)


@pytest.mark.parametrize("command", [["sample"], ["search"]])
def test_a_prompt_that_is_no_text_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "tiny_sd3", "a \ud800"])
    assert "holds half of a surrogate pair" in capsys.readouterr().err


def test_frames_of_a_model_of_pictures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [["sample", "tiny_sd3", "a"], ["search", "tiny_sd3", "a", "--reward", "shapes"]]
    commands += [["bench", "tiny_sd3", "--suite", "shapes"], ["pairs", "tiny_sd3", "shapes_heldout"]]
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--num-frames", "9", "--output", str(tmp_path / command[0])])
        assert stopped.value.code and "--num-frames: StableDiffusion3Pipeline" in capsys.readouterr().err
