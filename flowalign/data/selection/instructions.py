"""Instructions that prompts are asked under: a population, credited by rewards, pruned, and rewritten by a model."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.data.selection.variants import Variants
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

TEMPLATE = """Questions are answered under an instruction. Under the instruction

{instruction}

these answers were poor, with rewards from 0 to 1:

{experience}

Write a better instruction. Write the instruction alone."""


class Instructions:
    """Prompts in turn, each group's under one of several instructions, which evolve with the policy (after the
    abstract of INSPO, arXiv 2512.01945).

    An instruction is drawn with probability proportional to exp(its mean reward / temperature) and put before the
    prompt; the group's mean reward is its credit, which fades. Every few iterations the worst are dropped, and a
    language model writes as many new ones from the best and from the worst rewards of the last iterations. Departure:
    new ones join at once, as good as the best until they were tried, where the authors verify them first.

    Args:
        instructions: those to begin with; one may be empty.
        writer: where the model that writes is, local or served; null: the population only shrinks.
        join: text between an instruction and a prompt.
        every: iterations between two times of writing.
        replaced: number of instructions that are dropped at a time; one always stays.
        memory: share of an instruction's earlier credit that is kept at each new group, in [0, 1).
        temperature: of the choice among instructions, in rewards.
        buffer: number of groups from which the writer is shown the worst.
        shown: number of groups that it is shown.
        template: what the writer is asked; `{instruction}` and `{experience}` are filled in.
        most: largest number of tokens of an instruction.
    """

    name = "instructions"

    def __init__(
        self,
        instructions: Sequence[str],
        writer: Local | Served | None = None,
        join: str = "\n\n",
        every: int = 10,
        replaced: int = 1,
        memory: float = 0.9,
        temperature: float = 0.1,
        buffer: int = 256,
        shown: int = 4,
        template: str = TEMPLATE,
        most: int = 256,
    ) -> None:
        if not instructions or len(set(instructions)) < len(instructions):
            raise ValueError("instructions: give at least one instruction, all different")
        if not (0 <= memory < 1 and temperature > 0 and min(every, replaced, buffer, shown) >= 1):
            raise ValueError("instructions: memory in [0, 1), temperature above 0, the others at least 1")
        self.writer, self.join, self.every, self.replaced = writer, join, every, replaced
        self.memory, self.temperature, self.shown = memory, temperature, shown
        self.template, self.most = template, most
        self._judge: Judge | None = None
        self.credit: dict[str, float | None] = dict.fromkeys(instructions)
        """Mean reward of each living instruction; None: not drawn yet."""
        self.under: dict[int, str] = {}
        """Instruction of each variant."""
        self.recent: deque[tuple[float, str]] = deque(maxlen=buffer)
        """Mean reward and prompt of the last groups."""
        self.variants, self.drawn, self.told = Variants(), 0, 0

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        listed = self.variants.join(prompts)
        first, self.drawn = self.drawn, self.drawn + groups
        living = list(self.credit)
        chances = self.chances()
        chosen = np.random.default_rng([seed, iteration, 8, round]).choice(len(living), groups, p=chances)
        picks = []
        for pick, number in zip(shuffled(listed, first, groups, seed), chosen, strict=True):
            instruction = living[number]
            text = f"{instruction}{self.join}{prompts.texts[pick]}" if instruction else prompts.texts[pick]
            variant = self.variants.number(prompts, pick, text, {})
            self.under[variant] = instruction
            picks.append(variant)
        return picks

    def chances(self) -> list[float]:
        """Probability of each living instruction; those that were not drawn yet count as the best."""
        best = max((credit for credit in self.credit.values() if credit is not None), default=0.0)
        known = [best if credit is None else credit for credit in self.credit.values()]
        weights = [math.exp((credit - best) / self.temperature) for credit in known]
        return [weight / sum(weights) for weight in weights]

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        for pick, rate in zip(picks, success, strict=True):
            instruction = self.under[pick]
            if instruction in self.credit:
                before = self.credit[instruction]
                self.credit[instruction] = rate if before is None else self.memory * before + (1 - self.memory) * rate
            self.recent.append((rate, prompts.texts[self.variants.source(pick)]))
        self.told += 1
        if self.told % self.every == 0:
            self._evolve()

    def _evolve(self) -> None:
        """Drop the worst, and write new ones from the best."""
        tried = sorted((credit, text) for text, credit in self.credit.items() if credit is not None)
        dropped = [text for _, text in tried[:-1][: self.replaced]]
        for text in dropped:
            del self.credit[text]
        if self.writer is None or not tried:
            return
        self._judge = self._judge or self.writer.build(self.name)
        worst = sorted(self.recent)[: self.shown]
        experience = "\n".join(f"{rate:.2f}: {prompt}" for rate, prompt in worst)
        asked = self.template.replace("{instruction}", tried[-1][1]).replace("{experience}", experience)
        # one question for each, so that they differ by their seeds
        questions = [Question((), asked) for _ in range(self.replaced)]
        for reply in self._judge.reply(questions, 1.0, self.most, self.told):
            if reply.strip():
                self.credit.setdefault(reply.strip(), None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "credit": dict(self.credit),
            "under": [[variant, instruction] for variant, instruction in self.under.items()],
            "recent": [[rate, prompt] for rate, prompt in self.recent],
            "variants": self.variants.state_dict(),
            "drawn": self.drawn,
            "told": self.told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.credit, self.drawn, self.told = dict(state["credit"]), state["drawn"], state["told"]
        self.under = {variant: instruction for variant, instruction in state["under"]}
        self.recent = deque(((rate, prompt) for rate, prompt in state["recent"]), maxlen=self.recent.maxlen)
        self.variants.load_state_dict(state["variants"])
