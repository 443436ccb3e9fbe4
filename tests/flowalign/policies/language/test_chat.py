"""Chat templates: what stands between turns beside TRL's templates; messages as prompts, whole chats, and tools."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from flowalign.data import Prompts
from flowalign.data.messages import MESSAGES
from flowalign.errors import ConfigError
from flowalign.planning.random_models import tiny_language_model
from flowalign.policies.environments.tools import Tools, calls_in
from flowalign.policies.language.chat import ChatTemplate
from flowalign.policies.language.conversations import conversed
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.turns import AgentPolicy
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

ENDS = ["<|im_end|>", "<|end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|END_OF_TURN_TOKEN|>"]
THINKING = ("qwen3", "qwen3_5_think", "qwen3_6")
FAMILIES = (
    *THINKING,
    "qwen3_5_nothink",
    "qwen3_instruct_2507",
    "qwen2_5",
    "phi3",
    "phi3_5",
    "gemma",
    "gemma3",
    "llama3",
)
CALLING = ("qwen3", "qwen3_5_think", "qwen2_5")


def template(name: str) -> Any:
    """A template of TRL's as a tokenizer applies it."""
    root = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    written = (root / f"{name}.jinja").read_text()

    def applied(messages: Any, tokenize: bool, add_generation_prompt: bool, tools: Any = None, **more: Any) -> str:
        texts, _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=written,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="<|endoftext|>",
            **more,
        )
        return texts[0]

    return applied


@pytest.mark.parametrize("name", FAMILIES)
def test_episodes_are_what_trls_training_templates_write(name: str) -> None:
    """Also of templates that drop earlier thoughts (Qwen3) or end a chat by another token (Phi 3)."""
    thought = "<think>\nhm\n</think>\n\n" if name in THINKING else ""
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"{thought}b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": f"{thought}d"},
        {"role": "user", "content": "e"},
    ]
    own = ChatTemplate(template(name), ENDS)
    made = own.prompt(talk[:1])
    for turn in (1, 3):
        drawn = talk[turn]["content"]
        drawn = drawn.removeprefix("<think>\n") if made.endswith("<think>\n") else drawn
        made += drawn + own.end() + own.between(talk[turn + 1 : turn + 2])
    assert made == template(f"{name}_training")(talk, False, True)


