"""From logits to the distribution that tokens are drawn from, against the processors of transformers."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flowalign.policies.language.decoding import Decoding, entropy_of

RULES = [
    Decoding(0.7),
    Decoding(top_p=0.6),
    Decoding(0.8, top_k=3),
    Decoding(min_p=0.2),
    Decoding(repetition_penalty=1.4),
    Decoding(1.3, top_p=0.9, top_k=8, min_p=0.05, repetition_penalty=1.2),
]


def theirs(rule: Decoding) -> LogitsProcessorList:
    made = [RepetitionPenaltyLogitsProcessor(rule.repetition_penalty), TemperatureLogitsWarper(rule.temperature)]
    made += [TopKLogitsWarper(rule.top_k)] if rule.top_k else []
    made += [TopPLogitsWarper(rule.top_p)] if rule.top_p < 1 else []
    return LogitsProcessorList(made + ([MinPLogitsWarper(rule.min_p)] if rule.min_p else []))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_is_that_of_transformers(rule: Decoding) -> None:
    logits, before = 3 * torch.randn(200, 14), torch.randint(14, (200, 5))
    expected = theirs(rule)(before, logits.clone()).log_softmax(-1)
    made = rule.log_probs(logits, before)
    torch.testing.assert_close(made, expected)
    assert entropy_of(made).isfinite().all()
    # what was drawn under other weights has a probability all the same
    drawn = torch.randint(14, (200,))
    kept = rule.log_probs(logits, before, drawn)
    assert kept.gather(1, drawn[:, None]).isfinite().all()
    rows = expected.gather(1, drawn[:, None])[:, 0].isfinite()
    torch.testing.assert_close(kept[rows], expected[rows])


def test_padding_repeats_nothing_and_some_tokens_are_never_drawn() -> None:
    logits = torch.randn(4, 6)
    rule = Decoding(repetition_penalty=2.0)
    nothing = torch.full((4, 3), -1)
    torch.testing.assert_close(rule.log_probs(logits, nothing), logits.log_softmax(-1))
    made = rule.log_probs(logits, nothing, undrawn=[2, 5])
    assert made[:, [2, 5]].eq(-torch.inf).all()
    torch.testing.assert_close(made.exp().sum(1), torch.ones(4))
