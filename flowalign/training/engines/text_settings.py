"""Settings of servers that draw texts."""

from typing import Any

from pydantic import Field

from flowalign.config.engines import ServerSettings
from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from rewards.http import token_in


class TextSettings(ServerSettings):
    """Settings of servers that draw texts."""

    model: str | None = None
    """Name that the servers give the model; default: the only one they have."""
    concurrency: int = Field(64, ge=1)
    """Requests under way at once, of each process."""
    token_variable: str | None = None
    """Environment variable with the servers' key."""
    mismatch: float | None = Field(0.5, gt=0)
    weights_folder: str | None = None
    """Folder for weights that the servers can read too; default: in the run's folder."""

    def check(self, config: Any, algorithm: Any, processes: int) -> None:
        super().check(config, algorithm, processes)
        if self.token_variable is not None:
            try:
                token_in(self.token_variable)
            except ValueError as error:
                raise ConfigError(f"rollout.engine.token_variable: {error}") from error
        name = config.rollout.engine.name
        if config.model.images:
            raise ConfigError(f"rollout.engine: {name} is given texts alone; trainside works with model.images")
        settings = algorithm.settings
        needs = {
            "algorithm.entropy_share": getattr(settings, "entropy_share", 1.0) < 1,
            "algorithm.empg": getattr(settings, "empg", None) is not None,
        }
        missing = next((key for key, needed in needs.items() if needed), None)
        if missing is not None and settings.off_policy is None:
            raise ConfigError(
                f"{missing}: needs entropies, which {name} does not tell; algorithm.off_policy={{level: token}} finds "
                "them by a forward pass"
            )
        if config.rollout.weights == "reference":
            raise ConfigError("rollout.weights: servers get the trained weights; trainside works with reference")
        if self.staleness and config.model.lora is None:
            raise ConfigError(
                "rollout.engine.staleness: a server has one set of whole weights; model.lora: {...} works, or "
                "staleness: 0"
            )
        self.check_decoding(Decoding.of(config.rollout), name)

    def check_decoding(self, decoding: Decoding, name: str) -> None:
        """Refuse distributions that the server does not draw from, or does not tell log-probabilities of."""
