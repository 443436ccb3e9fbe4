"""A language model without eyes as a judge of texts, in this process."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards.base import score
from rewards.judges import JudgeReward, Local, Question
from rewards.judges.local import LocalJudge
from rewards.judges.texts import TextProcessor

TINY_LM = Path(__file__).parents[3] / "flowalign" / "data" / "assets" / "tiny_lm"
TEMPLATE = """
source: sums
answer: probability
fields: {text: ""}
questions:
  - {name: right, pictures: [], ask: '{prompt}{text}=', labels: ['1', '2']}
"""


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "sums.yaml").write_text(TEMPLATE)
    return str(tmp_path / "sums.yaml")


def test_a_language_models_chances_are_its_next_tokens(template: str) -> None:
    reward = JudgeReward(template, Local("tiny_lm", device="cpu", batch_size=2))
    prompts, texts = ["7+5", "9", "30-11"], ["", "+8", ""]
    made = score(reward, texts, prompts, [{}] * 3).value
    network = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    one, two = tokenizer.convert_tokens_to_ids(["1", "2"])
    for value, prompt, text in zip(made.tolist(), prompts, texts, strict=True):
        with torch.no_grad():
            logits = network(**tokenizer(f"{prompt}{text}=", return_tensors="pt")).logits[0, -1]
        assert value == pytest.approx(float(logits[[one, two]].softmax(-1)[0]), abs=1e-5)


def test_it_replies_and_puts_questions_into_its_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    network = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    judge = LocalJudge(network, TextProcessor(tokenizer))
    (reply,) = judge.reply([Question((), "40-8=")], 0.0, 5, 0)
    ids = network.generate(**tokenizer("40-8=", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert reply == tokenizer.decode(ids[0], skip_special_tokens=True)[len("40-8=") :]
    (mean,) = judge.echo([Question((), "40-8=")], ["32"])
    assert mean > judge.echo([Question((), "40-8=")], ["77"])[0]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": role, "content": [{"type": "text", "text": role[0]}]} for role in ("system", "user")]
    assert TextProcessor(tokenizer).apply_chat_template(messages, tokenize=False) == "<system>s<user>u"


def test_pictures_are_refused() -> None:
    processor = TextProcessor.from_pretrained(pretrained_model_name_or_path=TINY_LM)
    judge = LocalJudge(AutoModelForCausalLM.from_pretrained(TINY_LM), processor)
    with pytest.raises(ValueError, match="a language model, which sees no pictures"):
        judge.choose([Question((Image.new("RGB", (8, 8)),), "1+1=")], ["1", "2"])
