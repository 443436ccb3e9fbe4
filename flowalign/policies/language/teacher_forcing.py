"""Teacher forcing: rollouts of texts that the policy did not sample, or not whole, with its log-probabilities."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flowalign.policies.language.chat import asked
from flowalign.policies.language.continuous import generate_continuously
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout, right_padded
from rewards.base import Steps

PLAIN = Decoding()


@torch.no_grad()
def rescored(
    policy: LanguagePolicy, rollout: TextRollout, batch_size: int = 64, decoding: Decoding | None = None
) -> TextRollout:
    """The same texts with log-probabilities and entropies of a plain forward pass.

    Args:
        decoding: rule of the log-probabilities; default the rollout's.
    """
    rollout = replace(rollout, decoding=decoding or rollout.decoding)
    rows = torch.arange(len(rollout), device=policy.device).split(batch_size)
    log_prob, entropy = zip(*(policy.log_probs(rollout, chunk) for chunk in rows), strict=True)
    return replace(rollout, log_prob=torch.cat(log_prob), entropy=torch.cat(entropy))


def scored(
    policy: LanguagePolicy,
    prompts: Sequence[str],
    texts: Sequence[str],
    decoding: Decoding = PLAIN,
    batch_size: int = 64,
    metadata: Sequence[Mapping[str, Any]] = (),
) -> TextRollout:
    """Texts as if the policy had sampled them, each with an end token; arguments and errors of `demonstrated`."""
    return rescored(policy, demonstrated(policy, prompts, texts, metadata, decoding), batch_size)


def demonstrated(
    policy: LanguagePolicy,
    prompts: Sequence[str],
    texts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] = (),
    decoding: Decoding = PLAIN,
) -> TextRollout:
    """Texts, each with an end token, their log-probabilities still 0.

    Args:
        metadata: metadata of the prompts, for models that see pictures.

    Raises:
        ConfigError: a prompt and its text do not fit into the model's context.
    """
    rows = [[*policy.tokenizer(t, add_special_tokens=False).input_ids, policy.tokenizer.eos_token_id] for t in texts]
    pictures, prompts = policy.pictures(metadata), asked(prompts, metadata)
    inputs = policy.prompt_inputs(prompts, pictures, max(map(len, rows)))
    ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"].bool()
    ended = torch.ones(len(rows), dtype=torch.bool)
    rollout = _rollout_of(policy, prompts, ids, prompt_mask, rows, ended, decoding)
    return replace(rollout, pictures=pictures)


def continued(
    policy: LanguagePolicy,
    prompts: Sequence[str],
    prefixes: Sequence[list[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    batch_size: int,
    continuous_batching: bool = False,
    metadata: Sequence[Mapping[str, Any]] = (),
    **decoding: Any,
) -> TextRollout:
    """Completions that begin with given token ids and are the policy's from there on; both are in the completion.

    Args:
        max_new_tokens: largest length of the policy's part.
        continuous_batching: as of `LanguagePolicy.sample`.
        metadata: metadata of the prompts, for models that see pictures.
        decoding: fields of `Decoding`.
    """
    rule, prompts = Decoding(**decoding), asked(prompts, metadata)
    rollouts, pictures = [], policy.pictures(metadata)
    if continuous_batching:
        inputs = policy.continued_inputs(prompts, pictures, prefixes, max_new_tokens)
        rollouts = [generate_continuously(policy, prompts, inputs, seeds, max_new_tokens, rule, batch_size)]
    for i in range(0, 0 if continuous_batching else len(prompts), batch_size):
        chunk = slice(i, i + batch_size)
        shown = pictures[chunk]
        inputs = policy.continued_inputs(prompts[chunk], shown, prefixes[chunk], max_new_tokens)
        rollouts.append(policy.generate(prompts[chunk], inputs, seeds[chunk], max_new_tokens, rule, shown))
    sampled = TextRollout.cat(rollouts)
    rows = [
        prefix + row[on].tolist()
        for prefix, row, on in zip(prefixes, sampled.completion_ids, sampled.mask, strict=True)
    ]
    inputs = policy.prompt_inputs(prompts, pictures, max(map(len, rows)))
    ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"].bool()
    rollout = _rollout_of(policy, prompts, ids, prompt_mask, rows, sampled.ended, rule)
    return rescored(policy, replace(rollout, pictures=pictures), batch_size)


def _rollout_of(
    policy: LanguagePolicy,
    prompts: Sequence[str],
    ids: Tensor,
    prompt_mask: Tensor,
    rows: Sequence[list[int]],
    ended: Tensor,
    decoding: Decoding,
) -> TextRollout:
    """A rollout of completions of these token ids, its log-probabilities still 0."""
    padding = policy.tokenizer.pad_token_id
    completion = right_padded(rows, padding, policy.device)
    mask = right_padded([[True] * len(row) for row in rows], False, policy.device)
    nothing = torch.zeros(mask.shape, device=policy.device)
    ended = ended.to(policy.device)
    return TextRollout(
        prompts=list(prompts),
        prompt_ids=ids,
        prompt_mask=prompt_mask,
        completion_ids=completion,
        mask=mask,
        log_prob=nothing,
        entropy=nothing,
        ended=ended,
        decoding=decoding,
        padding=padding,
    )


def at_tokens(policy: LanguagePolicy, rollout: TextRollout, steps: Sequence[Steps]) -> Tensor:
    """[B, T] rewards of steps at the tokens that they end with, NaN elsewhere; several at one token add up.

    They are sampled tokens. A step that ends with the text, or with a turn, ends with its end token if it has one.
    """
    rewards = torch.full(rollout.mask.shape, torch.nan)
    for row, row_steps in enumerate(steps):
        ends = characters(policy, rollout.completion_ids[row][rollout.present[row]].tolist())
        positions = rollout.mask[row].nonzero()[:, 0].tolist()
        reached = [ends[position] for position in positions]
        for end, value in row_steps:
            first = min(bisect_left(reached, end), len(reached) - 1)
            position = positions[bisect_right(reached, reached[first]) - 1]
            rewards[row, position] = rewards[row, position].nan_to_num() + value
    return rewards.to(policy.device)


def characters(policy: LanguagePolicy, tokens: Sequence[int]) -> list[int]:
    """Number of characters of the decoded text up to each token's end."""
    decode = policy.tokenizer.decode
    alone = list(accumulate(len(decode([token], skip_special_tokens=True)) for token in tokens))
    if alone[-1] == len(decode(tokens, skip_special_tokens=True)):
        return alone
    # tokens that are parts of characters, or change each other's white space
    return [len(decode(tokens[: t + 1], skip_special_tokens=True)) for t in range(len(tokens))]
