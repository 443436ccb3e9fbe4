"""Which rewards have gradients, and the refusal of those that have none."""

from collections.abc import Iterator, Sequence

from flowalign import registry
from flowalign.config import Named
from flowalign.errors import ConfigError
from rewards import Reward, Spec, spec_of


def check_named(rewards: Sequence[Named]) -> None:
    """Refuse what a configuration trains on where it, or a reward within it, has no gradient; nothing is loaded.

    Raises:
        ConfigError: names the reward, and those that work.
    """
    for named in rewards:
        if named.name.startswith(registry.GIVEN):
            continue
        for kind in registry.rewards_within(named.name, named.settings):
            if not _has_gradient(kind):
                known = getattr(kind, "name", None)
                raise _refused(known if isinstance(known, str) else named.name)


def check_made(reward: Reward) -> None:
    """See `check_named`; for a made reward, perhaps handed over in Python."""
    of_latents = {}
    for one in _within(reward):
        of_latents[one.name] = "latents" in spec_of(one).needs
        if not (
            hasattr(one, "score_latents" if of_latents[one.name] else "score_pixels") and spec_of(one).differentiable
        ):
            raise _refused(one.name)
    if len(set(of_latents.values())) > 1:
        raise ConfigError(
            f"rewards: of {', '.join(of_latents)} some score latents and others pixels, which have no one gradient; "
            "all of one kind work"
        )


def _within(reward: Reward) -> Iterator[Reward]:
    """The rewards that a composition is made of, or itself."""
    rewards = getattr(reward, "rewards", None)
    if rewards is None:
        yield reward
    for inner in rewards or []:
        yield from _within(inner)


def _has_gradient(kind: type[Reward]) -> bool:
    """Whether a class of rewards may have gradients: where `spec` is a property, it depends on parts or settings."""
    spec = getattr(kind, "spec", Spec())
    scores = hasattr(kind, "score_pixels") or hasattr(kind, "score_latents")
    return scores and (isinstance(spec, property) or spec.differentiable)


def _refused(name: str) -> ConfigError:
    working = []
    for other in registry.names("rewards"):
        try:
            kind = registry.resolve("rewards", other)
        except ConfigError:  # of an extra that is not installed
            continue
        if _has_gradient(kind) and not isinstance(kind.spec, property):
            working.append(other)
    return ConfigError(
        f"rewards: '{name}' has no gradient to learn by; {', '.join(working)}, a vlm_judge that is a local model and "
        "gives probabilities, and sums of them work "
        "(docs/rewards.md says how one of your own has: `score_pixels`)"
    )
