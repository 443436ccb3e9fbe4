"""Every method of texts with prompts that show pictures, on the shipped tiny VLM: what it learns from has seen them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.policies.language.vision_language import VisionLanguagePolicy
from flowalign.rollouts.draw import Draw
from rewards import Reward, RewardError, bind, score
from rewards.judges.base import Question
from rewards.judges.reward import JudgeReward
from rewards.shapes import draw, sample_requests, train_requests
from rewards.text.likelihood import RLPR, SelfAligned, SelfCertainty
from rewards.text.steps import InformationGain, PathFaithfulness
from rewards.text.verifiers import ExactMatch
from tests.flowalign.small_run import small_run

CONFIGS = Path(__file__).parents[4] / "configs" / "tiny_lm"
# turns, masks and values are refused with pictures, and the prompt enhancer's reward draws pictures of its own
APART = ("turns_", "dflow_grpo", "vas", "prompt_enhancer", "demo")
METHODS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith(APART))
ASK = "Which picture shows a red circle better, 1 or 2?"
VLM = str(ASSETS / "tiny_vlm")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four questions about two pictures each."""
    folder, rng = tmp_path_factory.mktemp("questions"), np.random.default_rng(0)
    requests = sample_requests(train_requests(), 4, rng)
    with open(folder / "questions.jsonl", "w") as lines:
        for i, request in enumerate(requests):
            names = [f"{i}{side}.png" for side in "ab"]
            for name, shown in zip(names, (request, requests[i - 1]), strict=True):
                Image.fromarray(draw(shown, rng)).save(folder / name)
            record = {"prompt": f"Which picture shows {request.prompt} better, 1 or 2?", "image": names}
            record |= {"answer": str(1 + i % 2), "category": "pair", "solution": "so 1", "chosen": "1", "rejected": "2"}
            lines.write(json.dumps(record | {"completion": "1", "label": i % 2}) + "\n")
    return folder / "questions.jsonl"


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_learns_from_has_seen_the_pictures(name: str, questions: Path, tmp_path: Path) -> None:
    lines = name in ("text_sft", "text_dpo", "text_kto", "text_outcome", "gkd", "token_dpo")
    members = 1 if lines else 4
    teacher = [f"algorithm.teacher={VLM}"] if name in ("kdrl", "g_opd", "gkd") else []
    run = small_run(
        f"tiny_lm/{name}",
        tmp_path,
        "model.path=tiny_vlm",
        "model.images=true",
        "model.lora=null",
        f"data={{prompts: {questions}}}",
        "training.micro_batch_size=16",
        f"training.group_size={members}",
        "rollout.max_new_tokens=3",
        *teacher,
    )
    policy: Any = run.policy
    experience: Any = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, members, 0, False)))
    rollout = experience.rollout
    shown = {prompt: policy.pictures([record])[0] for prompt, record in zip(run.prompts.texts, run.prompts.metadata)}
    # a solver of doge reads the question again, with a thinker's note
    asked = [next(question for question in shown if prompt.startswith(question)) for prompt in rollout.prompts]
    assert rollout.pictures == [shown[question] for question in asked]
    if not lines:
        again, _ = policy.log_probs(rollout, torch.arange(len(rollout)))
        torch.testing.assert_close(again, rollout.log_prob, atol=1e-4, rtol=0)
    losses, _ = run.algorithm.losses(policy, experience, experience.items)
    assert losses.isfinite().all()


class Rule:
    """A judge that answers by the pictures it is shown."""

    def choose(self, questions: list[Question], labels: list[str]) -> list[list[float]]:
        self.shown = [len(question.pictures) for question in questions]
        chances = [float(np.asarray(question.pictures[0]).mean()) / 255 for question in questions]
        return [[chance, 1 - chance] for chance in chances]


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (32, 32), colour)


@pytest.mark.parametrize(
    "reward",
    [
        RLPR(),
        SelfAligned(),
        SelfCertainty(),
        InformationGain(ExactMatch(), separator=" "),
        PathFaithfulness(key="answer"),
    ],
    ids=lambda reward: reward.name,
)
def test_likelihood_rewards_tell_pictures_apart(reward: Reward) -> None:
    policy = VisionLanguagePolicy.from_pretrained(ASSETS / "tiny_vlm")
    policy.bind(reward)
    rng = np.random.default_rng(1)
    first, second = (Image.fromarray(draw(request, rng)) for request in sample_requests(train_requests(), 2, rng))
    records: list[dict[str, Any]] = [{"image": [first, second]}, {"image": first}, {"image": second}]
    rows = [record | {"answer": "1"} for record in records]
    both, one, other = score(reward, ["1 2"] * 3, [ASK] * 3, rows).value.tolist()
    assert len({round(both, 5), round(one, 5), round(other, 5)}) == 3
    # beside others as alone
    alone = score(reward, ["1 2"], [ASK], rows[1:2]).value.item()
    assert alone == pytest.approx(one, abs=1e-5)


def test_rlpr_asks_as_the_model_is_asked() -> None:
    """One row through the processor and the network alone."""
    policy = VisionLanguagePolicy.from_pretrained(ASSETS / "tiny_vlm")
    reward = RLPR(debias=False, lead=" ")
    bind(reward, None)
    policy.bind(reward)
    shown = picture("red")
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    begun = policy.processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = policy.processor(text=[begun], images=[shown], return_tensors="pt")
    after, answer = (policy.tokenizer(text, add_special_tokens=False).input_ids for text in ("a red circle ", "1"))
    inputs["input_ids"] = torch.cat([inputs.input_ids, torch.tensor([[*after, *answer]])], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        chances = policy.network(**inputs).logits[0].softmax(-1)[-1 - len(answer) : -1]
    expected = chances.gather(1, torch.tensor(answer)[:, None]).mean().item()
    value = score(reward, ["a red circle"], ["Which?"], [{"image": shown, "answer": "1"}]).value.item()
    assert value == pytest.approx(expected, abs=1e-6)


def test_a_frozen_model_of_texts_is_refused_with_pictures() -> None:
    policy = VisionLanguagePolicy.from_pretrained(ASSETS / "tiny_vlm")
    with pytest.raises(
        RewardError, match="'rlpr': its frozen model reads texts alone, and model.images shows pictures"
    ):
        policy.bind(RLPR(model=str(ASSETS / "tiny_lm")))


def test_a_judge_of_texts_sees_the_pictures_of_the_prompt() -> None:
    judge: Any = Rule()
    reward = JudgeReward("text_rubric", judge)
    records = [{"image": picture("white")}, {"image": [picture("black"), picture("white")]}]
    value = score(reward, ["a white one", "a white one"], ["What is it?"] * 2, records).value
    assert value.tolist() == [1, 0] and judge.shown == [1, 2]
