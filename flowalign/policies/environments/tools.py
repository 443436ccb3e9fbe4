"""Functions that a language model calls by its chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign import registry
from flowalign.errors import ConfigError
from flowalign.policies.environments.base import Answer

BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""A call as Hermes, Qwen2.5 and Qwen3 write it: an object in JSON; as Qwen3.5 does: `CALL` with `PARAMETER`s."""
CALL = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Tools:
    """The model calls functions until a turn has no call; a call that cannot be made is answered by its error.

    The template tells the model of the functions, by their names, type hints and docstrings (of every argument, in
    Google's form). A function that fails, is unknown or gets other arguments is an answer with an error, as in TRL.
    Nothing else runs than these functions, in this process.

    Args:
        functions: dotted paths, such as 'my_file:add'.
        price: what every failing call costs.
    """

    name = "tools"

    def __init__(self, functions: list[str], price: float = 0.0) -> None:
        from transformers.utils import get_json_schema  # loads torch
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        self.price = price
        self.functions = {
            path.rpartition(":")[2]: registry.function(path, "environment.functions") for path in functions
        }
        if not functions:
            raise ConfigError("environment.functions: name at least one, such as my_file:add")
        try:
            self.tools = [get_json_schema(function) for function in self.functions.values()]
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"environment.functions: {' '.join(str(error).split())}; type hints, and a docstring with every "
                "argument, tell the model what a function takes"
            ) from error

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        return prompt

    def step(self, completion: str) -> Answer:
        calls = calls_in(completion)
        if not calls:
            return Answer("", done=True)
        answers = [self._answer(call) for call in calls]
        failed = sum(wrong for _, wrong in answers)
        messages = [
            {"role": "tool", "name": call.get("name", ""), "content": text}
            for call, (text, _) in zip(calls, answers, strict=True)
        ]
        return Answer("\n".join(text for text, _ in answers), reward=-self.price * failed, messages=messages)

    def _answer(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """What a call gives as a text, and whether it failed."""
        name, arguments = call.get("name"), call.get("arguments", {})
        if name not in self.functions:
            return json.dumps({"error": f"no function is called {name}; there are {', '.join(self.functions)}"}), True
        try:
            made = self.functions[name](**arguments)
        except Exception as error:  # of somebody else's function, given what a model wrote
            return json.dumps({"error": f"{type(error).__name__}: {error}"}), True
        return made if isinstance(made, str) else json.dumps(made, default=str), False


def calls_in(text: str) -> Sequence[dict[str, Any]]:
    """The calls of a turn, each with 'name' and 'arguments'; what cannot be read is a call of no name.

    Blocks of <tool_call>, or a turn that is an object in JSON with a name and arguments or parameters (Llama 3).
    """
    blocks = BLOCK.findall(text)
    if blocks:
        return [_call(block) or {"name": None} for block in blocks]
    alone = _call(text.rpartition("</think>")[2].strip())
    return [alone] if alone is not None else []


def _call(written: str) -> dict[str, Any] | None:
    marked = CALL.search(written)
    if marked is not None:
        given = {name: _value(value) for name, value in PARAMETER.findall(marked[2])}
        return {"name": marked[1], "arguments": given}
    try:
        call = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def _value(written: str) -> Any:
    """An argument as JSON where it is some, else as a text."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
