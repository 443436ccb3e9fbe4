"""Whole chats as rollouts: the model's turns are its completion, what others say in between is given."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout, right_padded

Message = Mapping[str, Any]


def conversed(policy: LanguagePolicy, chats: Sequence[Sequence[Message]]) -> TextRollout:
    """Chats as if the policy had taken every turn of the assistant, their log-probabilities still 0.

    Args:
        chats: B lists of messages, each ending with an assistant's turn.

    Raises:
        ConfigError: a chat does not fit into the model's context.
    """
    rows = [_row(policy, messages) for messages in chats]
    longest = [len(begun) + len(tokens) for begun, tokens, _ in rows]
    names = [str(messages[0].get("content")) for messages in chats]
    policy.check_room(longest, names, 0)
    padding, device = policy.tokenizer.pad_token_id, policy.device
    ids, prompt_mask = policy.padded([begun for begun, _, _ in rows], names, 0)
    mask = right_padded([drawn for _, _, drawn in rows], False, device)
    nothing = torch.zeros(mask.shape, device=device)
    return TextRollout(
        prompts=names,
        prompt_ids=ids,
        prompt_mask=prompt_mask,
        completion_ids=right_padded([tokens for _, tokens, _ in rows], padding, device),
        mask=mask,
        log_prob=nothing,
        entropy=nothing,
        ended=torch.ones(len(rows), dtype=torch.bool, device=device),
        decoding=Decoding(),
        padding=padding,
        turn=right_padded([[0] * len(tokens) for _, tokens, _ in rows], -1, device),
        # tokens between turns are there without having been drawn, as in episodes
        episodes=[[] for _ in rows],
    )


def _row(policy: LanguagePolicy, messages: Sequence[Message]) -> tuple[list[int], list[int], list[bool]]:
    """Token ids of the prompt, those after it, and which of these are the assistant's."""
    template, begun, tokens, drawn = policy.chat_template, None, [], []

    def add(text: str, learned: bool) -> None:
        ids = list(policy.tokenizer(text, add_special_tokens=False).input_ids)
        tokens.extend(ids)
        drawn.extend([learned] * len(ids))

    for own, turn in groupby(messages, lambda message: message["role"] == "assistant"):
        said = list(turn)
        if begun is None:
            if own:
                raise ConfigError("a chat begins with the assistant's turn; a user's comes first")
            begun = policy.tokenizer(template.prompt(said), add_special_tokens=False).input_ids
        elif own:
            add("".join(template.said(message) for message in said) + template.end(), True)
        else:
            add(template.between(said), False)
    assert begun is not None
    return list(begun), tokens, drawn
