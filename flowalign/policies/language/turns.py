"""A language policy that takes turns with an environment."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.environments import Answer, Environment
from flowalign.policies.language.chat import chat
from flowalign.policies.language.continuous import generate_continuously
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout, TurnTaken, right_padded
from flowalign.policies.language.teacher_forcing import characters
from flowalign.runs.progress import report
from rewards.base import one_line
from rewards.text.turns import Transcript, Turn
from samplers import derive_seed


@dataclass(kw_only=True)
class Episode:
    """An episode under way: its tokens so far, and what a rollout keeps of each."""

    environment: Environment
    prompt: str
    seed: int
    begun: list[int]
    """Token ids of the prompt."""
    state: str
    tokens: list[int] = field(default_factory=list)
    """Token ids after the prompt."""
    turn: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    taken: list[TurnTaken] = field(default_factory=list)
    done: bool = False

    def add(self, tokens: Sequence[int], log_prob: Sequence[float] = (), entropy: Sequence[float] = ()) -> None:
        """Tokens of the turn that is being taken; without log-probabilities they are the environment's."""
        unknown = [0.0] * len(tokens)
        self.tokens += tokens
        self.turn += [len(self.taken)] * len(tokens)
        self.drawn += [bool(log_prob)] * len(tokens)
        self.log_prob += log_prob or unknown
        self.entropy += entropy or unknown


