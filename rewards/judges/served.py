"""A judge behind any OpenAI-compatible server: vLLM, SGLang, or a hosted one."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from rewards.base import RewardError
from rewards.http import Asker
from rewards.judges.base import Judge, Question, spells
from rewards.judges.cache import CachedJudge
from rewards.usage import Usage, usage_of
from rewards.wire import JSON, png

TOP = 20  # log-probabilities a token that servers give at most


@dataclass(kw_only=True)
class Served:
    """Settings of a served judge."""

    __pydantic_config__ = {"extra": "forbid"}

    url: str
    """Address without /chat/completions, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """Name that the server gives the model."""
    concurrency: int = 32
    """Requests in flight."""
    timeout: float = 300.0
    """Seconds that a request may take."""
    patience: float = 600.0
    """Seconds to wait for a server that is down, before the run stops with an error."""
    token_variable: str | None = None
    """Environment variable with the server's key."""
    price: tuple[float, float] | None = None
    """Prices of a million tokens of questions and of replies, in any currency; the metrics have the cost."""
    cache: str | None = None
    """Folder where answers are kept, so that the same question is asked once."""

    def build(self, name: str) -> Judge:
        usage = usage_of(name, self.price)
        asker = Asker(name, self.url, self.timeout, self.patience, self.concurrency, self.token_variable, usage.retried)
        judge = ServedJudge(asker, self.model, usage)
        return judge if self.cache is None else CachedJudge(judge, self.cache, self.model, usage)


class ServedJudge:
    """Asks a server, many requests in flight; retries, back-off and time-outs are the asker's."""

    def __init__(self, asker: Asker, model: str, usage: Usage | None = None) -> None:
        self.asker, self.model, self.usage = asker, model, usage or Usage()

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        settings = {"max_tokens": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": TOP}

        def read(answer: Any) -> list[float] | None:
            top = self._top(answer["choices"][0])
            weights = [
                sum(math.exp(entry["logprob"]) for entry in top if spells(entry["token"], label)) for label in labels
            ]
            return [weight / sum(weights) for weight in weights] if sum(weights) > 0 else None

        return self.asker.map(lambda question: self._ask(_messages(question), settings, read), questions)

    def _top(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """The most probable first tokens of a reply and their log-probabilities."""
        given = (choice.get("logprobs") or {}).get("content")
        if not given or not given[0].get("top_logprobs"):
            raise RewardError(
                f"reward '{self.asker.name}': {self.asker.url} gives no log-probabilities, which this template needs; "
                "vLLM and SGLang do, transformers serve does not. There a template works whose answer is written "
                "('answer: score' or 'winner'), such as unified_reward_point for pictures and text_principles for texts"
            )
        top: list[dict[str, Any]] = given[0]["top_logprobs"]
        return top

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        # vLLM's extensions: score the last message's tokens instead of answering it
        settings = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "add_generation_prompt": False,
            "continue_final_message": True,
        }

        def ask(pair: tuple[Question, str]) -> float:
            question, answer = pair
            messages = [*_messages(question), {"role": "assistant", "content": answer}]
            return self._ask(messages, settings, lambda body: self._read_echo(body, answer))

        return self.asker.map(ask, list(zip(questions, answers, strict=True)))

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}

        def ask(question: Question) -> str:
            return self._ask(
                _messages(question), settings, lambda body: str(body["choices"][0]["message"]["content"] or "")
            )

        return self.asker.map(ask, questions)

    def _ask(self, messages: list[dict[str, Any]], settings: dict[str, Any], read: Any) -> Any:
        body = {"model": self.model, "messages": messages, **settings}

        begin = time.perf_counter()

        def parse(response: httpx2.Response) -> Any:
            answer = response.json()
            return read(answer), answer.get("usage") or {}

        reply, tokens = self.asker.post("/chat/completions", json.dumps(body).encode(), JSON, parse)
        self.usage.add(
            requests=1,
            seconds=time.perf_counter() - begin,
            question_tokens=tokens.get("prompt_tokens") or 0,
            reply_tokens=tokens.get("completion_tokens") or 0,
        )
        return reply

    def _read_echo(self, body: Any, answer: str) -> float:
        """Walk back over the last tokens until they spell the answer."""
        if body.get("prompt_logprobs") is None:
            raise RewardError(
                f"reward '{self.asker.name}': an echo needs a server that returns prompt_logprobs, as vLLM does; "
                f"{self.asker.url} does not"
            )
        text, log_probs = "", []
        for position in reversed(body["prompt_logprobs"]):
            # vLLM may add the most probable token to the one that stands there; that one comes first
            token = next(iter(position.values()))
            text = token["decoded_token"] + text
            log_probs.append(token["logprob"])
            if len(text.strip()) >= len(answer.strip()):
                break
        return sum(log_probs) / len(log_probs)


def _messages(question: Question) -> list[dict[str, Any]]:
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(picture)}"}}
        for picture in question.pictures
    ]
    user = {"role": "user", "content": [*pictures, {"type": "text", "text": question.text}]}
    return [{"role": "system", "content": question.system}, user] if question.system else [user]
