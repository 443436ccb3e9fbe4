"""`flowalign pairs`: from a model and prompts to votes, and from the votes to a trained model and a second round."""

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.app.gallery.build import lay_out
from flowalign.app.gallery.server import Polls, Refused
from flowalign.config import load
from flowalign.data import Preferences

PROMPTS = ["a red circle", "two blue squares", "a green triangle"]
SMALL = ["training.iterations=1", "training.prompts_per_iteration=2", "training.group_size=2"]


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples of three prompts."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    sizes = ["--per-prompt", "3", "--steps", "2", "--batch-size", "4", "--seed", "20"]
    assert run("pairs", "tiny_sd3", folder / "prompts.txt", *sizes, "-o", folder / "round1") == 0
    return folder / "round1"


@pytest.fixture(scope="module")
def polls(made: Path) -> Polls:
    return Polls(lay_out([made], made / "gallery"), made / "gallery")


def test_samples_are_of_several_seeds_and_lie_where_the_gallery_looks(made: Path) -> None:
    lines = [json.loads(line) for line in (made / "samples/iteration-000000/samples.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines] == [(PROMPTS[n // 3], 20 + n) for n in range(9)]
    pictures = [Image.open(made / "samples/iteration-000000" / line["picture"]).tobytes() for line in lines]
    assert len(set(pictures)) == 9
    assert run("pairs", "tiny_sd3", made.parent / "prompts.txt", "-o", made) == 2


def test_a_moment_is_judged_against_itself_by_every_two_seeds_of_a_prompt(polls: Polls) -> None:
    contest = polls.contest(0, 0)
    sides = [(x.sample.prompt, y.sample.prompt, {x.sample.seed, y.sample.seed}) for x, y in contest.values()]
    assert len(sides) == 9 and all(one == other and len(seeds) == 2 for one, other, seeds in sides)
    with pytest.raises(Refused, match="choose a moment"):
        polls.contest(0, 1)
    ballot = polls.next("Ada", 0, 0)
    shown = {side: polls.picture(0, 0, ballot["pair"], side, ballot[side]["picture"].split("/")[-1].split(".")[0])
             for side in ("left", "right")}  # fmt: skip
    assert len(set(shown.values())) == 2


def test_votes_on_a_base_model_are_trained_on_and_judged_again(
    made: Path, polls: Polls, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(9):
        # eight pairs, and one with a broken picture among them, which is no preference
        polls.vote("Ada", 0, 0, polls.next("Ada", 0, 0)["pair"], "left")
    polls.vote("Ada", 0, 0, polls.next("Ada", 0, 0)["pair"], "tie")
    results = polls.results(0, 0)
    assert polls.next("Ada", 0, 0)["pair"] is None and results["enough"].startswith("8 choices")
    commands = [shlex.split(line)[1:] for line in results["commands"]]
    assert [words[0] for words in commands] == ["gallery", "train", "train-reward"]
    assert run(*commands[0]) == 0
    votes = Preferences.read(str(made / "gallery/votes.jsonl"))
    assert len(votes) == 8 and {record["seed"] for record in votes.metadata} <= {
        f"{first} and {second}" for first in range(20, 29) for second in range(20, 29) if first < second
    }
    assert run(*commands[1], *SMALL, f"output={made.parent}", "name=first") == 2
    assert "too few preferences yet (8)" in capsys.readouterr().err
    assert run(*commands[1], *SMALL, "algorithm.min_pairs=8", f"output={made.parent}", "name=first") == 0
    first = made.parent / "first"
    trained = load(first / "config.yaml")
    assert trained.rollout.steps == 2 and (first / "lora").is_dir()
    assert trained.model.encode == {"max_sequence_length": 0}
    # the second round: samples of what the first trained, and training that starts there
    prompts = made.parent / "prompts.txt"
    assert run("pairs", first, prompts, "--per-prompt", "2", "--limit", "1", "-o", made.parent / "round2") == 0
    second = load(made.parent / "round2" / "dpo.yaml")
    assert second.model.path == "tiny_sd3" and second.model.lora.path == str(first / "lora")
    second.build_algorithm()
