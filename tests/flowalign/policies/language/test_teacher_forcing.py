"""Texts that the policy did not write, or not all of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import at_tokens, characters, continued, rescored, scored
from rewards import END

PROMPTS = ["17+25=", "4-9=", "80+19=", "3+3="]
SAMPLING: Any = {"max_new_tokens": 5, "temperature": 0.8, "batch_size": 3}


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    return LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")


def test_the_policys_own_texts_come_back_as_it_wrote_them(policy: LanguagePolicy) -> None:
    sampled = policy.sample(PROMPTS, [0, 1, 2, 3], **SAMPLING)
    assert sampled.ended.all()
    again = scored(policy, PROMPTS, policy.decode(sampled), Decoding(0.8), batch_size=3)
    assert torch.equal(again.completion_ids, sampled.completion_ids) and torch.equal(again.mask, sampled.mask)
    torch.testing.assert_close(again.log_prob, sampled.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.entropy, sampled.entropy, atol=1e-4, rtol=0)


def test_other_temperatures_give_other_log_probabilities(policy: LanguagePolicy) -> None:
    sampled = policy.sample(PROMPTS, [0, 1, 2, 3], **SAMPLING)
    hot = rescored(policy, sampled, decoding=Decoding(1.3))
    assert hot.decoding.temperature == 1.3 and sampled.decoding.temperature == 0.8
    assert not torch.allclose(hot.log_prob, sampled.log_prob, atol=1e-3)


def test_texts_go_on_from_their_prefix(policy: LanguagePolicy) -> None:
    plain = policy.sample(PROMPTS, [0, 1, 2, 3], **SAMPLING)
    none = continued(policy, PROMPTS, [[], [], [], []], [0, 1, 2, 3], **SAMPLING)
    assert torch.equal(none.completion_ids, plain.completion_ids)
    torch.testing.assert_close(none.log_prob, plain.log_prob, atol=1e-5, rtol=0)
    prefixes = [policy.tokenizer(text, add_special_tokens=False).input_ids for text in ("4", "", "99", "1")]
    made = continued(policy, PROMPTS, prefixes, [0, 1, 2, 3], **SAMPLING)
    texts = policy.decode(made)
    assert texts[0].startswith("4") and texts[2].startswith("99") and texts[3].startswith("1")
    assert texts[1] == policy.decode(plain)[1]
    # what follows is what the prompt with the prefix would have got
    assert texts[0] == "4" + policy.decode(policy.sample(["17+25=4"], [0], **SAMPLING))[0]
    policy.verify(made)


def test_a_demonstration_that_does_not_fit_is_refused(policy: LanguagePolicy) -> None:
    with pytest.raises(ConfigError, match="context of 32"):
        scored(policy, PROMPTS[:1], ["1" * 40])


def test_steps_end_at_tokens_and_the_last_one_at_the_end_token(policy: LanguagePolicy) -> None:
    rollout = scored(policy, PROMPTS[:3], ["425", "", "1"])
    made = at_tokens(policy, rollout, [[(1, 0.5), (3, 1.0), (END, 2.0)], [(0, 3.0)], [(END, 4.0)]])
    expected = [[0.5, torch.nan, torch.nan, 3.0], [3.0] + [torch.nan] * 3, [torch.nan, 4.0] + [torch.nan] * 2]
    torch.testing.assert_close(made, torch.tensor(expected), equal_nan=True)


def test_characters_of_several_tokens_belong_to_the_last_one() -> None:
    bytes_of = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(sorted(bytes_of))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokens = tokenizer("aé!").input_ids
    assert len(tokens) == 4
    ends = characters(SimpleNamespace(tokenizer=tokenizer), tokens)  # type: ignore[arg-type]
    assert ends[0] == 1 and ends[2:] == [2, 3]
