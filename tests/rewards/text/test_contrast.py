"""Rewards of two likelihoods against one token at a time, and those that ask a snapshot through a run."""

import math
from pathlib import Path

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.training import Trainer
from rewards import RewardError, score
from rewards.text.confidence import AnswerConfidence, Consistency
from rewards.text.contrast import DensityRatio, Endogenous, FollowUp
from rewards.text.model import CausalModel
from rewards.text.verifiers import ExactMatch

PROMPTS, TEXTS = ["17+25=", "40-8=", "3+4="], ["42", "3", "13=7"]


def slowly(model: CausalModel, context: str, text: str) -> list[float]:
    """Log-probabilities of the text's tokens, each from a forward pass of its own."""
    ids, found = model.begin(context, {}), []
    for token in model.tokens(text):
        with torch.no_grad():
            found.append(model.network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item())
        ids = [*ids, token]
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_follow_up_is_how_probable_the_users_remark_is(model: CausalModel, tiny_lm: str) -> None:
    reward = FollowUp(tiny_lm, pleased=["1+1", "2"], annoyed=["0-9"], lead="=")
    made = reward(TEXTS, PROMPTS, [{}] * 3).value.tolist()
    for value, prompt, text in zip(made, PROMPTS, TEXTS, strict=True):
        remark = {said: mean(slowly(model, f"{prompt}{text}=", said)) for said in ("1+1", "2", "0-9")}
        assert value == pytest.approx((remark["1+1"] + remark["2"]) / 2 - remark["0-9"], abs=1e-4)


def test_a_density_ratio_is_of_two_models(model: CausalModel, tiny_lm: str, other_lm: str) -> None:
    made = DensityRatio(other_lm, tiny_lm, instruction="1+1={prompt}")(TEXTS, PROMPTS, [{}] * 3).value.tolist()
    other = CausalModel.load(other_lm, "cpu")
    for value, prompt, text in zip(made, PROMPTS, TEXTS, strict=True):
        strong, weak = (sum(slowly(each, f"1+1={prompt}", text)) for each in (other, model))
        assert value == pytest.approx(strong - weak, abs=1e-4)
    with pytest.raises(ValueError, match="has {prompt}"):
        DensityRatio(tiny_lm, tiny_lm, instruction="before")


def test_endogenous_rewards_are_those_of_the_inverse_soft_bellman_operator(model: CausalModel, tiny_lm: str) -> None:
    made = Endogenous(tiny_lm, alpha=2.0)(TEXTS, PROMPTS, [{}] * 3)
    for value, steps, prompt, text in zip(made.value.tolist(), made.steps, PROMPTS, TEXTS, strict=True):
        ids, tokens, rewards = model.begin(prompt, {}), model.tokens(text), []
        for t, token in enumerate(tokens):
            with torch.no_grad():
                q = model.network(torch.tensor([ids])).logits[0, -1][token].item()
                after = model.network(torch.tensor([[*ids, token]])).logits[0, -1].tolist()
            ids = [*ids, token]
            v = 2.0 * math.log(sum(math.exp(each / 2.0) for each in after)) if t < len(tokens) - 1 else 0.0
            rewards.append(q - v)
        assert [r for _, r in steps] == pytest.approx(rewards, abs=1e-3) and value == pytest.approx(
            sum(rewards), abs=1e-3
        )
    assert Endogenous(tiny_lm)([""], ["1+1="], [{}]).value.tolist() == [0]


def test_confidence_in_the_own_answer_is_signed_by_the_outcome(model: CausalModel, tiny_lm: str) -> None:
    texts, records = ["9=42", "7", "=32"], [{"answer": "42"}, {"answer": "1"}, {"answer": "1"}]
    reward = AnswerConfidence(ExactMatch(pattern=r"=(\d+)"), tiny_lm, r"=(\d+)")
    made = score(reward, texts, PROMPTS, records).value.tolist()
    sure = [
        mean([math.exp(p) for p in slowly(model, PROMPTS[i] + texts[i][:n], texts[i][n:])]) for i, n in ((0, 2), (2, 1))
    ]
    assert made == pytest.approx([sure[0], 0, -sure[1]], abs=1e-5)


def test_consistent_ones_of_the_right_texts_get_the_bonus(tiny_lm: str, model: CausalModel) -> None:
    texts = ["8=42", "42=42", "1=2"]
    reward = Consistency(ExactMatch(pattern=r"=(\d+)"), 0.5, model=tiny_lm, pattern=r"=(\d+)")
    made = score(reward, texts, ["17+25="] * 3, [{"answer": "42"}] * 3).value.tolist()
    sure = [mean([math.exp(p) for p in slowly(model, "17+25=" + text[:-2], "42")]) for text in texts[:2]]
    assert made == [1.5, 1.0, 0.0] if sure[0] > sure[1] else made == [1.0, 1.5, 0.0]
    with pytest.raises(RewardError, match="is not trained"):
        score(Consistency(ExactMatch(), weights="slow", model=tiny_lm), ["1"], ["?"], [{"answer": "1"}])


def configured(tmp_path: Path, *overrides: str) -> Trainer:
    small = ["training.iterations=3", "training.prompts_per_iteration=4", "training.group_size=4", "name=run"]
    small += ["evaluation.prompts=null", "training.micro_batch_size=16", f"output={tmp_path}", "training.previews=0"]
    return Trainer(load(recipe("tiny_lm/grpo"), [*small, *overrides]), progress=False)


def test_a_run_asks_a_snapshot_that_lags_behind_the_weights(tmp_path: Path) -> None:
    rate = ["training.optimizer.learning_rate=1e-2", "training.optimizer.warmup_updates=0"]
    slow = ["rewards=[{name: foretold, weights: slow, lead: '='}]", "training.snapshots={slow: {decay: 1.0}}"]
    trainer = configured(tmp_path, *slow, *rate)
    reward = trainer.scorer.reward
    samples, prompts, metadata = ["", "1"], ["17+25=", "17+25="], [{"answer": "42", "group": 0}] * 2
    before = score(reward, samples, prompts, metadata).value
    start = CausalModel.load(
        trainer.config.model.path if Path(trainer.config.model.path).is_dir() else str(TINY), "cpu"
    )
    trainer.train()
    after = score(reward, samples, prompts, metadata)
    # what the start weights say of the answer without a thought is what the snapshot says
    untold = mean(slowly(start, "17+25==", "42"))
    model = CausalModel(trainer.policy.network, trainer.policy.tokenizer)
    told = [mean(slowly(model, f"17+25={text}=", "42")) for text in samples]
    assert after.value.tolist() == pytest.approx([each - untold for each in told], abs=1e-4)
    assert (after.value - before).abs().max() > 1e-3


TINY = Path(__file__).parents[3] / "flowalign" / "data" / "assets" / "tiny_lm"


def test_a_snapshot_that_is_not_made_or_swapped_too_early_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no snapshot is called 'slow'; training\.snapshots="):
        configured(tmp_path, "rewards=[{name: foretold, weights: slow}]")
    made = ["training.snapshots={slow: {decay: 0.9}}", "rollout.overlap=2"]
    with pytest.raises(ConfigError, match="swaps the model's weights"):
        configured(tmp_path, "rewards=[{name: foretold, weights: slow}]", *made)
