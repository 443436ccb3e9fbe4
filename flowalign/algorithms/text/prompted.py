"""Prompts with more in them than the policy is to have: hints for rollouts, and what a teacher is shown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.teacher_forcing import rescored

FIELD = re.compile(r"\{(\w+)\}")


def fields_of(template: str) -> set[str]:
    """Names in braces, besides {prompt}."""
    return set(FIELD.findall(template)) - {"prompt"}


def filled(template: str, prompt: str, record: Mapping[str, Any]) -> str:
    """A template with the prompt and the record's values in the places of their names."""
    return FIELD.sub(lambda name: prompt if name[1] == "prompt" else str(record[name[1]]), template)


def check_fields(template: str, prompts: Prompts, given: Sequence[str] = ()) -> None:
    """Refuse a template without {prompt}, and prompts without what it names.

    Args:
        given: names that are filled in during the run.

    Raises:
        ConfigError: names what is missing.
    """
    if "{prompt}" not in template:
        raise ConfigError("algorithm.template: it has no {prompt}")
    for text, record in zip(prompts.texts, prompts.metadata, strict=True):
        if missing := sorted(fields_of(template) - set(given) - record.keys()):
            raise ConfigError(f"algorithm.template: no '{missing[0]}' with the prompt {text[:60]!r}")


def under(
    policy: LanguagePolicy,
    rollout: TextRollout,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    batch_size: int,
) -> TextRollout:
    """The same completions after other prompts, with log-probabilities of a plain forward pass."""
    pictures = policy.pictures(metadata)
    inputs = policy.prompt_inputs(prompts, pictures, rollout.mask.shape[1])
    moved = replace(
        rollout,
        prompts=list(prompts),
        prompt_ids=inputs["input_ids"],
        prompt_mask=inputs["attention_mask"].bool(),
        pictures=pictures,
    )
    return rescored(policy, moved, batch_size)
