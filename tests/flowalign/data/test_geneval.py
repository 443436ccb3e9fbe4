"""Generated GenEval prompts: the published format, a split that shares nothing, and a reward that reads them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.data import Prompts
from flowalign.data.geneval import CLASSES, TASKS, _record, content_of, generate, parse_shares, possible
from flowalign.errors import ConfigError
from rewards.detection import DetectedObject, Detection, geneval_name

# One line a task as in github.com/djghosh13/geneval, prompts/evaluation_metadata.jsonl.
PUBLISHED = [
    '{"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}',
    '{"tag": "two_object", "include": [{"class": "bench", "count": 1}, {"class": "sports ball", "count": 1}],'
    ' "prompt": "a photo of a bench and a sports ball"}',
    '{"tag": "counting", "include": [{"class": "pizza", "count": 3}], "exclude": [{"class": "pizza", "count": 4}],'
    ' "prompt": "a photo of three pizzas"}',
    '{"tag": "colors", "include": [{"class": "clock", "count": 1, "color": "green"}],'
    ' "prompt": "a photo of a green clock"}',
    '{"tag": "position", "include": [{"class": "couch", "count": 1}, {"class": "bird", "count": 1,'
    ' "position": ["left of", 0]}], "prompt": "a photo of a bird left of a couch"}',
    '{"tag": "color_attr", "include": [{"class": "tennis racket", "count": 1, "color": "purple"},'
    ' {"class": "sink", "count": 1, "color": "black"}],'
    ' "prompt": "a photo of a purple tennis racket and a black sink"}',
]


@pytest.mark.parametrize("line", PUBLISHED, ids=TASKS)
def test_a_published_line_is_one_of_the_wordings_of_what_it_asks_for(line: str) -> None:
    published = json.loads(line)
    task, *choice = content_of(published)
    assert tuple(choice) in possible(task)
    wordings = [_record(task, tuple(choice), np.random.default_rng(seed)) for seed in range(8)]
    assert published | {"category": task} in wordings
    assert all(content_of(wording) == (task, *choice) for wording in wordings)


def test_places_in_another_order_are_the_same_request() -> None:
    both = [json.loads(PUBLISHED[4]), json.loads(PUBLISHED[4])]
    both[1]["include"] = [{"class": "bird", "count": 1}, {"class": "couch", "count": 1, "position": ["right of", 0]}]
    assert content_of(both[0]) == content_of(both[1])


def test_the_possible_prompts_are_as_many_as_the_tasks_allow() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 80
    numbers = [len(possible(task)) for task in TASKS]
    assert numbers == [80, 80 * 79 // 2, 80 * 3, 79 * 10, 80 * 79 * 2, 79 * 78 // 2 * 90]
    assert all(len(set(possible(task))) == number for task, number in zip(TASKS, numbers, strict=True))


def test_the_split_is_seeded_disjoint_and_keeps_its_shares() -> None:
    shares = parse_shares("1:1:5:1:7:3")
    train, held = generate(3600, 360, 3, shares)
    assert (train, held) == generate(3600, 360, 3, shares) != generate(3600, 360, 4, shares)
    assert Counter(r["tag"] for r in train) == dict(zip(TASKS, (200, 200, 1000, 200, 1400, 600), strict=True))
    assert Counter(r["tag"] for r in held) == dict(zip(TASKS, (20, 20, 100, 20, 140, 60), strict=True))
    assert not {content_of(r) for r in train} & {content_of(r) for r in held}
    assert len({content_of(r) for r in held}) == 360
    relations = Counter(r["include"][1]["position"][0] for r in train if r["tag"] == "position")
    assert min(relations[name] for name in ("left of", "right of", "above", "below")) > 280


def test_the_command_writes_what_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = tmp_path / "evaluation_metadata.jsonl"
    published.write_text("\n".join(PUBLISHED))
    arguments = ["prompts", "geneval", "--count", "9000", "--heldout", "60", "--avoid", str(published)]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--output", str(tmp_path / "g.jsonl"), "--shares", "1:32:3:8:1:1"])
    assert not left.value.code and "9000 prompts" in capsys.readouterr().out
    train, held = (Prompts.read(str(tmp_path / name)) for name in ("g.jsonl", "g_heldout.jsonl"))
    assert (len(train), len(held)) == (9000, 60)
    avoided = {content_of(json.loads(line)) for line in PUBLISHED}
    assert not avoided & {content_of(record) for record in train.metadata + held.metadata}
    for shares in ("1:2", "0:0:0:0:0:0", "a:1:1:1:1:1", "1:1:1:1:1:-1"):
        with pytest.raises(ConfigError, match="six shares"):
            parse_shares(shares)
    (tmp_path / "plain.txt").write_text("a cat\n")
    with pytest.raises(SystemExit) as left:
        main([*arguments[:-1], str(tmp_path / "plain.txt"), "--output", str(tmp_path / "x.jsonl")])
    assert left.value.code == 2 and "not GenEval's metadata" in capsys.readouterr().err


class Perfect(Detection):
    """The reward without its networks: it sees a picture in which every prompt came true."""

    def __init__(self, labels: list[str], colour: str) -> None:
        self.network = torch.nn.Module()
        self.network.config = type("Config", (), {"id2label": dict(enumerate(labels))})()  # type: ignore[assignment]
        self.colour = colour

    def _colour(self, image: Any, item: DetectedObject, prompt: str) -> str:
        return self.colour


@pytest.mark.parametrize("task", TASKS)
def test_the_detection_reward_scores_every_task(task: str) -> None:
    places = {"left of": (0, 50), "right of": (100, 50), "above": (50, 0), "below": (50, 100)}
    names = {"computer mouse": "mouse", "couch": "sofa", "tv": "tvmonitor", "potted plant": "pottedplant"}
    labels = [names.get(name, name) for name in CLASSES]
    made, _ = generate(60, 0, 1, {task: 1.0})
    for record in made:
        found = []
        for want in record["include"]:
            x, y = places[want["position"][0]] if "position" in want else (50, 50)
            label = geneval_name(names.get(want["class"], want["class"]))
            found += [DetectedObject(label, 0.95, (x, y, x + 10.0, y + 10.0))] * want["count"]
        colours = {want.get("color", "red") for want in record["include"]}
        for colour in colours:
            reward = Perfect(labels, colour)
            met, grade = reward.judge(Image.new("RGB", (160, 160)), record["prompt"], record, found)
            assert all(met) or len(colours) > 1
            assert (grade == 1) == all(met)
        more = [*found, found[0]] if task == "counting" else found[1:]
        met, grade = reward.judge(Image.new("RGB", (160, 160)), record["prompt"], record, more)
        assert not all(met) and grade < 1
