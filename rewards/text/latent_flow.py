"""A reward of how well a text's hidden states fit a flow that was learned on those of good texts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewards.base import Metadata, Reward, Scores, Spec, Steps, as_reward, bind, score, spec_of
from rewards.text.learned import load_moments, moments
from rewards.text.model import AsksModel, CausalModel


class LatentFlow(AsksModel):
    """What a text's tokens lose where their hidden states leave a flow field that was learned on good texts (RLFR,
    arXiv 2510.10201, and the authors' code).

    A token's state x is noised to t x + (1 - t) e. Its deviation is t / (1 - t) times the mean squared distance of the
    field's velocity from x - e, given the state of the token before; its place between the text's smallest and largest
    deviation is what it loses, of the `most` worst tokens beyond `threshold`. The first token loses nothing. The field
    learns during the run, on states of texts that are right and of `expert` texts in the data. With `weighted_sum`, a
    weight of 0.01 and an outcome beside it, as published; `advantage: {name: process_returns}` learns from each token.

    Departures: the field is a network of two layers on the last layer's states, where the authors' is a deep one on
    three layers between, and is trained on expert texts before the run.

    Args:
        outcome: a verifier; from 1/2 on is right.
        model: folder or hub name of a frozen model whose states they are; default the one that is trained.
        expert: key of the metadata with an expert's text, where it has one.
        t: share of the state in what the field sees.
        threshold: deviation, of 1 as the text's largest, beyond which a token loses.
        most: number of a text's tokens that lose.
        learning_rate, passes: of the field's AdamW on each iteration's states.
        width: width of the field's hidden layers.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str | None = None,
        expert: str | None = None,
        t: float = 0.8,
        threshold: float = 0.6,
        most: int = 15,
        learning_rate: float = 1e-4,
        passes: int = 1,
        width: int = 256,
        seed: int = 0,
    ) -> None:
        if not 0 < t < 1:
            raise ValueError("latent_flow: t between 0 and 1")
        super().__init__(model)
        self.outcome: Reward = as_reward(outcome)
        self.expert, self.t, self.threshold, self.most = expert, t, threshold, most
        self.learning_rate, self.passes, self.width, self.seed = learning_rate, passes, width, seed
        self.name = f"latent_flow({self.outcome.name})"
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs | {"text", "prompt"}, spec.kind, deterministic=False)
        self.field: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.random = torch.Generator().manual_seed(seed)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        steps: list[Steps] = []
        states, ends = self._states(samples, prompts, metadata)
        with torch.no_grad():
            for cut, rows in zip(ends, states, strict=True):
                loss = self._deviations(rows) * self.t / (1 - self.t)
                lost = losses_of_tokens(loss, self.threshold, self.most)
                steps.append(list(zip(cut, [0.0, *(-lost).tolist()], strict=True)))
        return Scores(torch.tensor([sum(value for _, value in row) for row in steps]), steps=steps)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        right = score(self.outcome, samples, prompts, metadata).value >= 0.5
        good = [i for i in range(len(samples)) if right[i]]
        texts, asked, records = [samples[i] for i in good], [prompts[i] for i in good], [metadata[i] for i in good]
        for record, prompt in zip(metadata, prompts, strict=True):
            if self.expert is not None and self.expert in record:
                texts, asked, records = [*texts, str(record[self.expert])], [*asked, prompt], [*records, record]
        if not texts:
            return {"texts": 0.0}
        states, _ = self._states(texts, asked, records)
        if not sum(len(rows) - 1 for rows in states):
            return {"texts": 0.0}
        first = 0.0
        for number in range(self.passes):
            loss = torch.cat([self._deviations(rows) for rows in states]).mean()
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            first = first if number else loss.item()
        return {"texts": float(len(texts)), "loss": first}

    def _states(
        self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> tuple[list[Tensor], list[list[int]]]:
        """States [K, D] of each text's tokens, and where they end; an empty text has one, its prompt's."""
        ends = [self.model.ends(text) or [len(text)] for text in samples]
        return self.model.states(samples, prompts, metadata, ends), ends

    def _deviations(self, states: Tensor) -> Tensor:
        """[K - 1] mean squared errors of the velocity at each state but the first, given the one before it."""
        before, x = states[:-1], states[1:]
        noise = torch.randn(x.shape, generator=self.random)
        seen = torch.cat([self.t * x + (1 - self.t) * noise, before], 1)
        return (self._field(states.shape[1])(seen) - (x - noise)).square().mean(1)

    def _field(self, size: int) -> nn.Module:
        """The field, made when the size of the states is known."""
        if self.field is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                layers = [nn.Linear(2 * size, self.width), nn.SiLU(), nn.Linear(self.width, self.width), nn.SiLU()]
                self.field = nn.Sequential(*layers, nn.Linear(self.width, size))
            self.optimizer = torch.optim.AdamW(self.field.parameters(), self.learning_rate)
        return self.field

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        noise = {"noise": self.random.get_state()}
        if self.field is None or self.optimizer is None:
            return noise, {}
        tensors = {f"field.{name}": value for name, value in self.field.state_dict().items()}
        return tensors | moments(self.optimizer) | noise, {"size": self.field[-1].out_features}  # type: ignore[index]

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.random.set_state(tensors["noise"])
        if "size" in state:
            field = self._field(int(state["size"]))
            field.load_state_dict({k.removeprefix("field."): v for k, v in tensors.items() if k.startswith("field.")})
            assert self.optimizer is not None
            load_moments(self.optimizer, tensors)


def losses_of_tokens(deviation: Tensor, threshold: float, most: int) -> Tensor:
    """[K] what each token of a text loses: its deviation's place between the smallest and the largest, 0 up to a
    threshold and beyond the `most` largest."""
    if not len(deviation):
        return deviation
    low, high = deviation.min(), deviation.max()
    place = (deviation - low) / (high - low).clamp(min=1e-12)
    kept = torch.zeros_like(place).index_fill(0, place.topk(min(most, len(place))).indices, 1.0)
    return place * kept * (place > threshold)
