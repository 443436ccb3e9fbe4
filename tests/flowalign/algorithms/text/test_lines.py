"""Methods that learn from texts of the data: an update beside plain transformers, a run, and lines that are none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from flowalign.algorithms.text.online_text_dpo import BestAndWorst
from flowalign.algorithms.text.text_kto import LabelExperience, mismatched_gain
from flowalign.core.distillation import total_variation
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import demonstrated
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

LINES = [
    {"prompt": "72+33=", "chosen": "105", "rejected": "95"},
    {"prompt": "4+4=", "chosen": "8", "rejected": "-12"},
    {"prompt": "11-9=", "chosen": "2", "rejected": "20"},
    {"prompt": "29+61=", "chosen": "90", "rejected": "9"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line | {"completion": line["chosen"], "label": True}) + "\n" for line in LINES))
    return path


def trainer(name: str, file: Path, folder: Path, *overrides: str) -> Trainer:
    given = (
        f"data={{prompts: {file}}}",
        "model.lora=null",
        "training.group_size=1",
        "training.prompts_per_iteration=4",
        # micro-batches of texts of different lengths
        "training.micro_batch_size=3",
        "evaluation.prompts=null",
    )
    return small_run(f"tiny_lm/{name}", folder, *given, *overrides)


def literal(run: Trainer, text: dict[str, str], key: str) -> torch.Tensor:
    """[T] log-probabilities of a completion's tokens and its end token, by the network and softmax alone."""
    policy: Any = run.policy
    prompt = policy.tokenizer(text["prompt"]).input_ids
    answer = [*policy.tokenizer(text[key], add_special_tokens=False).input_ids, policy.tokenizer.eos_token_id]
    logits = policy.network(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return F.log_softmax(logits.float(), -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def gradient(run: Trainer, loss: torch.Tensor) -> torch.Tensor:
    parameters = list(run.policy.trainable().values())
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])


def learned(run: Trainer) -> tuple[torch.Tensor, float]:
    """The gradient of an iteration, and the loss in its metrics."""
    seen = []
    step = run.learner.step

    def keep() -> Any:
        seen.append(torch.cat([each.grad.flatten() for each in run.policy.trainable().values()]))
        return step()

    run.learner.step = keep  # type: ignore[method-assign]
    metrics = run.iterate()
    return seen[0], metrics["policy/loss"]


def test_fine_tuning_is_the_likelihood_of_all_tokens(file: Path, tmp_path: Path) -> None:
    run = trainer("text_sft", file, tmp_path, "algorithm.completion=chosen")
    expected = -torch.cat([literal(run, line, "chosen") for line in LINES]).mean()
    expected_gradient = gradient(run, expected)
    found, loss = learned(run)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_alike(found, expected_gradient)


def assert_alike(gradient: torch.Tensor, expected: torch.Tensor) -> None:
    """Two gradients are equal but for float32's last bits, whose size is that of the largest element."""
    torch.testing.assert_close(gradient, expected, atol=1e-6 * (1 + float(expected.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_preferences_are_learned_as_written_down(loss: str, file: Path, tmp_path: Path) -> None:
    run = trainer("text_dpo", file, tmp_path, f"algorithm.loss={loss}", "algorithm.sft_weight=0.5")
    chosen, rejected = ([literal(run, line, key) for line in LINES] for key in ("chosen", "rejected"))
    if loss == "sigmoid":
        # the reference is the policy still
        margin = torch.stack([a.sum() - b.sum() for a, b in zip(chosen, rejected, strict=True)])
        expected = -F.logsigmoid(0.1 * (margin - margin.detach())).mean()
    else:
        margin = torch.stack([a.mean() - b.mean() for a, b in zip(chosen, rejected, strict=True)])
        expected = -F.logsigmoid(2 * margin - 1).mean()
    expected = expected - 0.5 * torch.cat(chosen).mean()
    expected_gradient = gradient(run, expected)
    found, measured = learned(run)
    assert measured == pytest.approx(expected.item(), rel=1e-5)
    assert_alike(found, expected_gradient)


def test_tokens_are_guided_by_two_prompts_or_by_a_model(file: Path, tmp_path: Path) -> None:
    prompts = ("algorithm.better='{prompt}1='", "algorithm.worse='{prompt}2='")
    run = trainer("token_dpo", file, tmp_path, *prompts, "algorithm.beta=0.5")
    experience = run.collect(run.groups.draw(0))
    for row, line in enumerate(experience.batch.metadata):
        prompt = experience.batch.prompts[row]
        better, worse = (literal(run, {"prompt": prompt + more} | line, "chosen") for more in ("1=", "2="))
        length = len(better)
        expected = ((better - worse).sigmoid() - 0.5).detach()
        torch.testing.assert_close(experience.guide[row, :length], expected, atol=1e-4, rtol=0)
        reference = literal(run, {"prompt": prompt} | line, "chosen").detach()
        torch.testing.assert_close(experience.reference[row, :length], reference, atol=1e-4, rtol=0)
    losses, values = run.algorithm.losses(run.policy, experience, experience.items)
    # the policy is the reference still: what is left is the regulariser
    squares = experience.guide.where(experience.rollout.mask, 0).square().sum(1) / experience.rollout.mask.sum(1)
    expected = math.log(2) + 0.5 * torch.stack(squares.chunk(2)).mean(0)
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=0)
    assert values["preference/margin"].abs().max() < 1e-4
    taught = trainer("token_dpo", file, tmp_path, "algorithm.guide=model", "algorithm.teacher=tiny_lm")
    guided = taught.collect(taught.groups.draw(0))
    # a teacher that is the start model gives nothing: plain DPO
    assert guided.guide.abs().max() < 1e-4
    losses, _ = taught.algorithm.losses(taught.policy, guided, guided.items)
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(2)), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="guide: model needs one"):
        trainer("token_dpo", file, tmp_path, "algorithm.guide=model")