class AgentPolicy(LanguagePolicy):
    """A causal language model whose texts are episodes: its turns and the environment's answers in one sequence.

    The environment's tokens are read, never learned from. A chat model gets an answer as a user's turn.

    Args:
        environment: makes one, for an episode.
        turns: after which an episode is over; it is over as well where a further turn would not fit into the context.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        *,
        environment: Callable[[], Environment],
        turns: int,
        **settings: Any,
    ) -> None:
        super().__init__(network, tokenizer, device, **settings)
        self.environment, self.turns = environment, turns

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the environment's functions, where it has some."""
        tools: Sequence[Mapping[str, Any]] = getattr(self.environment(), "tools", [])
        if tools and not self.chat:
            raise ConfigError("environment: functions are called by a chat template; model.chat=true works")
        return tools

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        batch_size: int = 64,
        continuous_batching: bool = False,
        metadata: Sequence[Mapping[str, Any]] = (),
        **decoding: Any,
    ) -> TextRollout:
        """Play an episode of every prompt, all episodes turn by turn.

        Args:
            max_new_tokens: largest length of a turn.
            continuous_batching: a turn that ends gives its row to the next episode's.
            metadata: metadata of the prompts, for the environment.
            decoding: fields of `Decoding`.

        Raises:
            FlowalignError: an environment failed; says where.
            ConfigError: a prompt and a first turn are longer than the context.
        """
        rule = Decoding(**decoding)
        records = metadata or [{} for _ in prompts]
        episodes = [self._begin(*each) for each in zip(prompts, records, seeds, strict=True)]
        self.check_room([len(each.begun) for each in episodes], prompts, max_new_tokens)
        for turn in range(self.turns):
            report(turn, self.turns)
            playing = [each for each in episodes if not each.done and self._fits(each, max_new_tokens)]
            at_once = len(playing) if continuous_batching else batch_size
            for i in range(0, len(playing), at_once):
                self._take_turns(playing[i : i + at_once], max_new_tokens, rule, batch_size, continuous_batching)
        return self._rollout(episodes, rule)

    def _begin(self, prompt: str, record: Mapping[str, Any], seed: int) -> Episode:
        environment = self.environment()
        with _named(environment, prompt):
            first = environment.reset(prompt, record)
        begun = self.begin(chat(first, record) if first == prompt else first)
        return Episode(environment=environment, prompt=prompt, seed=seed, begun=begun, state=first)

    def _fits(self, episode: Episode, room: int) -> bool:
        context = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        return context is None or len(episode.begun) + len(episode.tokens) + room <= context

    def _take_turns(
        self, episodes: Sequence[Episode], length: int, decoding: Decoding, size: int, continuous: bool
    ) -> None:
        """Sample a turn of each, and have it answered."""
        prompts = [each.prompt for each in episodes]
        ids, mask = self.padded([each.begun + each.tokens for each in episodes], prompts, length)
        # the first turn is what a text without an environment would be
        seeds = [derive_seed(each.seed, len(each.taken)) if each.taken else each.seed for each in episodes]
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if continuous:
            rollout = generate_continuously(self, prompts, inputs, seeds, length, decoding, size)
        else:
            rollout = self.generate(prompts, inputs, seeds, length, decoding, [])
        columns = (rollout.completion_ids, rollout.log_prob, rollout.entropy)
        for row, each in enumerate(episodes):
            drawn = rollout.mask[row]
            each.add(*(values[row][drawn].tolist() for values in columns))
            said = self.tokenizer.decode(rollout.completion_ids[row][drawn], skip_special_tokens=True)
            with _named(each.environment, each.prompt):
                answer = Answer(*each.environment.step(said))
            if not answer.done:
                each.add(([] if rollout.ended[row] else [self._end]) + self._answered(answer))
            each.taken.append(TurnTaken(float(answer.reward), each.state))
            each.done = answer.done
            each.state = answer.observation if answer.state is None else answer.state

    def _answered(self, answer: Answer) -> list[int]:
        """Token ids of an environment's answer, up to where the model's turn begins."""
        text = answer.observation
        if self.chat:
            text = self.chat_template.between(answer.messages or [{"role": "user", "content": text}])
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def _end(self) -> int:
        """The token that ends a turn; of a chat, the one that its template puts there."""
        if not self.chat:
            return self.ends[0]
        end = self.chat_template.end()
        return next(token for token in self.ends if self.tokenizer.decode([token]) == end)

    def _rollout(self, episodes: Sequence[Episode], decoding: Decoding) -> TextRollout:
        ids, prompt_mask = self.padded([each.begun for each in episodes], [each.prompt for each in episodes], 0)

        def rows(name: str, padding: object) -> Tensor:
            return right_padded([getattr(each, name) for each in episodes], padding, self.device)

        return TextRollout(
            prompts=[each.prompt for each in episodes],
            prompt_ids=ids,
            prompt_mask=prompt_mask,
            completion_ids=rows("tokens", self.tokenizer.pad_token_id),
            mask=rows("drawn", False),
            log_prob=rows("log_prob", 0.0),
            entropy=rows("entropy", 0.0),
            ended=torch.tensor([each.done for each in episodes], device=self.device),
            decoding=decoding,
            padding=self.tokenizer.pad_token_id,
            turn=rows("turn", -1),
            episodes=[each.taken for each in episodes],
        )

    def decode(self, rollout: TextRollout, batch_size: int = 64) -> list[str]:
        """The episodes as texts, each a `Transcript`."""
        return [self._transcript(rollout, row) for row in range(len(rollout))]

    def _transcript(self, rollout: TextRollout, row: int) -> Transcript:
        begun = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        tokens = rollout.completion_ids[row][rollout.present[row]].tolist()
        ends = [0, *characters(self, tokens)]
        turns = []
        for number, taken in enumerate(rollout.episodes[row]):
            positions = (rollout.mask[row] & (rollout.turn[row] == number)).nonzero()[:, 0].tolist()
            first, last = positions[0], positions[-1]
            begin, end, context = ends[first], ends[last + 1], len(begun) + first
            turns.append(Turn(begin=begin, end=end, context=context, reward=taken.reward, state=taken.state))
        return Transcript(self.tokenizer.decode(tokens, skip_special_tokens=True), turns, begun + tokens)


@contextlib.contextmanager
def _named(environment: Environment, prompt: str) -> Iterator[None]:
    """Makes an environment's errors one line for people."""
    try:
        yield
    except FlowalignError:
        raise
    except Exception as error:
        name = type(environment).__name__
        raise FlowalignError(f"environment '{name}' failed: {one_line(error)}; prompt: {prompt!r}") from error
