"""`flowalign judge reliability`: the shipped tiny judge on drawings whose labels are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.app.cli.main import main
from rewards.shapes import draw, parse

PROMPTS = ["a red circle", "a blue square", "a green triangle", "a yellow square", "a red square", "a blue circle"]
JUDGE = "rewards: [{{name: {name}, template: {template}, judge: {{model: tiny_vlm, batch_size: 32}}}}]\n"


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drawings of each prompt, and two of another one."""
    folder, rng = tmp_path_factory.mktemp("drawings"), np.random.default_rng(0)
    with open(folder / "labelled.jsonl", "w") as lines:
        for i, prompt in enumerate(PROMPTS):
            for n in range(4):
                Image.fromarray(draw(parse(PROMPTS[i - n % 2]), rng)).save(folder / f"{i}-{n}.png")
                line = {"prompt": prompt, "target": f"{i}-{n}.png", "label": n % 2 == 0, "odd": n % 2}
                lines.write(json.dumps(line) + "\n")
    for name, template in (("vlm_judge", "shapes_show"), ("vlm_pairwise", "shapes_better")):
        (folder / f"{name}.yaml").write_text(JUDGE.format(name=name, template=template))
    return folder


def reliability(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["judge", "reliability", *map(str, words)])
    return int(left.value.code or 0)


def test_a_local_judge_is_steady_and_orders_known_labels(
    drawings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "judge.json"
    words = ["--draws", "2", "--wording", "shapes_show", "--size", "0.5", "--json", path]
    assert reliability(drawings / "vlm_judge.yaml", drawings / "labelled.jsonl", *words) == 0
    (record,) = json.loads(path.read_text()).values()
    assert record["samples"] == 24 and record["noise"]["high"] < 1e-4 and record["needed"]["mean"] == 1
    assert record["disturbances"]["wording shapes_show"]["noise"]["high"] < 1e-4
    assert record["disturbances"]["size 0.5"]["noise"]["mean"] > 0.001
    assert record["labels"]["auc_in_groups"]["low"] > 0.6 and record["tokens"] > 10
    printed = capsys.readouterr().out
    assert "24 samples of 6 prompts, asked 2 times" in printed and "Brier score" in printed


def test_a_judge_of_pairs_is_asked_in_both_orders(
    drawings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.json"
    words = ["--draws", "2", "--size", "1", "--prompts", "3", "--json", path]
    assert reliability(drawings / "vlm_pairwise.yaml", drawings / "labelled.jsonl", *words) == 0
    (record,) = json.loads(path.read_text()).values()
    # six pairs of each of three prompts, in both orders
    assert record["verdicts"] == 36 and set(record["disturbances"]) == {"order"}
    assert "prefers what comes first by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vlm_judge.yaml", "labelled.jsonl", "--labels", "beauty"], "--labels beauty: not every sample has a number"),
        (["vlm_judge.yaml", "nothing.jsonl"], "nothing.jsonl"),
        (["shapes.yaml", "labelled.jsonl", "--wording", "shapes_show"], "--wording: 'shapes' has no template"),
    ],
)
def test_what_cannot_be_measured_is_said(
    drawings: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (drawings / "shapes.yaml").write_text("rewards: [{name: shapes}]\n")
    assert reliability(*(drawings / word if "." in word else word for word in words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
