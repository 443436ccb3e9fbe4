"""Turns with an environment: one sequence, in which only what the model said was sampled."""

import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.data import ASSETS
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.environments import Answer, Environment, HigherLower
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import at_tokens
from flowalign.policies.language.turns import AgentPolicy
from rewards import RewardError, score
from rewards.text.steps import InformationGain
from rewards.text.turns import EnvironmentReward, Transcript

DIGITS = [{"answer": str(i % 10)} for i in range(16)]
PROMPTS = ["=", "0+9=", "9=", "+"] * 4


class Echo:
    """Repeats what was said after a plus, pays the turn's number, and never ends."""

    def reset(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        self.turn = 0
        return prompt + metadata.get("more", "")

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turn += 1
        return "+" + completion, float(self.turn), False


class Failing(Echo):
    """Fails at the second turn."""

    def step(self, completion: str) -> tuple[str, float, bool]:
        if self.turn == 1:
            raise ValueError("lost\nthe board")
        return super().step(completion)


class Silent(Echo):
    """Says nothing."""

    def step(self, completion: str) -> tuple[str, float, bool]:
        return "", 0.5, False


def policy(environment: Any = HigherLower, turns: int = 4, end: float = 0.0, **settings: Any) -> AgentPolicy:
    """Of the shipped language model.

    Args:
        end: how much likelier than the model says it is to end at every token.
    """
    made = AgentPolicy.from_pretrained(ASSETS / "tiny_lm", environment=environment, turns=turns, **settings)
    bias = torch.zeros(made.network.config.vocab_size)
    bias[made.ends] = end
    made.network.lm_head.bias = torch.nn.Parameter(bias)
    return made


def played(own: AgentPolicy, seeds: range = range(16), **settings: Any) -> TextRollout:
    return own.sample(PROMPTS, list(seeds), metadata=DIGITS, **{"max_new_tokens": 2, "batch_size": 5} | settings)


def row_alone(own: AgentPolicy, rollout: TextRollout, row: int) -> tuple[list[int], Tensor]:
    """Token ids of one row without padding, and log-probabilities of those after the first by a plain forward pass."""
    ids = torch.cat(
        [rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.completion_ids[row][rollout.present[row]]]
    )
    with torch.no_grad():
        log_probs = (own.network(ids[None]).logits[0] / rollout.decoding.temperature).log_softmax(-1)
    return ids.tolist(), log_probs[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_what_was_recorded_is_what_a_plain_forward_pass_says(padding: str) -> None:
    own = policy(padding=padding)
    rollout = played(own, temperature=0.7)
    again, entropy = own.log_probs(rollout, torch.arange(16))
    torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, rollout.entropy, atol=1e-5, rtol=0)
    assert own.verify(rollout) < 1e-5
    lengths = set()
    for row in range(16):
        _, plain = row_alone(own, rollout, row)
        prompt = int(rollout.prompt_mask[row].sum())
        drawn = rollout.mask[row][rollout.present[row]]
        recorded = rollout.log_prob[row][rollout.mask[row]]
        torch.testing.assert_close(plain[prompt - 1 :][drawn], recorded, atol=1e-5, rtol=0)
        assert not rollout.log_prob[row][~rollout.mask[row]].any()
        lengths.add(len(rollout.episodes[row]))
    assert len(lengths) > 1, "some games are won before others"


def test_continuous_batching_plays_the_same_games() -> None:
    own = policy()
    waiting, refilled = played(own), played(own, continuous_batching=True)
    for name in ("completion_ids", "mask", "present", "turn", "ended"):
        assert torch.equal(getattr(refilled, name), getattr(waiting, name)), name
    torch.testing.assert_close(refilled.log_prob, waiting.log_prob, atol=1e-5, rtol=0)


def test_answers_stand_between_turns_and_were_not_sampled() -> None:
    own = policy()
    rollout = played(own)
    texts = own.decode(rollout)
    assert rollout.ended.any() and not rollout.ended.all()
    for row, (text, taken) in enumerate(zip(texts, rollout.episodes, strict=True)):
        assert isinstance(text, Transcript) and len(text.turns) == len(taken)
        game = HigherLower()
        game.reset(PROMPTS[row], DIGITS[row])
        state, rebuilt = PROMPTS[row], ""
        ids, _ = row_alone(own, rollout, row)
        assert text.tokens == ids
        for number, turn in enumerate(text.turns):
            said = text[turn.begin : turn.end]
            answer = game.step(said)
            assert turn.state == state and turn.reward == answer.reward
            state = answer.state or answer.observation
            rebuilt += said + (answer.observation if not answer.done else "")
            here = rollout.turn[row] == number
            drawn = rollout.completion_ids[row][here & rollout.mask[row]]
            assert own.tokenizer.decode(drawn, skip_special_tokens=True) == said
            answered = rollout.completion_ids[row][here & ~rollout.mask[row]].tolist()
            # a turn that was cut gets its end token from the answer
            cut = [] if int(drawn[-1]) in own.ends else own.ends
            expected = (
                [] if answer.done else cut + own.tokenizer(answer.observation, add_special_tokens=False).input_ids
            )
            assert answered == expected
            assert ids[: turn.context] == [*own.begin(PROMPTS[row]), *_before(rollout, row, number)]
        assert rebuilt == text
        assert rollout.ended[row] == answer.done


def _before(rollout: TextRollout, row: int, turn: int) -> list[int]:
    own = rollout.turn[row]
    return rollout.completion_ids[row][(own >= 0) & (own < turn)].tolist()


def test_an_episode_depends_on_its_prompt_and_seed_alone_and_begins_as_a_text_does() -> None:
    own = policy()
    together = own.decode(played(own))
    alone = [own.decode(own.sample([p], [i], metadata=[DIGITS[i]], max_new_tokens=2))[0] for i, p in enumerate(PROMPTS)]
    assert together == alone
    once = super(AgentPolicy, own).sample(PROMPTS, list(range(16)), max_new_tokens=2)
    for row in range(16):
        first = together[row].turns[0].end
        drawn = once.completion_ids[row][once.mask[row]]
        assert own.tokenizer.decode(drawn, skip_special_tokens=True) == together[row][:first]


def test_some_rows_and_joined_rollouts_keep_their_turns() -> None:
    own = policy()
    rollout = played(own)
    halves = [rollout[torch.arange(8)], rollout[torch.arange(8, 16)]]
    joined = TextRollout.cat(halves).to("cpu")
    assert own.decode(joined) == own.decode(rollout)
    assert joined.episodes == rollout.episodes and torch.equal(joined.turn, rollout.turn)


def test_an_environment_that_never_ends_is_left_after_the_turns() -> None:
    own = policy(Echo, turns=3)
    rollout = played(own)
    assert not rollout.ended.any()
    assert all([taken.reward for taken in turns] == [1.0, 2.0, 3.0] for turns in rollout.episodes)
    # what is answered to the last turn is in the text, though nobody reads it
    assert all(len(text.turns) == 3 for text in own.decode(rollout))


def test_an_episode_ends_where_a_further_turn_does_not_fit() -> None:
    own = policy(Echo, turns=50)
    rollout = own.sample(["=", "1+2+3+4+5+6="], [0, 1], max_new_tokens=3, metadata=[{}, {}])
    assert not rollout.ended.any()
    for row in range(2):
        length = int(rollout.prompt_mask[row].sum() + rollout.present[row].sum())
        assert length + 3 > 32, "the context of the tiny model"
    assert len(rollout.episodes[0]) > len(rollout.episodes[1])
    assert own.verify(rollout) < 1e-5
    with pytest.raises(ConfigError, match=r"32 tokens and max_new_tokens=3 do not fit .* '='"):
        own.sample(["="], [0], max_new_tokens=3, metadata=[{"more": "1" * 30}])


def test_an_environment_that_fails_is_one_line_with_its_place() -> None:
    with pytest.raises(FlowalignError) as caught:
        played(policy(Failing))
    message = str(caught.value)
    assert message.startswith("environment 'Failing' failed: ValueError: lost the board (")
    assert "test_turns.py, line " in message and message.endswith("; prompt: '='") and "\n" not in message


def test_an_empty_turn_is_its_end_token() -> None:
    own = policy(Silent, turns=2, end=50.0)
    rollout = played(own)
    assert own.decode(rollout) == [""] * 16
    assert rollout.mask.sum(1).tolist() == [2] * 16 and rollout.turn[0].tolist() == [0, 1]


def test_what_the_environment_pays_lies_at_the_end_of_the_turns() -> None:
    own = policy(Echo, turns=3)
    rollout = played(own)
    scores = score(EnvironmentReward(), own.decode(rollout), PROMPTS, DIGITS)  # type: ignore[arg-type]
    assert scores.value.tolist() == [6.0] * 16 and scores.parts["turns"].tolist() == [3.0] * 16
    assert scores.steps is not None
    placed = at_tokens(own, rollout, scores.steps)
    for row in range(16):
        for number in range(3):
            last = (rollout.mask[row] & (rollout.turn[row] == number)).nonzero()[-1, 0]
            assert placed[row, last] == number + 1
        assert (~placed[row].isnan()).sum() == 3
    with pytest.raises(RewardError, match="the configuration's `environment` names one"):
        score(EnvironmentReward(), ["plain"], ["="], [{}])  # type: ignore[list-item]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_turn_earns_what_it_and_its_answer_add_to_the_right_answers_probability(frozen: bool) -> None:
    own = policy(partial(HigherLower, higher="+", lower="-"))
    rollout = played(own)
    texts = own.decode(rollout)
    reward = InformationGain(EnvironmentReward(), model=str(ASSETS / "tiny_lm") if frozen else None, lead="")
    own.bind(reward)
    scores = score(reward, texts, PROMPTS, DIGITS)  # type: ignore[arg-type]
    assert scores.steps is not None
    for row, text in enumerate(texts):
        assert isinstance(text, Transcript)
        right = own.tokenizer(DIGITS[row]["answer"], add_special_tokens=False).input_ids
        chances = []
        for number, turn in enumerate(text.turns):
            before = own.begin(PROMPTS[row])
            # a frozen model has tokens of its own, and reads the text
            before += reward.model.tokens(text[: turn.begin]) if frozen else _before(rollout, row, number)
            with torch.no_grad():
                logits = own.network(torch.tensor([before + right])).logits[0].log_softmax(-1)
            chances.append(sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(right)) / len(right))
        likely = torch.tensor(chances).exp()
        expected = [*(likely[1:] - likely[:-1]).tolist(), text.turns[-1].reward]
        assert [value for _, value in scores.steps[row]] == pytest.approx(expected, abs=1e-5)
        assert [end for end, _ in scores.steps[row]] == [turn.end for turn in text.turns]


