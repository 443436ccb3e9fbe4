"""What judges were asked since somebody last looked, and what it took."""

import threading
from collections import Counter


class Usage:
    """Counts of one judge; threads add to them.

    Args:
        price: price of a million tokens of questions, and of a million tokens of replies, in any currency.
    """

    def __init__(self, price: tuple[float, float] | None = None) -> None:
        self.price = price
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def add(self, **counts: float) -> None:
        """Add counts of 'requests', their 'seconds', 'question_tokens', 'reply_tokens', 'retries' (attempts that a
        server failed), 'redrawn' (replies that could not be read) and 'cached' (questions answered from the disk)."""
        with self.lock:
            for name, count in counts.items():
                self.counts[name] += count  # type: ignore[assignment]

    def retried(self) -> None:
        """An attempt failed, and another follows."""
        self.add(retries=1)

    def take(self) -> dict[str, float]:
        """The counts so far, which start again at 0, and the cost where there is a price."""
        with self.lock:
            taken = {name: float(self.counts[name]) for name in NAMES}
            self.counts.clear()
        if self.price is not None:
            question_price, replied = self.price
            taken["cost"] = (question_price * taken["question_tokens"] + replied * taken["reply_tokens"]) / 1e6
        return taken


NAMES = ("requests", "seconds", "question_tokens", "reply_tokens", "retries", "redrawn", "cached")
judges: dict[str, Usage] = {}
"""Usage of each judge of this process, by the name of its reward."""


def usage_of(name: str, price: tuple[float, float] | None = None) -> Usage:
    """The counts of the judge in the reward of this name; judges of one name count together."""
    return judges.setdefault(name, Usage(price))


def take() -> dict[str, float]:
    """Usage of all judges of this process since the last call: 'judge/<reward>/requests' and so on."""
    return {f"judge/{name}/{what}": count for name, used in judges.items() for what, count in used.take().items()}
