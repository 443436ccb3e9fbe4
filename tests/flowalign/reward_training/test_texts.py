"""Reward models of texts: losses against TRL's and the papers' formulas, training, and the rewards that load the
result."""

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from flowalign.app.cli.rewards import train_reward
from flowalign.app.cli.text_rewards import pair_strengths
from flowalign.config import load, recipe
from flowalign.data import ASSETS, Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.texts import LOSSES, TextScorer, calibration_error, flipped
from flowalign.training import Trainer
from rewards import score
from rewards.pairwise import WinRate
from rewards.text.reward_model import RewardModel
from rewards.text.scored import TextPreference, TextScore, preferred

TINY = str(ASSETS / "tiny_lm")
app = typer.Typer()
app.command()(train_reward)
app.command()(pair_strengths)


def lines(count: int) -> list[dict]:
    """Sums whose right value is preferred to ten times as much."""
    records = []
    for i in range(count):
        a, b = i % 9, (7 * i + i // 9) % 9
        record = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b}0"}
        records.append(record | {"strength": 1 + i % 3, "chosen_rating": 4, "rejected_rating": i % 4})
    return records


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in lines(60)))
    return path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_losses_are_trls_and_the_papers() -> None:
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 6)
    records = lines(6)
    made = {name: LOSSES[name](chosen, rejected, records) for name in LOSSES if name != "general"}
    for i, record in enumerate(records):
        c, r, s = chosen[i].item(), rejected[i].item(), record["strength"]

        def log_sigmoid(x: float) -> float:
            return -math.log(1 + math.exp(-x))

        errors = (c - 4) ** 2 + (r - record["rejected_rating"]) ** 2
        expected = {
            "bradley_terry": -log_sigmoid(c - r),
            "centred": -log_sigmoid(c - r) + 0.01 * (c + r) ** 2,
            "margin": -log_sigmoid(c - r - s),
            "scaled": -s * log_sigmoid(c - r),
            "soft": -(log_sigmoid(c - r) + math.exp(-s) * log_sigmoid(r - c)) / (1 + math.exp(-s)),
            "regression": errors,
            "helpsteer": -s * log_sigmoid(c - r) + errors,
        }
        assert {name: values[i].item() for name, values in made.items()} == pytest.approx(expected, abs=1e-5)


