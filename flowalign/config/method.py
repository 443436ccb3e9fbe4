"""What a configuration asks of its algorithm; the class itself is defined in a package above."""

from collections.abc import Mapping
from typing import Any, Protocol

from flowalign.policies.settings import Role, Snapshot


class Method(Protocol):
    """The side of an `algorithms.base.Algorithm` that configurations are checked against."""

    combines: frozenset[str]
    settings: Any

    @property
    def unit(self) -> str: ...

    @property
    def noise(self) -> str: ...

    @property
    def snapshots(self) -> Mapping[str, Snapshot]: ...

    @property
    def roles(self) -> Mapping[str, Role]: ...

    def items(self, config: object) -> int: ...

    def replays_old(self, config: object) -> bool:
        """Whether ratios refer to a replay; asked of methods that have ratios."""
