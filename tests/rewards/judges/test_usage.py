"""What a judge took is counted, its replies are handed on, and a question is asked once where answers are kept."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from rewards import FunctionReward, Scores, WeightedSum, score, usage
from rewards.judges import JudgeReward, PairwiseJudgeReward, Served
from rewards.judges.cache import CachedJudge
from rewards.pairwise import WinRate
from rewards.usage import Usage

RED, BLUE = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))


class Handler(BaseHTTPRequestHandler):
    """Fails once, then gives every picture 4 of 5; the second question about a prompt 'odd' is answered."""

    asked: list[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"][-1]["text"]
        self.asked.append(text)
        odd = "[odd]" in text and sum("[odd]" in own for own in self.asked) == 1
        reply = "Thought process:" if odd else "Final Score: 4"
        answer = {"choices": [{"message": {"content": reply}}], "usage": {"prompt_tokens": 30, "completion_tokens": 5}}
        content = json.dumps(answer).encode()
        self.send_response(503 if len(self.asked) == 1 else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.asked = []
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}/v1"
    served.shutdown()
    served.server_close()


def used(name: str) -> dict[str, float]:
    return {key.rpartition("/")[2]: count for key, count in usage.take().items() if key.startswith(f"judge/{name}/")}


def test_requests_tokens_retries_and_cost_are_counted_and_answers_are_kept(server: str, tmp_path: Path) -> None:
    def judge(name: str) -> JudgeReward:
        served = Served(url=server, model="tiny", concurrency=1, price=(2.0, 10.0), cache=str(tmp_path / "answers"))
        return JudgeReward("unified_reward_point", served, name=name)

    first, metadata = judge("first"), [{}] * 3
    scores = score(first, [RED, BLUE, RED], ["even", "even", "odd"], metadata)
    assert scores.value.tolist() == [0.75] * 3
    replies = ["Final Score: 4", "Final Score: 4", "Thought process:\n\nFinal Score: 4"]
    assert scores.replies == [{"quality": reply} for reply in replies]
    counts = used("first")
    assert counts.pop("seconds") > 0
    # a server's failure is a retry, a reply that cannot be read is drawn again
    expected = {"requests": 4, "question_tokens": 120, "reply_tokens": 20, "retries": 1, "redrawn": 1, "cached": 0}
    assert counts == expected | {"cost": pytest.approx((2 * 120 + 10 * 20) / 1e6)}
    assert len(Handler.asked) == 5 and set(used("first").values()) == {0.0}
    # another run knows the answers, whatever the reward is called, and asks about what is new alone
    again = score(judge("second"), [RED, BLUE, RED, BLUE], ["even", "even", "odd", "new"], [{}] * 4)
    assert again.value.tolist() == [0.75] * 4 and again.replies[:3] == scores.replies
    counts = used("second")
    assert counts["requests"] == 1 and counts["cached"] == 4 and len(Handler.asked) == 6


class Counting:
    """Answers by the number of questions asked so far."""

    def __init__(self) -> None:
        self.count = 0

    def _next(self, questions: list[object]) -> list[int]:
        self.count += len(questions)
        return list(range(self.count - len(questions), self.count))

    def choose(self, questions, labels):  # type: ignore[no-untyped-def]
        return [None if n == 1 else [n, 1.0] for n in self._next(questions)]

    def echo(self, questions, answers):  # type: ignore[no-untyped-def]
        return [float(n) for n in self._next(questions)]

    def reply(self, questions, temperature, max_tokens, seed):  # type: ignore[no-untyped-def]
        return [str(n) for n in self._next(questions)]


def test_kept_answers_are_told_apart_by_all_that_they_depend_on(tmp_path: Path) -> None:
    from rewards.judges import Question

    inner = Counting()
    judge = CachedJudge(inner, str(tmp_path), "one", Usage())
    a, b = Question((RED,), "a"), Question((BLUE,), "a")
    assert judge.choose([a, b, a], ["yes", "no"]) == [[0, 1.0], None, [0, 1.0]]
    assert judge.choose([b], ["yes", "no"]) == [None] and inner.count == 2
    assert judge.choose([b], ["no", "yes"]) == [[2, 1.0]]
    assert judge.echo([a, a], ["x", "y"]) == [3.0, 4.0] and judge.echo([a], ["y"]) == [4.0]
    # at temperature 0 a seed says nothing
    assert judge.reply([a], 0.0, 8, 1) == judge.reply([a], 0.0, 8, 2) == ["5"]
    assert judge.reply([a], 0.7, 8, 1) == ["6"] and judge.reply([a], 0.7, 8, 2) == ["7"]
    assert judge.reply([Question((RED,), "a", "be kind")], 0.0, 8, 1) == ["8"]
    assert CachedJudge(inner, str(tmp_path), "two", Usage()).reply([a], 0.0, 8, 1) == ["9"]


def test_replies_are_handed_on_by_sums_and_by_comparisons() -> None:
    class Says:
        def reply(self, questions, temperature, max_tokens, seed):  # type: ignore[no-untyped-def]
            return [f"Final Score: {3 + (question.pictures[0] is not None)}" for question in questions]

    judge = JudgeReward("unified_reward_point", Says(), name="says")
    both = score(
        WeightedSum([judge, FunctionReward(lambda *_: [1.0, 2.0], "plain")]), [RED, BLUE], ["a", "b"], [{}] * 2
    )
    assert both.replies == [{"says/quality": "Final Score: 4"}] * 2
    assert both[[1]].replies == both.replies[:1] and len(Scores.cat([both, both]).replies) == 4
    # as groups kept from an earlier iteration have none
    assert Scores.cat([both, replace(both, replies=None)]).replies is None

    class Prefers:
        def reply(self, questions, temperature, max_tokens, seed):  # type: ignore[no-untyped-def]
            return ["Image 1 is better"] * len(questions)

    pairs = PairwiseJudgeReward("unified_reward_pair", Prefers())
    won = score(WinRate(pairs), [RED, BLUE], ["a", "a"], [{"seed": 7}, {"seed": 8}])
    [name] = {key.partition(",")[0] for own in won.replies for key in own}
    assert [set(own) for own in won.replies] == [
        {f"{name}, first, beside seed {other}", f"{name}, second, beside seed {other}"} for other in (8, 7)
    ]
