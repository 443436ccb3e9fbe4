"""Score cards: the protocol by which figures were measured. Figures of other protocols do not stand side by side.

A card is JSON: `prompts` and `samples` (numbers), `prompts_sha256` (over prompts and metadata, in order), `seeds` (the
first and the last), `sampling` (steps, guidance, size ...), `rewards` (names, settings, weights), `versions` (of the
code), and `sha256` over all of these.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.errors import ConfigError
from flowalign.runs.environment import flat, installed
from flowalign.runs.foreign import read_text

VERSIONS = ("flowalign", "torch", "diffusers", "transformers")
SAMPLING = ("sampling", "versions")
"""Keys of how samples are made; the others say of what, and who judges them."""
Card = dict[str, Any]


def score_card(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    sampling: Mapping[str, Any],
    rewards: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str] | None = None,
) -> Card:
    """The card of N samples.

    Args:
        prompts, metadata, seeds: of each sample.
        sampling: settings of the sampler; `batch_size`, which changes rounding alone, and empty ones are left out.
        rewards: names, settings and weights of the rewards, or of a suite.
        versions: versions of packages; default those that are installed.
    """
    card = {
        "prompts": len(set(prompts)),
        "samples": len(prompts),
        "prompts_sha256": _sha256([list(prompts), list(metadata)]),
        "seeds": [seeds[0], seeds[-1]],
        "sampling": {key: v for key, v in sampling.items() if key != "batch_size" and v not in (None, "")},
        "rewards": [dict(reward) for reward in rewards],
        "versions": dict(versions or installed(VERSIONS)),
    }
    return card | {"sha256": _sha256(card)}


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_card(card: object, source: Path) -> Card:
    """A card that was read from a file.

    Raises:
        ConfigError: it is none, or was changed.
    """
    if not isinstance(card, dict) or card.get("sha256") != _sha256({k: v for k, v in card.items() if k != "sha256"}):
        raise ConfigError(f"{source} has no score card as flowalign writes it; measure again")
    return card


def read_card(path: Path) -> Card:
    """Read the file of a card.

    Raises:
        ConfigError: it is none, or was changed.
    """
    try:
        return check_card(json.loads(read_text(path)), path)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} has no score card as flowalign writes it; measure again") from error


def differing(one: Mapping[str, Any], two: Mapping[str, Any], apart_from: Collection[str] = ()) -> dict[str, str]:
    """The keys in which two cards differ, such as 'sampling.guidance', each with both values in words."""
    left, right = ({k: v for k, v in card.items() if k not in (*apart_from, "sha256")} for card in (one, two))
    first, second = flat(left | {"rewards": _named(left)}), flat(right | {"rewards": _named(right)})
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    return {key: f"{_short(key, first.get(key))} against {_short(key, second.get(key))}" for key in keys}


def _short(key: str, value: object) -> str:
    return str(value)[:12] if key.endswith("sha256") else str(value)


def _named(card: Mapping[str, Any]) -> str:
    """The rewards of a card in words: 'clip_score, shapes (weight 0.5)'."""
    words = []
    for reward in card.get("rewards", ()):
        settings = [f"{key} {v}" for key, v in reward.items() if key != "name" and (key, v) != ("weight", 1.0)]
        words.append(reward["name"] + (f" ({', '.join(settings)})" if settings else ""))
    return ", ".join(words)


def check_same_protocol(cards: Mapping[str, Mapping[str, Any]], mend: str, apart_from: Collection[str] = ()) -> None:
    """Refuse to set figures of different protocols side by side.

    Args:
        cards: cards by the label of what was measured.
        mend: end of the message: what would work.
        apart_from: keys of the cards that may differ, such as `SAMPLING`.

    Raises:
        ConfigError: names the first that differs, the keys in which it does, and what would work.
    """
    (first, card), *others = cards.items()
    for other, another in others:
        if differences := differing(card, another, apart_from):
            shown = "; ".join(f"{key} {values}" for key, values in differences.items())
            raise ConfigError(f"{first} and {other} were measured by different protocols ({shown}); {mend}")