def test_bradley_terry_and_margins_are_trls_own(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    network = RewardModel.load(TINY, device="cpu", outputs=1).network
    records = lines(4)
    ids = {
        f"{side}_ids": [
            tokenizer(record["prompt"] + record[side] + tokenizer.eos_token).input_ids for record in records
        ]
        for side in ("chosen", "rejected")
    }
    data = Dataset.from_dict(ids | {"margin": [float(record["strength"]) for record in records]})
    settings = RewardConfig(
        output_dir=str(tmp_path), center_rewards_coefficient=0.01, report_to=[], use_cpu=True, bf16=False
    )
    trainer = RewardTrainer(network, settings, train_dataset=data, processing_class=tokenizer)
    batch = trainer.data_collator([data[i] for i in range(4)])
    theirs = trainer.compute_loss(trainer.model, batch)
    scorer = TextScorer(TINY, "margin")
    scorer.model.network = scorer.network = network
    pairs = Preferences([r["prompt"] for r in records], records)
    ours = scorer.losses(pairs, range(4)).mean() + 0.01 * (sum(scorer.sides(pairs, range(4))) ** 2).mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


def test_scores_are_what_transformers_gives_one_text_at_a_time(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    network.config.pad_token_id = tokenizer.pad_token_id
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts, prompts = ["42", "3", ""], ["17+25=", "1+1+1=", "2="]
    made = score(TextScore(str(tmp_path), weights=[0.5, -2.0], device="cpu"), texts, prompts, [{}] * 3).value.tolist()
    for value, text, prompt in zip(made, texts, prompts, strict=True):
        with torch.no_grad():
            numbers = network(**tokenizer(prompt + text + tokenizer.eos_token, return_tensors="pt")).logits[0].tolist()
        assert value == pytest.approx(0.5 * numbers[0] - 2 * numbers[1], abs=1e-5)
    with pytest.raises(ValueError, match="gives 2 numbers a text"):
        TextScore(str(tmp_path))
    with pytest.raises(ValueError, match="has no head that scores texts"):
        TextScore(TINY)
    # a reference comes before prompt and text
    compared = TextScore(str(tmp_path), [1, 0], reference="better", device="cpu")
    (made,) = score(compared, ["2"], ["1+1="], [{"better": "3="}]).value.tolist()
    with torch.no_grad():
        expected = network(**tokenizer("3=1+1=2" + tokenizer.eos_token, return_tensors="pt")).logits[0, 0].item()
    assert made == pytest.approx(expected, abs=1e-5)


def test_embeddings_prefer_in_circles() -> None:
    angles = torch.tensor([0.0, 2.1, 4.2])
    rock, paper, scissors = torch.stack([angles.cos(), angles.sin()], 1)[:, None]
    wins = [preferred(a, b).item() for a, b in ((paper, rock), (scissors, paper), (rock, scissors))]
    assert min(wins) > 0 and preferred(rock, paper).item() == pytest.approx(-wins[0])
    # v_i^T R v_j with R of blocks (0 -1; 1 0), which turns by a right angle
    block = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * 2)
    first, second = torch.randn(2, 5, 4)
    assert torch.allclose(preferred(first, second), torch.einsum("ni,ij,nj->n", first, block, second), atol=1e-6)


@pytest.mark.parametrize("loss", ["bradley_terry", "general"])
def test_training_helps_and_the_result_is_a_reward(loss: str, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "reward"
    settings = ["--epochs", "5", "--batch-size", "20", "--learning-rate", "3e-3", "--heldout", file, "--loss", loss]
    said = run("train-reward", file, "--texts", "--min-pairs", "60", "--model", "tiny_lm", "--out", out, *settings)
    report = json.loads((out / "reward.json").read_text())
    assert report["heldout_accuracy_after"] > max(0.85, report["heldout_accuracy_before"]), report
    assert 0 <= report["heldout_calibration_error"] < 0.3
    records = lines(30)
    texts, prompts = (
        [r[side] for r in records for side in ("chosen", "rejected")],
        [r["prompt"] for r in records for _ in "ab"],
    )
    if loss == "general":
        assert "{name: win_rate, reward: {name: text_preference" in said
        made = WinRate(TextPreference(str(out), device="cpu"))(
            texts, prompts, [{"group": i // 2} for i in range(60)]
        ).value
    else:
        assert f"rewards: [{{name: text_score, model: {out}}}]" in said
        made = TextScore(str(out), device="cpu")(texts, prompts, [{}] * 60).value
        trainer = Trainer(
            load(
                recipe("tiny_lm/grpo"),
                [
                    f"rewards=[{{name: text_score, model: {out}}}]",
                    "training.iterations=1",
                    "training.prompts_per_iteration=2",
                    "training.group_size=4",
                    "training.micro_batch_size=8",
                    "evaluation.prompts=null",
                    f"output={tmp_path}",
                ],
            ),
            progress=False,
        )
        trainer.train()
        assert math.isfinite(trainer.metrics.read()[0]["reward/mean"])
    better, worse = made.view(-1, 2).unbind(1)
    assert (better > worse).float().mean() > 0.8


def test_a_judge_of_texts_is_trained_too(file: Path, tmp_path: Path) -> None:
    (tmp_path / "which.yaml").write_text(
        "source: tests\nanswer: probability\nfields: {first: '', second: ''}\n"
        "questions: [{name: better, pictures: [], ask: '{prompt}{first}={prompt}{second}=', labels: ['1', '2']}]\n"
    )
    out, template = tmp_path / "judge", tmp_path / "which.yaml"
    settings = ["--epochs", "5", "--batch-size", "20", "--learning-rate", "1e-3", "--heldout", file]
    said = run(
        "train-reward",
        file,
        "--texts",
        "--min-pairs",
        "60",
        "--model",
        "tiny_lm",
        "--template",
        template,
        "--out",
        out,
        *settings,
    )
    report = json.loads((out / "reward.json").read_text())
    assert report["heldout_accuracy_after"] > max(0.75, report["heldout_accuracy_before"])
    assert f"{{name: text_pairwise, template: {template}, judge: {{model: {out}}}}}" in said


def test_several_models_say_how_strong_a_preference_is(file: Path, tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        TextScorer(TINY, seed=seed).save(tmp_path / str(seed))
        models += ["--model", tmp_path / str(seed)]
    out = tmp_path / "strong.jsonl"
    run("pair-strengths", file, *models, "--out", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    rewards = [TextScore(str(tmp_path / str(seed)), device="cpu") for seed in (0, 1)]
    for record in records[:4]:
        gaps = [
            score(reward, [record["chosen"]], [record["prompt"]], [{}]).value
            - score(reward, [record["rejected"]], [record["prompt"]], [{}]).value
            for reward in rewards
        ]
        assert record["strength"] == pytest.approx(((gaps[0] + gaps[1]) / 2).item(), abs=1e-4)
        assert record["strength_deviation"] == pytest.approx((gaps[0] - gaps[1]).abs().item() / 2, abs=1e-4)
    pairs = Preferences(["a", "b", "c"], [{"chosen": "x", "rejected": "y", "strength": s} for s in (-2.0, 0.1, 3.0)])
    turned = flipped(pairs, below=0, drop=0.5)
    assert turned.texts == ["a", "c"] and turned.metadata[0] == {"chosen": "y", "rejected": "x", "strength": 2.0}


def test_calibration_is_right_where_probabilities_are() -> None:
    odds = torch.tensor([math.log(0.75 / 0.25)] * 400)
    right = torch.tensor([1.0] * 300 + [-1.0] * 100)
    assert calibration_error(odds * right) == pytest.approx(0, abs=1e-6)
    assert calibration_error(odds) == pytest.approx(0.25, abs=1e-6)


def test_what_cannot_be_trained_on_is_said_in_one_line(file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    bare = tmp_path / "bare.jsonl"
    bare.write_text(
        "".join(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": str(i)}) + "\n" for i in range(120))
    )
    asked = ["train-reward", bare, "--texts", "--heldout", file, "--out", new]
    for arguments, message in [
        ([*asked], "--model: a reward model of texts is made of"),
        ([*asked, "--model", "no/such"], "no reward model of texts at 'no/such'"),
        ([*asked, "--model", "tiny_lm", "--loss", "nothing"], "'nothing' is not of bradley_terry"),
        ([*asked, "--model", "tiny_lm", "--loss", "margin"], "no number under 'strength'"),
        ([*asked, "--model", "tiny_lm", "--loss", "regression"], "no number under 'chosen_rating'"),
        ([*asked, "--model", "tiny_lm", "--reference", "gold"], "no reference text under 'gold'"),
        ([*asked, "--model", "tiny_lm", "--template", "vqa_score"], "is about pictures"),
        (["pair-strengths", bare, "--model", "no/such", "--out", new], "no reward model of texts"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            run(*arguments)
        assert "\n" not in str(error.value)
    assert not new.exists()
