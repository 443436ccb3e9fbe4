"""What a method, a loss or an advantage of somebody's own gives, checked where it enters: shapes and names.

Tensors of a wrong shape broadcast, and a run then learns something else in silence. Only shapes are compared, which
costs nothing and waits for no device.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flowalign.errors import ConfigError, FlowalignError

OURS = ("flowalign", "rewards", "samplers")
MEANT = {"advantage": "credit", "rewards": "step_reward", "scorer": "score", "sample": "rollout"}
"""Names that people give to a method which is called otherwise."""
HOOKS = {"rollout", "score", "step_reward", "credit", "loss", "losses", "items", "windows", "finished"}
"""Methods that people write."""


class MissingMethod(FlowalignError):
    """A method that is called, and that a class of somebody's own does not have."""

    def __init__(self, owner: object, name: str) -> None:
        super().__init__(
            f"algorithm: {type(owner).__name__} has no '{name}', which every run calls (docs/extending.md)"
        )


def check_shape(source: str, value: object, *shapes: Iterable[int]) -> None:
    """Refuse what is no tensor of one of these shapes.

    Raises:
        FlowalignError: it names `source`, the shape that came and those that work.
    """
    wanted = [list(shape) for shape in dict.fromkeys(map(tuple, shapes))]
    if not isinstance(value, Tensor) or list(value.shape) not in wanted:
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        works = " or ".join(map(str, wanted))
        raise FlowalignError(f"{source} gave {got}, and one of shape {works} is wanted")


def checked_loss(source: str, answer: object, *shapes: Iterable[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses and the named values for the metrics, as they came.

    Raises:
        FlowalignError: the answer is no such pair, the losses have another shape, or a value is one number for all.
    """
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        raise FlowalignError(f"{source} gave a {type(answer).__name__}, and (losses, values by name) is wanted")
    loss, values = answer
    check_shape(source, loss, *shapes)
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise FlowalignError(f"{source}: its value '{name}' is one number, and a tensor like the losses is wanted")
    return loss, values


def check_kernel(source: str, kernel: Callable[..., Any]) -> None:
    """Refuse a kernel that does not give the mean and the standard deviation of each sample's step.

    Raises:
        ConfigError: it names `source`, and what came in the place of the two.
    """
    x, level = torch.ones(2, 3, 4), torch.full((2, 1, 1), 0.5)
    try:
        mean, std = kernel(x, x, level, level / 2, level)
        check_shape(f"{source} (mean)", mean, x.shape)
        check_shape(f"{source} (std)", std, x.shape, level.shape)
    except (TypeError, ValueError, RuntimeError, FlowalignError) as error:
        raise ConfigError(f"{source} does not make a step: {error} (docs/extending.md#a-kernel)") from error


def check_picks(source: str, picks: object, groups: int, prompts: int) -> list[int]:
    """The numbers of prompts that a selection picked, as they came.

    Raises:
        FlowalignError: there are not as many as groups, or one is no number of a prompt.
    """
    if not isinstance(picks, list) or len(picks) != groups or not all(0 <= int(pick) < prompts for pick in picks):
        raise FlowalignError(
            f"{source}.picks gave {str(picks)[:80]}, and a list of {groups} numbers from 0 to {prompts - 1} is wanted"
        )
    return picks


def check_method(kind: type) -> None:
    """Refuse a class that lacks a method which every run calls, or has one whose name only resembles one.

    Raises:
        ConfigError: it names the class and the method.
    """
    if kind.__module__.split(".")[0] in OURS:
        return
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    missing += [name for name in ("headline", "unit") if not isinstance(getattr(kind, name, None), str)]
    if missing:
        raise ConfigError(f"algorithm: {kind.__name__} has no '{missing[0]}', which every run asks (docs/extending.md)")
    for name in dir(kind):
        meant = MEANT.get(name) or (name[:-1] if name.endswith("s") else f"{name}s")
        if meant in HOOKS - {name} and name not in HOOKS and hasattr(kind, meant):
            raise ConfigError(
                f"algorithm: nothing calls {kind.__name__}.{name}; did you mean '{meant}'? _{name} is free for your own"
            )
