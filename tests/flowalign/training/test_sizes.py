"""Pictures of several sizes: by the prompts' lines, and held-out ones at a second size."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.data.by_size import BySize
from flowalign.data.selection.mopps import MoPPS
from flowalign.data.selection.sec import SEC
from flowalign.data.selection.shares import Shares
from flowalign.data.selection.shuffled import Shuffled
from flowalign.data.selection.together import Together
from flowalign.data.sizes import rows_by_size
from flowalign.errors import ConfigError
from flowalign.runs.metrics import MetricsFile
from flowalign.training.building import build_policy
from tests.flowalign.small_run import small_run

SIZES = [(24, 24), (16, 32), None]
PROMPTS = ["a red circle", "a blue square", "two green triangles", "a yellow square", "a red square", "a blue circle"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two lines of either size, and two of the configuration's."""
    lines = []
    for i, prompt in enumerate(PROMPTS):
        size = SIZES[i % 3]
        lines.append({"prompt": prompt} | (dict(zip(("height", "width"), size, strict=True)) if size else {}))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "prompts.jsonl"


def test_an_iteration_has_one_size_and_a_turn_has_every_prompt_once() -> None:
    metadata = [{"height": 16 * (1 + i % 3), "width": 32} for i in range(14)]
    listed = Prompts([str(i) for i in range(14)], metadata)
    # 5, 5 and 4 prompts of a size are three, three and two iterations of two
    turns = [[draw_batch(listed, 8 * turn + i, 2, 3, 0, True).picks[::3] for i in range(8)] for turn in range(2)]
    for turn in turns:
        assert all(len({metadata[pick]["height"] for pick in picks}) == 1 for picks in turn)
        drawn = [pick for picks in turn for pick in picks]
        assert set(drawn) == set(range(14)) and len(drawn) == 16
    assert turns[0] != turns[1]


@pytest.mark.parametrize("selection", [MoPPS, SEC, Together, partial(Shares, "task", {"a": 1, "b": 3}), Shuffled])
def test_every_selection_takes_one_size_an_iteration_and_goes_on_from_its_state(selection: Any) -> None:
    """Twice as many prompts of one size as of the other: twice as many iterations; further rounds are of their size."""
    metadata: list[dict[str, Any]] = [
        {"height": 16 if i < 24 else 32, "task": "ab"[i % 2], "category": "xy"[i // 2 % 2], "pair": i // 2}
        for i in range(36)
    ]
    listed, chosen = Prompts([str(i) for i in range(36)], metadata), None
    iterations: list[list[int]] = []
    for i in range(18):
        if i % 5 == 0:
            state = None if chosen is None else json.loads(json.dumps(chosen.state_dict()))
            chosen = BySize(selection, listed)
            if state is not None:
                chosen.load_state_dict(state)
        picks = chosen.picks(listed, i, 4, 0)
        again = chosen.picks(listed, i, 2, 0, 1)
        heights = {metadata[pick]["height"] for pick in picks + again}
        assert len(heights) == 1 and len(picks) == 4 and len(again) == 2
        chosen.learn(picks, listed, [0.5] * 4, [1.0] * 4)
        iterations.append(picks)
    assert sum(metadata[picks[0]]["height"] == 16 for picks in iterations) == 12
    if isinstance(chosen.selections[(("height", 16),)], Shares):
        drawn = [metadata[pick]["task"] for picks in iterations for pick in picks]
        assert drawn.count("b") == pytest.approx(3 * drawn.count("a"), rel=0.2)


def test_a_run_with_a_bandit_has_one_size_an_iteration(prompts: Path, tmp_path: Path) -> None:
    run = small_run(
        *("tiny_sd3/flow_grpo", tmp_path, f"data={{prompts: {prompts}, selection: {{name: mopps}}}}"),
        *("training.iterations=2", "training.prompts_per_iteration=2", "training.group_size=2"),
        "data.dynamic_sampling={rounds: 2}",
    )
    run.train()
    learned = [selection.evidence for selection in run.selection.selections.values()]
    assert sum(map(len, learned)) >= 2


def test_training_and_evaluation_make_each_prompt_at_its_size(prompts: Path, tmp_path: Path) -> None:
    run = small_run(
        *("tiny_sd3/flow_grpo", tmp_path, f"data={{prompts: {prompts}}}"),
        *("training.iterations=3", "training.prompts_per_iteration=2", "training.group_size=2", "training.previews=1"),
        *(f"evaluation.prompts={prompts}", "evaluation.where={}", "evaluation.samples_per_prompt=1"),
        *("evaluation.also_at={height: 16, width: 16}", "evaluation.save_samples=6"),
    )
    shapes = [tuple(run.sampler.rollout(run.groups.draw(i).batch).trajectory.final.shape[-2:]) for i in range(3)]
    # a latent is four pixels
    assert set(shapes) == {(6, 6), (4, 8), (8, 8)}
    run.train()
    file = run.folder / "samples/iteration-000003/samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 12
    policy = build_policy(run.config, "cpu")
    policy.pipeline.load_lora_weights(str(run.folder / "lora"))
    sampling = run.config.evaluation
    for line in lines:
        height, width = line["metadata"].get("height", 32), line["metadata"].get("width", 32)
        saved = Image.open(run.folder / "samples/iteration-000003" / line["picture"])
        assert saved.size == (width, height)
        if line["seed"] % 3:
            continue
        plain = policy.pipeline(
            line["prompt"],
            num_inference_steps=sampling.steps,
            sigmas=sampling.sigmas,
            guidance_scale=1,
            height=height,
            width=width,
            max_sequence_length=0,
            generator=torch.Generator().manual_seed(line["seed"]),
        ).images[0]
        assert np.abs(np.asarray(plain, dtype=int) - np.asarray(saved, dtype=int)).max() <= 1
    first, *_, last = MetricsFile(run.folder / "evaluations.jsonl").read()
    second = [line["reward"] for line in lines if line["metadata"].get("height") == 16 == line["metadata"]["width"]]
    assert last["16x16/reward"] == pytest.approx(np.mean(second)) and len(second) == 6
    assert last["16x16/reward_error"] == pytest.approx(np.std(second, ddof=1) / 6**0.5) and "16x16/reward" in first


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        ([{"height": "tall"}], [], "height 'tall' of a prompt is no number of pixels"),
        ([{"height": 20, "width": 24}], [], "data.prompts, height 20, width 24"),
        ([{"height": 24}, {}], ["data.replay={}"], "data.replay: brings back groups of any size"),
        ([{}], ["evaluation.also_at={height: 20, width: 16}"], "evaluation.also_at: "),
    ],
)
def test_sizes_that_cannot_be_made_are_refused(
    lines: list[dict[str, object]], overrides: list[str], message: str, tmp_path: Path
) -> None:
    records = [{"prompt": "a red circle", "category": "counting"} | line for line in lines]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = load(recipe("tiny_sd3/flow_grpo"), [f"data={{prompts: {tmp_path / 'prompts.jsonl'}}}", *overrides])
    with pytest.raises(ConfigError) as raised:
        config.check(1)
        build_policy(config, "cpu")
    assert message in str(raised.value)


def test_also_at_is_of_pictures() -> None:
    with pytest.raises(ConfigError, match="evaluation.also_at: is a size of pictures"):
        load(recipe("tiny_lm/grpo"), ["evaluation.also_at={height: 16, width: 16}"]).check(1)


def test_rows_by_size_keep_their_order() -> None:
    rows = rows_by_size([{"height": 16}, {}, {"height": 16, "width": None}])
    assert rows == {(("height", 16),): [0, 2], (): [1]}