@pytest.mark.parametrize("name", CALLING)
def test_tools_answer_as_the_template_has_it(name: str) -> None:
    call = {"type": "function", "function": {"name": "double", "arguments": {"x": 4}}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "8"},
    ]
    own = ChatTemplate(template(name), ENDS, tools=Tools([f"{__name__}:double"]).tools)
    begin, written = own.prompt(talk[:1]), own.said(talk[1])
    (read,) = calls_in(written)
    assert read == {"name": "double", "arguments": {"x": 4}}
    made = begin + written + own.end() + own.between(talk[2:])
    assert made == template(f"{name}_training")(talk, False, True, tools=own.tools)


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: a whole number.
    """
    if x > 100:
        raise ValueError("too large")
    return 2 * x


def unsaid(x):  # type: ignore[no-untyped-def]
    return x


def test_calls_that_cannot_be_made_are_answered_by_their_error() -> None:
    tools = Tools([f"{__name__}:double"], price=0.5)
    written = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
    answer = tools.step("let me see " + written)
    assert (answer.reward, answer.done) == (0, False)
    assert answer.messages == [{"role": "tool", "name": "double", "content": "42"}]
    assert tools.step("it is 42").done
    for wrong, says in (
        (written.replace("double", "triple"), "no function is called triple"),
        (written.replace("21", "101"), "ValueError: too large"),
        (written.replace('"x"', '"y"'), "TypeError"),
        ("<tool_call>{oh</tool_call>", "no function is called None"),
    ):
        answer = tools.step(wrong)
        assert not answer.done and answer.reward == -0.5
        assert says in json.loads(answer.observation)["error"]
    assert tools.step('{"name": "double", "parameters": {"x": 1}}').observation == "2"
    for functions, says in (
        ([], "name at least one"),
        (["nowhere:f"], "cannot be imported"),
        ([f"{__name__}:unsaid"], "type hints"),
    ):
        with pytest.raises(ConfigError, match=says):
            Tools(functions)


class Digits(Tools):
    """What a random model says is a call of `double` with its length, twice an episode."""

    def reset(self, prompt: str, metadata: Any) -> str:
        self.left = 2
        return super().reset(prompt, metadata)

    def step(self, completion: str) -> Any:
        self.left -= 1
        call = {"name": "double", "arguments": {"x": len(completion)}}
        return super().step(f"<tool_call>{json.dumps(call)}</tool_call>" if self.left else "")


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_an_episode_with_tools_is_one_sequence_of_the_template() -> None:
    network, tokens = tiny_language_model(LanguagePolicy, torch.float32, torch.device("cpu"))
    own = AgentPolicy(
        network,
        tokens,
        environment=lambda: Digits([f"{__name__}:double"]),
        turns=3,
        chat=True,
        template=WITH_TOOLS,
    )
    rollout = own.sample(["hi"], [4], max_new_tokens=5)
    (text,) = own.decode(rollout)
    assert len(text.turns) == 2  # type: ignore[attr-defined]
    whole = tokens.decode(rollout.prompt_ids[0].tolist() + rollout.completion_ids[0].tolist())
    assert whole.startswith(json.dumps(own.tools)[:10]) and "[user]hi</s>[assistant]" in whole
    said = text[: text.turns[0].end]  # type: ignore[attr-defined]
    assert f"</s>[tool]{2 * len(said)}</s>[assistant]" in whole


def test_whole_chats_are_what_the_template_writes_and_the_assistants_turns_are_learned() -> None:
    network, tokens = tiny_language_model(LanguagePolicy, torch.float32, torch.device("cpu"))
    own = LanguagePolicy(network, tokens, chat=True, system="be kind")
    talk = [("user", "hi"), ("assistant", "yes?"), ("user", "what"), ("assistant", "nothing")]
    chats = [[{"role": role, "content": text} for role, text in talk[:length]] for length in (4, 2)]
    rollout = conversed(own, chats)
    for row, messages in enumerate(chats):
        whole = tokens.apply_chat_template([{"role": "system", "content": "be kind"}, *messages], tokenize=False)
        ids = rollout.completion_ids[row][rollout.present[row]].tolist()
        assert tokens.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist() + ids) == whole
        learned = tokens.decode(rollout.completion_ids[row][rollout.mask[row]].tolist())
        assert learned == "".join(f"{m['content']}</s>" for m in messages if m["role"] == "assistant")
    # what is given in between is seen, and teaches nothing
    log_prob, _ = own.log_probs(rollout, torch.arange(2))
    ids = torch.cat([rollout.prompt_ids[0], rollout.completion_ids[0]])
    logits = network(ids[None]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, ids[1:, None])[-rollout.mask.shape[1] :, 0]
    torch.testing.assert_close(log_prob[0], expected.where(rollout.mask[0], 0), atol=1e-5, rtol=1e-5)


def byte_model(folder: Path) -> Path:
    network, tokens = tiny_language_model(LanguagePolicy, torch.float32, torch.device("cpu"))
    network.save_pretrained(folder / "lm")
    tokens.save_pretrained(folder / "lm")
    return folder / "lm"


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run_on(file: Path, name: str, *overrides: str) -> Trainer:
    given = (f"data={{prompts: {file}}}", f"model.path={byte_model(file.parent)}", "model.chat=true")
    return small_run(f"tiny_lm/{name}", file.parent, *given, "evaluation.prompts=null", *overrides)


LINES = "training.group_size=1", "training.prompts_per_iteration=2", "training.micro_batch_size=2"


def test_prompts_are_lists_of_messages(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = written(tmp_path, {"prompt": asked, "answer": "1"}, {"prompt": asked[1:], "answer": "2"})
    read = Prompts.read(str(file))
    assert read.texts == ["system: s\nuser: u", "u"] and read.metadata[0][MESSAGES] == asked
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>"
        "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{% endif %}"
    )
    settings = f"model.chat_template={template}", "model.chat_template_kwargs={enable_thinking: false}"
    run = run_on(file, "grpo", *settings, "training.prompts_per_iteration=2")
    seen = []
    generate = run.policy.generate

    def kept(prompts: Any, inputs: Any, *more: Any) -> Any:
        seen.extend(run.policy.tokenizer.batch_decode(inputs["input_ids"]))
        return generate(prompts, inputs, *more)

    run.policy.generate = kept  # type: ignore[method-assign]
    run.iterate()
    assert {text.replace("<pad>", "") for text in seen} == {"<s>s</s><u>u</s><a>!", "<u>u</s><a>!"}


def test_a_chat_is_learned_and_completions_may_be_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = written(tmp_path, {"messages": talk}, {"messages": [*talk, *talk]})
    run = run_on(file, "text_sft", "data.column=messages", *LINES)
    assert run.iterate()["sft/loss"] > 0
    pair = {"prompt": talk[:1], "chosen": talk[1:], "rejected": [{"role": "assistant", "content": "c"}]}
    run = run_on(written(tmp_path, pair, pair), "text_dpo", *LINES)
    assert run.iterate()["preference/accuracy"] == 0.5


@pytest.mark.parametrize(
    ("line", "overrides", "says"),
    [
        ({"prompt": []}, (), "line 1: an empty list of messages"),
        ({"prompt": ["hi"]}, (), "message 1 has no role; system, developer, user"),
        ({"prompt": [{"role": "user"}]}, (), "message 1 \\(user\\) has no text under 'content'"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
            ("model.chat=false",),
            "model.chat=true takes them",
        ),
        ({"prompt": "a"}, ("model.chat_template=nowhere.jinja",), "no file at 'nowhere.jinja'"),
        ({"prompt": "a"}, ("model.chat=false", "model.chat_template_kwargs={a: 1}"), "only a chat has one"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
            (),
            "1 messages; one of the assistant works",
        ),
        ({"prompt": [{"role": "assistant", "content": "b"}]}, (), "a chat that the assistant begins"),
    ],
)
def test_messages_that_are_none_are_one_line(line: Any, overrides: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        run_on(written(tmp_path, line), "text_sft", "algorithm.completion=completion", *LINES, *overrides)
