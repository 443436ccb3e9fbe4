"""A process reward model that learns beside the policy from which of a group's texts did better."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Reward, Scores, Spec, Steps, as_reward, bind, groups, score, spec_of
from rewards.text.learned import load_moments, moments
from rewards.text.model import AsksModel, CausalModel
from rewards.text.steps import LINES, step_ends
from rewards.text.turns import Transcript


class OnlinePRM(AsksModel):
    """beta * (log pi - log pi_old) of each step or turn, pi learning by DPO which of a group's texts earned more (OPRL,
    arXiv 2509.19199, eq. 2 and 3).

    pi_old is the policy that is trained, as it is when it is asked. Pairs are a group's best text with its worst, its
    second best with its second worst, and so on, where their outcomes differ. The paper adds the step's advantage to
    the text's: `weighted_sum` with the outcome beside it, and `advantage: {name: process_returns}`.

    Departures: the paper updates pi before it scores an iteration, here afterwards; an environment's answers are read
    by pi as a plain text, and earn nothing.

    Args:
        outcome: a reward of whole texts: a verifier or, where nothing can be verified, a judge.
        model: folder or hub name of pi at the start, with the policy's tokens.
        separator: a regular expression of what ends a step, without an environment.
        learning_rate: of AdamW, one update an iteration.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str,
        beta: float = 0.05,
        separator: str = LINES,
        learning_rate: float = 1e-6,
        batch_size: int = 16,
    ) -> None:
        super().__init__(None)
        self.outcome: Reward = as_reward(outcome)
        self.name = f"online_prm({self.outcome.name})"
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs | {"text", "prompt"}, spec.kind, deterministic=False)
        self.beta, self.separator, self.batch_size = beta, separator, batch_size
        self.learned = CausalModel.load(model)
        self.network = self.learned.network.float().requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), learning_rate, weight_decay=0.0)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        steps: list[Steps] = []
        with torch.no_grad():
            for start in range(0, len(samples), self.batch_size):
                chunk = slice(start, start + self.batch_size)
                rows = self._rewards(samples[chunk], prompts[chunk], metadata[chunk])
                for text, row in zip(samples[chunk], rows, strict=True):
                    steps.append(self._steps(text, row.tolist()))
        return Scores(torch.tensor([sum(value for _, value in row) for row in steps]), steps=steps)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        outcome = score(self.outcome, samples, prompts, metadata).value.tolist()
        pairs = []
        for members in groups(prompts, metadata):
            ranked = sorted(members, key=lambda i: -outcome[i])
            half = len(ranked) // 2
            pairs += [(a, b) for a, b in zip(ranked[:half], ranked[::-1], strict=False) if outcome[a] > outcome[b]]
        if not pairs:
            return {"pairs": 0.0}
        self.optimizer.zero_grad()
        total, right = 0.0, 0.0
        for start in range(0, len(pairs), self.batch_size):
            chunk = pairs[start : start + self.batch_size]
            better, worse = (
                torch.stack([row.sum() for row in self._rewards(*self._rows(side, samples, prompts, metadata))])
                for side in zip(*chunk, strict=True)
            )
            loss = -F.logsigmoid(better - worse).sum() / len(pairs)
            loss.backward()
            total += loss.item()
            right += float((better > worse).sum())
        self.optimizer.step()
        return {"pairs": float(len(pairs)), "loss": total, "accuracy": right / len(pairs)}

    def _rows(
        self, rows: Sequence[int], samples: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> tuple[list[str], list[str], list[Any]]:
        return [samples[i] for i in rows], [prompts[i] for i in rows], [metadata[i] for i in rows]

    def _rewards(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> list[Tensor]:
        """[A] of each text: beta times its tokens' log-ratios, 0 where an environment answers; pi has a gradient."""
        texts = [self.learned.tokens(text) for text in samples]
        contexts = [self.learned.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        old, _ = self.model.log_probs(
            [self.model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)], texts
        )
        inputs, begins = self.learned.inputs(contexts, texts)
        logits = self.network(**inputs, use_cache=False).logits
        rewards = []
        for row, (begin, tokens, text) in enumerate(zip(begins, texts, samples, strict=True)):
            log_probs = logits[row, begin - 1 : begin - 1 + len(tokens)].float().log_softmax(-1)
            ids = torch.tensor(tokens, dtype=torch.long, device=log_probs.device)
            gain = log_probs.gather(-1, ids[:, None])[:, 0].cpu() - old[row, : len(tokens)]
            rewards.append(self.beta * gain.where(torch.tensor(self._written(text), dtype=torch.bool), 0))
        return rewards

    def _written(self, text: str) -> list[bool]:
        """Whether each token is the policy's."""
        ends = self.learned.ends(text)
        if not isinstance(text, Transcript):
            return [True] * len(ends)
        return [any(turn.begin < end <= turn.end for turn in text.turns) for end in ends]

    def _steps(self, text: str, rewards: list[float]) -> Steps:
        """The sum over the tokens of each step or turn."""
        turns = text.turns if isinstance(text, Transcript) else None
        cuts = step_ends(text, self.separator) if turns is None else [turn.end for turn in turns]
        ends, steps, before = self.learned.ends(text), [], 0
        for cut in cuts:
            steps.append((cut, sum(r for end, r in zip(ends, rewards, strict=True) if before < end <= cut)))
            before = cut
        return steps

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"network.{name}": value.detach() for name, value in self.network.named_parameters()}
        return tensors | moments(self.optimizer), {}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(tensors[f"network.{name}"])
        load_moments(self.optimizer, tensors)
