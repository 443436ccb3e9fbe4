"""HiCoGen's chain of synthesis (arXiv 2511.19965): a picture is made one unit of the prompt after the other.

The first unit is drawn from nothing, each next is added by a model that edits, to the best picture so far. Candidates
are chosen by a hierarchical reward: of the picture as a whole, of its subjects and of their relation. Where the reward
has no such parts it judges the text so far (the whole) and the text of each unit so far (the subjects).

No code is published. The authors' units, instructions and weights of the levels are their language model's and unsaid;
here commas, 'and' and 'with' part the units unless a language model is named, and the levels weigh alike.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.core.credit import hierarchical
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.base import best_device
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.search.engine import Engine
from flowalign.search.found import Node
from rewards import score

BETWEEN = re.compile(r"\s*[,;]\s*(?:and\s+|with\s+)?|\s+(?:and|with)\s+")
SPLIT = (
    "Split this description of a picture into the things to draw one after the other, the background first. One short "
    "phrase a line, nothing else.\n\n{prompt}"
)


def split(prompt: str) -> list[tuple[str, str]]:
    """The units of a prompt by rules, each with the prompt up to its end."""
    ends = [match.span() for match in BETWEEN.finditer(prompt)] + [(len(prompt), len(prompt))]
    units, begin = [], 0
    for end, following in ends:
        if unit := prompt[begin:end].strip(" ."):
            units.append((unit, prompt[:end]))
        begin = following
    return units


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A picture made one unit of the prompt after the other, by a model that edits (HiCoGen, arXiv 2511.19965).

    Args:
        editor: the pipeline that adds units to a picture, a folder or hub name; default the model itself.
        instruction: the editor's instruction; {unit} is what to add, {text} the prompt up to its end.
        splitter: the language model that splits prompts, a folder or hub name; default rules.
        candidates: tried for each unit; default as many as the budget pays for.
        levels: weights of the reward's parts.
    """

    name = "chain"
    editor: str | None = None
    instruction: str = "Add {unit} to the picture, and keep the rest as it is."
    splitter: str | None = None
    candidates: int | None = None
    levels: dict[str, float] = field(default_factory=lambda: {"global": 1.0, "subject": 1.0, "relation": 1.0})

    def __post_init__(self) -> None:
        if "{unit}" not in self.instruction and "{text}" not in self.instruction:
            raise ValueError(f"the instruction {self.instruction!r} names neither {{unit}} nor {{text}}")

    def units(self, prompt: str, seed: int) -> list[tuple[str, str]]:
        """The units of a prompt, each with the text up to it; the last with the whole prompt."""
        if self.splitter is None:
            return split(prompt)
        question = SPLIT.format(prompt=prompt)
        model = _language_model(self.splitter)
        [answer] = model.decode(model.sample([question], [seed], max_new_tokens=256, temperature=0.0))
        lines = [line.strip(" -*.0123456789") for line in answer.splitlines()]
        units = [line for line in lines if line] or [prompt]
        return [(unit, ", ".join(units[: k + 1])) for k, unit in enumerate(units[:-1])] + [(units[-1], prompt)]

    def __call__(self, engine: Engine) -> None:
        with TemporaryDirectory() as folder:
            self._made(engine, Path(folder))

    def _made(self, engine: Engine, folder: Path) -> None:
        units, steps = self.units(engine.prompt, engine.seed), engine.steps
        editor = self._editor(engine.policy) if len(units) > 1 else engine.policy
        engine.found.steps = len(units) * steps
        picture, parent = None, None
        for k, (unit, text) in enumerate(units):
            last = k == len(units) - 1
            if picture is None:
                stage = engine.beside(engine.policy, engine.prompt if last else unit, engine.metadata, {})
            else:
                picture.save(folder / f"{k}.png")
                seen = engine.metadata | {"image": str(folder / f"{k}.png")}
                size = {"height": picture.height, "width": picture.width}
                stage = engine.beside(editor, self.instruction.format(unit=unit, text=text), seen, size)
            left = len(units) - k
            count = stage.afford(lambda n, left=left: (n * steps * left, n * left), self.candidates)  # type: ignore[misc]
            samples = stage.samples(stage.finish(stage.start(count)).x)
            if not isinstance(samples[0], Image):
                raise ConfigError("chain adds to pictures, and these are videos; evosearch works")
            scores = self.judged(engine, samples, [unit for unit, _ in units[: k + 1]], text, last)
            engine.found.reward_calls += count
            chosen, numbers = int(scores.argmax()), []
            for n, (value, sample) in enumerate(zip(scores.tolist(), samples, strict=True)):
                step, forwards, kept = (k + 1) * steps, engine.found.forwards, last or n == chosen
                node = Node(parent=parent, step=step, score=value, forwards=forwards, kept=kept)
                numbers.append(engine.found.add(node, sample))
            picture, parent = samples[chosen], numbers[chosen]
            engine.report(engine.found)

    def _editor(self, policy: DiffusersPolicy) -> DiffusersPolicy:
        """The policy that adds units, loaded once."""
        editor = policy if self.editor is None else _pipeline(self.editor, policy.dtype, policy.device)
        if editor.family.images[1] == 0 or editor.family.takes_mask:
            raise ConfigError(
                f"chain adds to a whole picture, which {type(editor.pipeline).__name__} does not take; "
                "chain.editor names a pipeline that edits, such as FLUX.1-Kontext"
            )
        return editor

    def judged(self, engine: Engine, samples: list[Any], units: list[str], text: str, last: bool) -> Tensor:
        """[N] what candidates are chosen by; of finished ones the reward itself."""

        def scored(text: str) -> Any:
            return score(engine.reward, samples, [text] * len(samples), [dict(engine.metadata) for _ in samples])

        whole = scored(text)
        if last:
            return whole.value
        if self.levels.keys() <= whole.parts.keys():
            return hierarchical({name: whole.parts[name] for name in self.levels}, self.levels)
        subjects = torch.stack([scored(unit).value for unit in units]).mean(0)
        known = {"global": whole.value, "subject": subjects}
        return hierarchical(known, {name: self.levels.get(name, 1.0) for name in known})


@cache
def _pipeline(path: str, dtype: torch.dtype, device: torch.device) -> DiffusersPolicy:
    return DiffusersPolicy.from_pretrained(shipped(path), dtype, device)


@cache
def _language_model(path: str) -> LanguagePolicy:
    policy = LanguagePolicy.from_pretrained(shipped(path), device=best_device())
    policy.chat = policy.tokenizer.chat_template is not None
    return policy
