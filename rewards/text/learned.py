"""Rewards of texts that learn during the run (`rewards.base.LearningReward`), from an outcome that labels the texts."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Metadata, Reward, Scores, Spec, Steps, as_reward, bind, groups, score, spec_of
from rewards.text.model import AsksModel, CausalModel
from rewards.text.process import implicit_reward
from rewards.text.reward_model import RewardModel
from rewards.text.steps import LINES, ImplicitPRM, step_ends
from rewards.text.turns import Transcript


class Progress(AsksModel):
    """An outcome, redistributed over a text's steps or turns by a head that learns how much each contributes (SPA-RL,
    arXiv
    2505.20732).

    The head sees what the language model has in mind at each step's end, its last layer's hidden state, and learns to
    make the contributions of a text add up to its outcome (squared error). What they lack of the outcome is shared
    evenly, so that a text earns its outcome whatever the head says. `advantage: {name: process_returns}` learns from
    it.

    Departures: the paper trains the head on a model of its own before RL and learns PPO; here it learns beside the
    policy, on the policy's states. Its grounding signal is another reward: what an `environment` pays.

    Args:
        outcome: a reward of whole texts.
        model: folder or hub name of a frozen model whose states the head sees; default the one that is trained.
        separator: a regular expression of what ends a step, without an environment.
        learning_rate, passes: of the head's AdamW on each iteration's texts.
        width: width of the head's hidden layer.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str | None = None,
        separator: str = LINES,
        learning_rate: float = 1e-3,
        passes: int = 4,
        width: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(model)
        self.outcome: Reward = as_reward(outcome)
        self.separator, self.passes, self.width, self.seed = separator, passes, width, seed
        self.learning_rate = learning_rate
        self.name = f"progress({self.outcome.name})"
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs, spec.kind, deterministic=False)
        self.head: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        outcome = score(self.outcome, samples, prompts, metadata)
        ends, states = self._states(samples, prompts, metadata)
        with torch.no_grad():
            parts = [self._head(row.shape[1])(row)[:, 0] for row in states]
        told = torch.stack([row.sum() for row in parts])
        steps: list[Steps] = []
        for cut, row, value in zip(ends, parts, outcome.value.tolist(), strict=True):
            even = (value - row.sum()) / len(row)
            steps.append(list(zip(cut, (row + even).tolist(), strict=True)))
        return Scores(outcome.value, {self.outcome.name: outcome.value, "told": told}, steps, outcome.weight)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        outcome = score(self.outcome, samples, prompts, metadata).value
        _, states = self._states(samples, prompts, metadata)
        head = self._head(states[0].shape[1])
        assert self.optimizer is not None
        every = torch.cat(states)
        text = torch.repeat_interleave(torch.arange(len(states)), torch.tensor([len(row) for row in states]))
        errors = []
        for _ in range(self.passes):
            told = torch.zeros(len(states)).index_add(0, text, head(every)[:, 0])
            loss = F.mse_loss(told, outcome)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            errors.append(loss.item())
        return {"error": errors[0]}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.head is None or self.optimizer is None:
            return {}, {}
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        return tensors | moments(self.optimizer), {"size": self.head[0].in_features}  # type: ignore[index]

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if tensors:
            head = self._head(int(state["size"]))
            head.load_state_dict({k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")})
            assert self.optimizer is not None
            load_moments(self.optimizer, tensors)

    def _head(self, size: int) -> nn.Module:
        """The head, made when the size of the states is known; its last layer begins at 0."""
        if self.head is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                last = nn.Linear(self.width, 1)
                self.head = nn.Sequential(nn.Linear(size, self.width), nn.Tanh(), last)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.optimizer = torch.optim.AdamW(self.head.parameters(), self.learning_rate)
        return self.head

    def _states(
        self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Where each step ends, in characters, and the model's states [K, D] there, float32 on the CPU."""
        ends = [
            [turn.end for turn in text.turns] if isinstance(text, Transcript) else step_ends(text, self.separator)
            for text in samples
        ]
        return ends, self.model.states(samples, prompts, metadata, ends)


class LearnedPRM(ImplicitPRM):
    """PRIME's process reward: beta * (log pi - log pi_ref) of each token, pi learning on from the outcomes of the
    texts that
    it sees (PRIME, arXiv 2502.01456): cross-entropy of sigmoid(beta * sum of log-ratios) with whether a text is right.

    pi_ref stays as it was. With `weighted_sum` and the outcome beside it, as in the paper.

    Args:
        outcome: a verifier; from 1/2 on is right.
        model: folder or hub name of pi at the start; `text_outcome` trains one.
        reference: pi_ref; default the same as pi at the start, so that the first iteration's rewards are 0.
        learning_rate: of AdamW, one update a chunk of `batch_size` texts; 1e-6 in the paper.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str,
        reference: str | None = None,
        beta: float = 0.05,
        learning_rate: float = 1e-6,
        batch_size: int = 64,
    ) -> None:
        super().__init__(model, reference or model, beta)
        self.outcome: Reward = as_reward(outcome)
        self.name = f"learned_prm({self.outcome.name})"
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs | {"text", "prompt"}, spec.kind, deterministic=False)
        self.batch_size = batch_size
        self.network = self.model.network.float().requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), learning_rate, weight_decay=0.0)

    def bind(self, model: CausalModel) -> None:
        """Refuse a model in training that sees pictures; hand it on to the outcome."""
        super().bind(model)
        bind(self.outcome, model)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        right = (score(self.outcome, samples, prompts, metadata).value >= 0.5).float()
        total, correct = 0.0, 0.0
        for start in range(0, len(samples), self.batch_size):
            chunk = slice(start, start + self.batch_size)
            logit = self._logits(samples[chunk], prompts[chunk], metadata[chunk])
            loss = F.binary_cross_entropy_with_logits(logit, right[chunk])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(logit)
            correct += ((logit > 0).float() == right[chunk]).float().sum().item()
        return {"loss": total / len(samples), "accuracy": correct / len(samples)}

    def _logits(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """[N] beta times the texts' log-ratios, with a gradient."""
        begun = [self.model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        texts = [self.model.tokens(text) for text in samples]
        reference, mask = self.reference.log_probs(begun, texts)
        inputs, begins = self.model.inputs(begun, texts)
        logits = self.network(**inputs, use_cache=False).logits
        rows = []
        for row, (begin, text) in enumerate(zip(begins, texts, strict=True)):
            log_probs = logits[row, begin - 1 : begin - 1 + len(text)].float().log_softmax(-1)
            ids = torch.tensor(text, dtype=torch.long, device=log_probs.device)
            rows.append(log_probs.gather(-1, ids[:, None])[:, 0].sum())
        return implicit_reward(torch.stack(rows).cpu(), reference.where(mask, 0).sum(1), self.beta)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"network.{name}": value.detach() for name, value in self.network.named_parameters()}
        return tensors | moments(self.optimizer), {}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(tensors[f"network.{name}"])
        load_moments(self.optimizer, tensors)


class LearnedScore:
    """A reward model that is trained beside the policy: right texts against wrong ones of their group (after Cooper's
    abstract, arXiv 2508.05613).

    Its score goes through a sigmoid. What the verifier is sure of is learned: a right text scores higher than a wrong
    one of the same prompt, by Bradley and Terry's loss. Departure: wrong texts are the group's own, where Cooper has an
    assistant build them.

    Args:
        outcome: a verifier of high precision; from 1/2 on is right.
        model: folder or hub name of a sequence-classification model, as `flowalign train-reward` writes.
        reference: key of the metadata with the right answer, which the model reads too; null: none.
        learning_rate: of AdamW, one update an iteration.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str,
        reference: str | None = None,
        learning_rate: float = 1e-6,
        batch_size: int = 32,
        device: str = "auto",
    ) -> None:
        self.outcome: Reward = as_reward(outcome)
        self.model = RewardModel.load(model, device=device)
        self.reference, self.batch_size = reference, batch_size
        if self.model.sees_pictures:
            raise ValueError(
                f"learned_score: '{model}' sees pictures, and texts alone are learned from; text_score works"
            )
        self.optimizer = torch.optim.AdamW(self.model.network.parameters(), learning_rate, weight_decay=0.0)
        self.name = f"learned_score({self.outcome.name})"
        needs = spec_of(self.outcome).needs | {"text", "prompt"} | (set() if reference is None else {"metadata"})
        self.spec = Spec(frozenset(needs), deterministic=False)

    def bind(self, model: CausalModel) -> None:
        """Hand the language model in training to the outcome."""
        bind(self.outcome, model)

    @torch.no_grad()
    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        rows = [list(range(len(samples)))[i : i + self.batch_size] for i in range(0, len(samples), self.batch_size)]
        return Scores(torch.cat([self._scores(row, samples, prompts, metadata) for row in rows]).sigmoid().cpu())

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        verdict = score(self.outcome, samples, prompts, metadata).value
        pairs = []
        for members in groups(prompts, metadata):
            right = [i for i in members if verdict[i] >= 0.5]
            wrong = [i for i in members if verdict[i] < 0.5]
            pairs += list(zip(right, wrong, strict=False))
        if not pairs:
            return {"pairs": 0.0}
        self.optimizer.zero_grad()
        won = 0.0
        for start in range(0, len(pairs), self.batch_size):
            better, worse = (list(side) for side in zip(*pairs[start : start + self.batch_size], strict=True))
            margin = self._scores(better, samples, prompts, metadata) - self._scores(worse, samples, prompts, metadata)
            (-F.logsigmoid(margin).sum() / len(pairs)).backward()
            won += float((margin > 0).sum())
        self.optimizer.step()
        return {"pairs": float(len(pairs)), "accuracy": won / len(pairs)}

    def _scores(
        self, rows: Sequence[int], samples: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> Tensor:
        references = None if self.reference is None else [str(metadata[i].get(self.reference, "")) for i in rows]
        return self.model.outputs([samples[i] for i in rows], [prompts[i] for i in rows], references)[:, 0]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"network.{name}": value.detach() for name, value in self.model.network.named_parameters()}
        return tensors | moments(self.optimizer), {}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.network.named_parameters():
                parameter.copy_(tensors[f"network.{name}"])
        load_moments(self.optimizer, tensors)


class Distilled:
    """A judge whose verdicts on few texts are learned by a small model, which scores all (after ONI's abstract, arXiv
    2410.23022).

    Every iteration the judge is asked about `asked` texts, and ridge regression on hashed words fits all its verdicts
    so
    far. The first iteration's texts get the prior's value.

    Args:
        reward: the judge, pointwise.
        asked: texts that it is asked about in an iteration.
        size: number of hashed features.
        ridge: strength of the prior on them.
        prior: value without any verdict.
    """

    def __init__(
        self, reward: Reward, asked: int = 16, size: int = 512, ridge: float = 1.0, prior: float = 0.5, seed: int = 0
    ) -> None:
        self.reward: Reward = as_reward(reward)
        if spec_of(self.reward).kind != "pointwise":
            raise ValueError(f"distilled: '{self.reward.name}' must score each text alone (pointwise)")
        if asked < 1 or size < 1 or not ridge > 0:
            raise ValueError("distilled: asked and size at least 1, ridge above 0")
        self.asked, self.size, self.ridge, self.prior, self.seed = asked, size, ridge, prior, seed
        self.name = f"distilled({self.reward.name})"
        self.spec = Spec(spec_of(self.reward).needs, deterministic=False)
        self.products = torch.zeros(size, size, dtype=torch.float64)
        self.targets = torch.zeros(size, dtype=torch.float64)
        self.seen = 0
        """Texts that the judge was asked about."""

    def bind(self, model: CausalModel) -> None:
        """Hand the language model in training on."""
        bind(self.reward, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        features = torch.stack([self._features(text, prompt) for text, prompt in zip(samples, prompts, strict=True)])
        return Scores((self.prior + features @ self.weights).float())

    @property
    def weights(self) -> Tensor:
        """[size] of the regression of the verdicts, less the prior's value, on the features."""
        return torch.linalg.solve(self.products + self.ridge * torch.eye(self.size, dtype=torch.float64), self.targets)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        order = torch.Generator().manual_seed(self.seed + self.seen)
        rows = torch.randperm(len(samples), generator=order)[: self.asked].tolist()
        texts, asked = [samples[i] for i in rows], [prompts[i] for i in rows]
        verdicts = score(self.reward, texts, asked, [metadata[i] for i in rows]).value.double()
        features = torch.stack([self._features(*row) for row in zip(texts, asked, strict=True)])
        foretold = self.prior + features @ self.weights
        self.products += features.T @ features
        self.targets += features.T @ (verdicts - self.prior)
        self.seen += len(rows)
        return {"asked": float(len(rows)), "error": (foretold - verdicts).square().mean().item()}

    def _features(self, text: str, prompt: str) -> Tensor:
        """[size] float64, of length 1: how often each hashed word of the text, or two in a row, comes."""
        words = text.lower().split()
        grams = ["", *words, *(" ".join(pair) for pair in zip(words, words[1:], strict=False))]
        vector = torch.zeros(self.size, dtype=torch.float64)
        for gram in grams:
            vector[int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big") % self.size] += 1
        return vector / vector.norm()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"products": self.products, "targets": self.targets}, {"seen": self.seen}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.products, self.targets = tensors["products"].clone(), tensors["targets"].clone()
        self.seen = int(state["seen"])


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, by the number of the parameter."""
    return {
        f"optimizer.{number}.{name}": torch.as_tensor(value)
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_moments(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `moments`."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            states.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