def test_labels_are_compared_with_completions_of_other_prompts(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "".join(
            json.dumps({"prompt": line["prompt"], "completion": line["chosen"], "label": i % 2}) + "\n"
            for i, line in enumerate(LINES)
        )
    )
    run = trainer("text_kto", file, tmp_path, "algorithm.good_weight=2")
    groups = run.groups.draw(0)
    experience = run.collect(groups)
    assert isinstance(experience, LabelExperience) and experience.divergence == 0
    completions = [line["completion"] for line in experience.batch.metadata]
    text = {"prompt": experience.batch.prompts[1], "other": completions[0]}
    before = literal(run, text, "other").sum()
    with torch.no_grad():
        for parameter in run.policy.trainable().values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    gains = mismatched_gain(run.sampler, experience.batch)  # type: ignore[arg-type]
    after = literal(run, text, "other").sum()
    torch.testing.assert_close(gains[1], (after - before).detach(), atol=1e-5, rtol=1e-4)
    loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
    assert loss.shape == (4,) and loss.max() > 1.5 * loss.min()


def test_outcomes_are_predicted_by_log_ratios_and_the_result_rewards_steps(file: Path, tmp_path: Path) -> None:
    records = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2} for i, r in enumerate(LINES)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = trainer("text_outcome", file, tmp_path, "algorithm.beta=0.5")
    experience = run.collect(run.groups.draw(0))
    start = {r["prompt"]: literal(run, r, "completion").sum().item() for r in records}
    with torch.no_grad():
        for parameter in run.policy.trainable().values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    losses, _ = run.algorithm.losses(run.policy, experience, experience.items)
    for loss, line, prompt in zip(losses.tolist(), experience.batch.metadata, experience.batch.prompts, strict=True):
        now = literal(run, {"prompt": prompt} | line, "completion").sum().item()
        right = torch.sigmoid(torch.tensor(0.5 * (now - start[prompt])))
        expected = -(right.log() if line["label"] else (1 - right).log())
        assert loss == pytest.approx(expected.item(), abs=1e-4)


def test_the_best_and_the_worst_of_a_group_are_a_pair(tmp_path: Path) -> None:
    run = small_run("tiny_lm/online_text_dpo", tmp_path, "model.lora=null", "training.group_size=4")
    experience = run.collect(run.groups.draw(0))
    assert isinstance(experience, BestAndWorst)
    best, worst = experience.reward[experience.items].unbind(1)
    of_groups = experience.reward.view(-1, 4)
    assert torch.equal(best, of_groups.max(1).values) and torch.equal(worst, of_groups.min(1).values)
    assert torch.equal(experience.useful(experience.items), best > worst)
    loss, values = run.algorithm.losses(run.policy, experience, experience.items)
    torch.testing.assert_close(loss, torch.full_like(loss, 2.0).log(), atol=1e-4, rtol=0)
    assert values["preference/accuracy"].shape == loss.shape


