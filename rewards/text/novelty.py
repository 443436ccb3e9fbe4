"""Bonuses of what is new: to the memory of right texts, or among the states of an environment."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, RewardError, Scores, Spec, Steps, as_reward, bind, score, spec_of
from rewards.text.embedding import TextSimilarity
from rewards.text.turns import Transcript


class Memory:
    """An outcome, plus how near a text is to right texts of earlier iterations, plus how far it is from all of them
    (after
    the abstract of memory-augmented RL of small models).

    Nearness is the mean cosine with its `neighbours` nearest ones of right texts of the same prompt's earlier groups,
    novelty 1 less the largest cosine with any text that was seen; both 0 where nothing is remembered. The memory is in
    checkpoints.

    Args:
        outcome: a verifier; from 1/2 on is right.
        model: folder or hub name of an encoder, as of `text_similarity`.
        exploit, explore: weights of nearness and novelty.
        neighbours: number of nearest right texts.
        most: texts that are remembered, the newest ones; right ones and all, each.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str,
        exploit: float = 0.2,
        explore: float = 0.1,
        neighbours: int = 4,
        most: int = 512,
        device: str = "auto",
    ) -> None:
        if neighbours < 1 or most < 1:
            raise ValueError("memory: neighbours and most at least 1")
        self.outcome: Reward = as_reward(outcome)
        self.encoder = TextSimilarity(model, device=device)
        self.exploit, self.explore, self.neighbours, self.most = exploit, explore, neighbours, most
        self.name = f"memory({self.outcome.name})"
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs | {"text", "prompt"}, spec.kind, deterministic=False)
        self.right: Tensor | None = None
        self.seen: Tensor | None = None
        """[N, D] unit vectors of the newest texts, right ones and all."""

    def bind(self, model: object) -> None:
        """Hand the language model in training to the outcome."""
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        verdict = score(self.outcome, samples, prompts, metadata)
        vectors = self._vectors(samples, prompts)
        near, new = torch.zeros(2, len(samples))
        if self.right is not None:
            near = (vectors @ self.right.T).topk(min(self.neighbours, len(self.right)), dim=1).values.mean(1)
        if self.seen is not None:
            new = 1 - (vectors @ self.seen.T).amax(1)
        value = verdict.value + self.exploit * near + self.explore * new
        parts = {self.outcome.name: verdict.value, "near": near, "new": new}
        return Scores(value, parts, weight=verdict.weight)

    def _vectors(self, samples: Sequence[str], prompts: Sequence[str]) -> Tensor:
        """[B, D] of texts after their prompts, so that an answer to another question is another one."""
        return self.encoder.vectors([prompt + text for prompt, text in zip(prompts, samples, strict=True)]).cpu()

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        verdict = score(self.outcome, samples, prompts, metadata).value
        vectors = self._vectors(samples, prompts)
        self.seen = self._newest(self.seen, vectors)
        if (verdict >= 0.5).any():
            self.right = self._newest(self.right, vectors[verdict >= 0.5])
        return {"remembered": float(0 if self.right is None else len(self.right))}

    def _newest(self, before: Tensor | None, vectors: Tensor) -> Tensor:
        return (vectors if before is None else torch.cat([before, vectors]))[-self.most :].clone()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        memories = {"right": self.right, "seen": self.seen}
        return {name: vectors for name, vectors in memories.items() if vectors is not None}, {}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.right, self.seen = tensors.get("right"), tensors.get("seen")


class Visits:
    """A bonus of rare states at each turn with an environment: 1 / sqrt(visits), over the whole run, within the
    episode, or
    their product (global and episodic bonuses, arXiv 2306.03236).

    The state is what the environment names, by default its last observation. Visits of the whole run are counted
    between iterations, so that all members of an iteration see the same counts; they are in checkpoints. It is added to
    the reward `environment`; `advantage: {name: process_returns}` learns from each turn.

    Args:
        over: 'run', 'episode' or 'both'.
        states: states that are remembered at most, the most visited ones.
    """

    name = "visits"
    spec = Spec(frozenset({"text", "prompt"}), deterministic=False)

    def __init__(self, over: str = "both", states: int = 100_000) -> None:
        if over not in ("run", "episode", "both") or states < 1:
            raise ValueError("visits: over is run, episode or both, and states at least 1")
        self.over, self.states = over, states
        self.counts: Counter[str] = Counter()

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        steps: list[Steps] = []
        for text in samples:
            if not isinstance(text, Transcript):
                raise RewardError(
                    "reward 'visits' counts the states of an environment; the configuration's `environment` names one"
                )
            within: Counter[str] = Counter()
            row = []
            for turn in text.turns:
                within[turn.state] += 1
                run = 1 / math.sqrt(self.counts[turn.state] + 1)
                episode = 1 / math.sqrt(within[turn.state])
                row.append((turn.end, {"run": run, "episode": episode, "both": run * episode}[self.over]))
            steps.append(row)
        return Scores(torch.tensor([sum(bonus for _, bonus in row) for row in steps], dtype=torch.float32), steps=steps)

    def learn(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        self.counts.update(turn.state for text in samples for turn in text.turns)
        if len(self.counts) > self.states:
            self.counts = Counter(dict(self.counts.most_common(self.states)))
        return {"states": float(len(self.counts))}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"counts": dict(self.counts)}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.counts = Counter(state["counts"])
