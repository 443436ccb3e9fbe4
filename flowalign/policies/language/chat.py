"""A tokenizer's chat template: a prompt, and what stands between the model's turns, whatever the template does to them.

A model's turns are the tokens that it drew; a template that renders earlier turns anew, without their thoughts as
Qwen3's does, would put others in their place. So only what stands between an end token and the next turn is asked of
it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from flowalign.data.messages import MESSAGES
from flowalign.errors import ConfigError

MARK = "flowalignturn"
"""Words of an example turn, after which its end token is looked for."""
CALL = "flowalign"
"""Identity of an example's call of a function; some templates want nine characters."""
BEFORE = [{"role": "user", "content": "?"}]
Message = Mapping[str, Any]


class Chat(str):
    """A prompt as a readable text, with the messages that a chat template gets."""

    messages: list[dict[str, Any]]


def asked(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """The prompts; those that are messages, by their metadata, as `Chat`."""
    return [chat(p, record) for p, record in zip(prompts, metadata, strict=True)] if metadata else list(prompts)


def chat(prompt: str, record: Mapping[str, Any]) -> str:
    """A prompt, with its messages where its metadata have some."""
    if MESSAGES not in record:
        return prompt
    made = Chat(prompt)
    made.messages = list(record[MESSAGES])
    return made


class ChatTemplate:
    """A tokenizer's template with everything that it is given besides messages.

    Args:
        apply: the tokenizer's or processor's `apply_chat_template`.
        ends: texts of the tokens that the model ends turns by.
        system: content of a system's turn, where the messages have none.
        tools: schemas of functions that the model may call.
        arguments: further arguments of the template, such as enable_thinking.
    """

    def __init__(
        self,
        apply: Callable[..., Any],
        ends: Sequence[str],
        system: object = None,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.apply, self.ends, self.system, self.tools = apply, ends, system, list(tools) or None
        self.arguments = dict(arguments or {})

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages up to where the model's turn begins."""
        turns = [dict(message) for message in messages]
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.system})
        return self._rendered(turns, True)

    def between(self, messages: Sequence[Message]) -> str:
        """What stands between the end token of the model's turn and its next turn, in which messages come."""
        return self._after_mark(messages)[1]

    def end(self) -> str:
        """The end token of a turn."""
        return self._after_mark(BEFORE)[0]

    def said(self, message: Message) -> str:
        """The model's turn as the template writes it after a user's, without its end token.

        So thoughts stand where the template puts them, and calls of functions as the model is to write them.
        """
        begin, whole = self._rendered(BEFORE, True), self._rendered([*BEFORE, message], False)
        if not whole.startswith(begin):
            return str(message["content"])
        turn = whole[len(begin) :]
        places = [turn.rfind(end) for end in self.ends if end in turn]
        return turn[: min(places)] if places else turn

    def _after_mark(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The end token of an example turn before messages, and what follows it."""
        turn: dict[str, Any] = {"role": "assistant", "content": MARK}
        if messages[0]["role"] == "tool":
            call = {"type": "function", "id": CALL, "function": {"name": MARK, "arguments": {}}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages = [{"tool_call_id": CALL, **message} for message in messages]
        whole = self._rendered([*BEFORE, turn, *messages], True)
        _, mark, rest = whole.partition(MARK)
        found = [(rest.index(end), end) for end in self.ends if end in rest]
        if not mark or not found:
            raise ConfigError(
                "model: this chat template leaves out earlier turns, or ends them by no token that the model ends "
                "texts by; model.chat_template: FILE puts another in its place"
            )
        place, end = min(found)
        return end, rest[place + len(end) :]

    def _rendered(self, messages: Sequence[Message], more: bool) -> str:
        with self._asking():
            text: str = self.apply(
                list(messages), tokenize=False, add_generation_prompt=more, tools=self.tools, **self.arguments
            )
        return text

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """What a chat template complains of becomes one line; Gemma's takes no system's turn."""
        try:
            yield
        except (TemplateError, TypeError, KeyError) as error:
            system = "; model.system=null works, with its words in the prompts" if self.system is not None else ""
            raise ConfigError(f"model: the chat template says '{' '.join(str(error).split())}'{system}") from error