def test_a_run_ends_and_its_margin_rises(file: Path, tmp_path: Path) -> None:
    overrides = ("training.iterations=2", "evaluation.prompts=sums_heldout", "evaluation.limit=4")
    trainer("text_dpo", file, tmp_path, *overrides).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["preference/margin"] == pytest.approx(0, abs=1e-5) and lines[1]["preference/margin"] > 0


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("text_sft", {"prompt": "1+1="}, "no text under the key 'completion'"),
        ("gkd, teacher: tiny_lm", {"prompt": "1+1="}, "no text under the key 'completion'"),
        ("text_sft, weight: trust", {"prompt": "1+1=", "completion": "2", "trust": -1}, "no number of 0 or more under"),
        ("text_sft, prefix: class", {"prompt": "1+1=", "completion": "2"}, "no text under 'class', which"),
        ("text_dpo", {"prompt": "1+1=", "chosen": "2"}, "line 1: no text under the key 'rejected'"),
        ("text_kto", {"prompt": "1+1=", "completion": "2", "label": "fine"}, "'label' is not true (good)"),
        ("text_kto", {"prompt": "1+1=", "completion": "2", "label": True}, "all labels are true"),
    ],
)
def test_lines_that_cannot_be_learned_from(name: str, line: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError) as error:
        trainer(
            name.partition(",")[0],
            tmp_path / "bad.jsonl",
            tmp_path,
            "algorithm={name: " + name + "}",
        )
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_group_of_one_is_for_lines_alone(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to be compared with"):
        trainer("grpo", file, tmp_path)
    with pytest.raises(ConfigError, match="a line of the data once an iteration"):
        trainer("text_dpo", file, tmp_path, "training.group_size=4")


def test_classes_of_sources_weigh_and_stand_before_the_prompt(file: Path, tmp_path: Path) -> None:
    """C-RLFT: the sum of exp(r / beta) times the likelihood under the class's prompt."""
    lines = [line | {"completion": line["chosen"]} for line in LINES]
    for number, line in enumerate(lines):
        line |= {"class": "++" if number % 2 else "-", "trust": 1.0 if number % 2 else 0.1}  # type: ignore[operator]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = trainer("text_sft", file, tmp_path, "algorithm={name: text_sft, weight: trust, prefix: class}")
    given = [line | {"prompt": line["class"] + line["prompt"]} for line in lines]
    log_probs = [literal(run, line, "chosen") for line in given]
    weighed = sum(float(line["trust"]) * each.sum() for line, each in zip(lines, log_probs, strict=True))
    expected = -weighed / sum(len(each) for each in log_probs)  # type: ignore[operator]
    expected_gradient = gradient(run, expected)
    found, _ = learned(run)
    assert_alike(found, expected_gradient)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with other weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flowalign.data import ASSETS

    folder = tmp_path_factory.mktemp("teacher")
    network = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_lm")
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.4 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny_lm").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_trls(beta: float, file: Path, teacher: Path, tmp_path: Path) -> None:
    from trl.experimental.gkd import GKDTrainer

    settings = f"algorithm={{name: gkd, teacher: '{teacher}', beta: {beta}, on_policy: 0, completion: chosen}}"
    run = trainer("gkd", file, tmp_path, settings, "rollout.temperature=0.7")
    other = LanguagePolicy.from_pretrained(teacher)
    student, taught = [], []
    for line in LINES:
        prompt = run.policy.tokenizer(line["prompt"]).input_ids
        answer = run.policy.tokenizer(line["chosen"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + answer])
        student.append(run.policy.network(ids).logits[0, len(prompt) - 1 :])
        taught.append(other.network(ids).logits[0, len(prompt) - 1 :].detach())
    logits, teachers = torch.cat(student)[None], torch.cat(taught)[None]
    everything = torch.zeros(logits.shape[:2], dtype=torch.long)
    expected = GKDTrainer.generalized_jsd_loss(logits, teachers, labels=everything, beta=beta, temperature=0.7)
    expected_gradient = gradient(run, expected)
    found, loss = learned(run)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_alike(found, expected_gradient)


@pytest.mark.parametrize("divergence", ["tvd", "tvd++"])
def test_a_draft_model_comes_nearer_to_its_target(divergence: str, file: Path, teacher: Path, tmp_path: Path) -> None:
    settings = f"algorithm={{name: gkd, teacher: '{teacher}', divergence: {divergence}, on_policy: 1}}"
    run = trainer("gkd", file, tmp_path, settings, "training.optimizer.learning_rate=1e-4")
    other = LanguagePolicy.from_pretrained(teacher)
    rollout = demonstrated(run.policy, [line["prompt"] for line in LINES], [line["chosen"] for line in LINES])

    def distance() -> float:
        rows = torch.arange(len(LINES))
        with torch.no_grad():
            each = total_variation(run.policy.distributions(rollout, rows), other.distributions(rollout, rows))
        return each.mean().item()

    before = distance()
    for _ in range(12):
        assert run.iterate()["distillation/on_policy"] == 1
        run.iteration += 1
    assert distance() < 0.95 * before
