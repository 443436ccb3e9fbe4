"""What a method, a loss or an advantage of somebody's own gives, checked where it enters: shapes and names.

Tensors of a wrong shape broadcast, and a run then learns something else in silence. Only shapes are compared, which
costs nothing and waits for no device.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flowalign.errors import ConfigError, FlowalignError

OURS = ("flowalign", "rewards", "samplers")
MEANT = {"advantage": "credit"}
"""Names that people give to a method which is called otherwise."""
CALLERS = {
    "items": None,
    "experience": None,
    "verify": None,
    "losses": None,
    "loss": "losses",
    "finished": "losses",
    "credit": "experience",
    "windows": "check",
}
"""Methods that a run calls, each with the method that calls it, where that one can be replaced."""


def check_shape(source: str, value: Any, *shapes: Iterable[int]) -> None:
    """Refuse what is no tensor of one of these shapes.

    Raises:
        FlowalignError: it names `source`, the shape that came and those that work.
    """
    wanted = [list(shape) for shape in dict.fromkeys(map(tuple, shapes))]
    if not isinstance(value, Tensor) or list(value.shape) not in wanted:
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        works = " or ".join(map(str, wanted))
        raise FlowalignError(f"{source} gave {got}, and one of shape {works} is wanted")


def checked_loss(source: str, answer: Any, *shapes: Iterable[int]) -> tuple[Tensor, dict[str, Tensor]]:
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


def check_method(kind: type) -> None:
    """Refuse a class that lacks a method which every run calls, or has one whose name only resembles one.

    Raises:
        ConfigError: it names the class and the method.
    """
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in (*OURS, "builtins", "abc")]
    if not own:
        return
    ours = {name for base in kind.__mro__ if base not in own for name in vars(base) if callable(getattr(base, name))}
    methods = {name: value for base in reversed(own) for name, value in vars(base).items() if callable(value)}
    called = {name for value in methods.values() for name in getattr(getattr(value, "__code__", None), "co_names", ())}
    for name in methods.keys() - ours - called:
        meant = MEANT.get(name) or (name[:-1] if name.endswith("s") else f"{name}s")
        if meant in ours:
            raise ConfigError(f"algorithm: nothing calls {kind.__name__}.{name}; did you mean '{meant}'?")
    for name, caller in CALLERS.items():
        if caller not in methods and _only_raises(getattr(kind, name, None)):
            raise ConfigError(f"algorithm: {kind.__name__} has no '{name}', which every run calls (docs/extending.md)")
    for name in ("headline", "unit"):
        if not isinstance(getattr(kind, name, None), str):
            raise ConfigError(f"algorithm: {kind.__name__} has no '{name}', a text (docs/extending.md)")


def _only_raises(method: Any) -> bool:
    """Whether it is a base's method that a subclass is to write."""
    code = getattr(method, "__code__", None)
    return code is not None and method.__module__.startswith("flowalign.") and code.co_names == ("NotImplementedError",)