def test_a_chat_gets_an_answer_as_a_users_turn() -> None:
    own = policy(Echo, turns=2, chat=False)
    turn = "{% for m in messages %}{{ '+' if m['role'] == 'user' else '-' }}{{ m['content'] }}</s>{% endfor %}"
    own.tokenizer.chat_template = turn + "{% if add_generation_prompt %}-{% endif %}"
    own.chat = True
    rollout = own.sample(["7"], [3], max_new_tokens=3)
    (text,) = own.decode(rollout)
    assert isinstance(text, Transcript)
    said = [text[t.begin : t.end] for t in text.turns]
    ids, _ = row_alone(own, rollout, 0)
    talk = [{"role": "user", "content": "7"}]
    for own_part in said:
        talk += [{"role": "assistant", "content": own_part}, {"role": "user", "content": "+" + own_part}]
    assert own.tokenizer.decode(ids) == own.tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    # a model may end texts by tokens that its chats do not use
    own = policy(Echo, turns=2)
    own.tokenizer.chat_template, own.chat = turn + "{% if add_generation_prompt %}-{% endif %}", True
    own.network.generation_config.eos_token_id = [0, 2]
    assert own.decode(own.sample(["7"], [3], max_new_tokens=3)) == [text]
    own.tokenizer.chat_template = "{{ messages | length }}</s>"
    with pytest.raises(ConfigError, match="this chat template leaves out earlier turns"):
        own.sample(["7"], [3], max_new_tokens=3)


def test_a_plain_tuple_answers_and_its_observation_is_the_state() -> None:
    first: Environment = Echo()
    first.reset("=", {})
    assert Answer(*first.step("5")) == ("+5", 1.0, False, None, None)
    own = policy(Echo, turns=2)
    rollout = played(own)
    for row, text in enumerate(own.decode(rollout)):
        assert isinstance(text, Transcript)
        assert [taken.state for taken in rollout.episodes[row]] == [PROMPTS[row], "+" + text[: text.turns[0].end]]


def test_an_episode_goes_to_another_process_whole() -> None:
    (text, *_) = policy().decode(played(policy()))
    assert isinstance(text, Transcript)
    there = pickle.loads(pickle.dumps(text))
    assert there == text and there.turns == text.turns and there.tokens == text.tokens
