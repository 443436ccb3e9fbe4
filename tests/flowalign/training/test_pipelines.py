"""Training of other pipelines than the shipped one, end to end: a video model, and one that edits pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowalign.app.gallery.runs import read_run
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.training import Trainer
from rewards.base import Scores, source_images
from rewards.frames import PerFrame


def settings(name: str, folder: Path, prompts: Path) -> dict[str, Any]:
    tiny = PIPELINES[name]
    build(name).save_pretrained(folder / "model")
    sampling = {"steps": 2, "guidance": 2.0, "batch_size": 4} | tiny.call
    return {
        "model": {"path": str(folder / "model"), "lora": {"rank": 2, "alpha": 4}, "encode": tiny.encode},
        "data": {"prompts": str(prompts)},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": "flow_grpo"},
        "rollout": sampling | {"eta": 0.7},
        "evaluation": sampling | {"prompts": str(prompts), "every": 1},
        "training": {
            "iterations": 2,
            "prompts_per_iteration": 2,
            "group_size": 4,
            "previews": 2,
            "optimizer": {"learning_rate": 1e-2},
        },
        "output": str(folder),
        "name": "run",
    }


def brightness(images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    return [float(np.asarray(image).mean() / 255) for image in images]


@pytest.mark.parametrize("name", ["wan", "wan22_5b_i2v", "hunyuan_video15_i2v", "sana_video"])
def test_a_video_model_trains_and_the_gallery_shows_its_clips(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "first.png"
    Image.new("RGB", (40, 20), "orange").save(picture)
    given = {"image": picture.name} if PIPELINES[name].images else {}
    lines = [{"prompt": text} | given for text in ("a red circle", "two blue squares")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = settings(name, tmp_path, tmp_path / "prompts.jsonl")
    trainer = Trainer(values, reward=PerFrame(brightness, frames=3), progress=False)
    # which are not saved with it: HunyuanVideo's own are 1,700 tokens a prompt
    for attribute, value in PIPELINES[name].attributes.items():
        setattr(trainer.policy.pipeline, attribute, value)
    trainer.train()
    metrics = trainer.metrics.read()
    assert len(metrics) == 2 and all(line["reward/std"] > 0 for line in metrics)
    assert metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert any(value.abs().max() > 0 for key, value in load_file(next(trainer.folder.glob("lora/*"))).items())
    run = read_run(trainer.folder, "run")
    clips = [sample.path for moment in run.moments for sample in moment.samples]
    clips += [member["picture"] for moment in run.previews for group in moment.groups for member in group["members"]]
    clips += [path for moment in run.previews for film in moment.films for path in film["pictures"]]
    assert len(clips) > 20
    for clip in clips:
        with Image.open(clip) as opened:
            call = PIPELINES[name].call
            assert opened.n_frames == call["num_frames"] and opened.size == (call["width"], call["height"])


class KeepsColour:
    """How close an edit's mean colour is to its source's."""

    name = "keeps_colour"

    def __init__(self) -> None:
        self.seen: set[tuple[tuple[int, int], tuple[int, ...]]] = set()

    def __call__(
        self, samples: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        sources = [pictures[0] for pictures in source_images(metadata)]
        self.seen |= {(image.size, source.getpixel((0, 0))) for image, source in zip(samples, sources, strict=True)}
        away = [
            np.abs(np.asarray(i).mean((0, 1)) - np.asarray(s).mean((0, 1))).mean() for i, s in zip(samples, sources)
        ]
        return Scores(-torch.tensor(away, dtype=torch.float32) / 255)


def test_an_editing_model_trains_on_source_and_result(tmp_path: Path) -> None:
    lines = []
    for colour in ("red", "blue"):
        Image.new("RGB", (30, 30), colour).save(tmp_path / f"{colour}.png")
        lines.append({"prompt": "make it brighter", "image": f"{colour}.png"})
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = settings("flux_kontext", tmp_path, tmp_path / "edits.jsonl")
    reward = KeepsColour()
    trainer = Trainer(values, reward=reward, progress=False)
    trainer.train()
    assert reward.seen == {((16, 8), (255, 0, 0)), ((16, 8), (0, 0, 255))}
    assert trainer.metrics.read()[0]["policy/ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "a cat", "image": "none.png"}, "line 1: no picture at"),
        ({"prompt": "a cat", "image": 3}, "line 1: 'image' is not a file name"),
        (
            {"prompt": "a cat"},
            "FluxKontextPipeline takes one picture a sample: 'image' in the line of the prompt 'a cat'",
        ),
        ({"prompt": "a cat", "image": ["a.png", "a.png"]}, "FluxKontextPipeline takes one picture a sample"),
        ({"prompt": "a cat", "image": "a.png", "mask": "a.png"}, "FluxKontextPipeline takes no 'mask'"),
    ],
)
def test_pictures_that_are_not_there_or_not_taken(line: dict[str, Any], says: str, tmp_path: Path) -> None:
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    (tmp_path / "edits.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=says) as caught:
        Trainer(settings("flux_kontext", tmp_path, tmp_path / "edits.jsonl"), reward=brightness, progress=False).train()
    assert "\n" not in str(caught.value)
