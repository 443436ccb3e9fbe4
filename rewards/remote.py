"""The client of a reward that another process, environment or host serves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import torch

from rewards.base import Metadata, RewardError, Scores, Spec, sides
from rewards.http import Asker
from rewards.pictures import PictureError, read_picture
from rewards.wire import FILES, Encoding, encode


class RemoteReward:
    """A reward of `flowalign reward-server`; waits while the server is down.

    Args:
        url: address of the server, or of a load balancer in front of several.
        images: how pictures travel: raw in safetensors (quick on one host or a fast network) or as PNG.
        batch_size: samples a request, several requests at once; None sends each batch whole. Rewards that look at
            whole groups are always sent whole.
        concurrency: requests in flight.
        timeout: seconds a request may take.
        patience: seconds to wait for a server that is down before the run stops with an error.
        token_variable: environment variable with the server's token.
    """

    def __init__(
        self,
        url: str,
        name: str = "remote",
        images: Encoding = "safetensors",
        batch_size: int | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        patience: float = 600.0,
        token_variable: str | None = None,
    ) -> None:
        self.name, self.images, self.batch_size = name, images, batch_size
        self.asker = Asker(name, url, timeout, patience, concurrency, token_variable)
        self._spec: Spec | None = None

    @property
    def spec(self) -> Spec:
        """Properties of the served reward, fetched once."""
        if self._spec is None:
            self._spec = self.asker.get("/version", _read_spec)
            if sides(self._spec.needs) != ["picture"]:
                raise RewardError(f"reward '{self.name}': {sorted(self._spec.needs)} are not sent; name it in place")
        return self._spec

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        split = self.batch_size if self.batch_size and self.spec.kind == "pointwise" else len(samples)
        starts = range(0, len(samples), max(1, split))

        def ask(start: int) -> Scores:
            rows = slice(start, start + split)
            count = len(samples[rows])
            try:
                records = [self._opened(record) for record in metadata[rows]]
                body, kind = encode(samples[rows], prompts[rows], records, self.images)
            except (TypeError, OSError, PictureError) as error:
                raise RewardError(f"reward '{self.name}': the metadata cannot be sent: {error}") from error
            scores = self.asker.post("/score", body, kind, _read_scores)
            if {count} != {len(values) for values in (scores.value, *scores.parts.values())}:
                raise RewardError(
                    f"reward '{self.name}': {self.asker.shown} returned {len(scores.value)} values for {count} samples "
                    f"(first prompt: {prompts[start]!r})"
                )
            return scores

        return Scores.cat(self.asker.map(ask, starts))

    @staticmethod
    def _opened(record: Mapping[str, Any]) -> dict[str, Any]:
        """Metadata whose files of pictures are pictures: the server opens none."""
        files = {key: record[key] for key in FILES if isinstance(record.get(key), str | list)}
        opened = {
            key: [_picture(file) for file in value] if isinstance(value, list) else _picture(value)
            for key, value in files.items()
        }
        return {**record, **opened}


def _picture(file: object) -> Any:
    return read_picture(file) if isinstance(file, str) else file


def _read_spec(response: httpx2.Response) -> Spec:
    spec = response.json()["spec"]
    return Spec(frozenset(spec["needs"]), spec["kind"], deterministic=bool(spec["deterministic"]), off_device=True)


def _read_scores(response: httpx2.Response) -> Scores:
    answer = response.json()
    columns = {str(name): _tensor(values) for name, values in answer["parts"].items()}
    steps = answer.get("steps") and [[(int(end), float(value)) for end, value in row] for row in answer["steps"]]
    return Scores(_tensor(answer["value"]), columns, steps, answer.get("weight") and _tensor(answer["weight"]))


def _tensor(values: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
