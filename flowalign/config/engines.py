"""Engines that sample a run's iterations: this process, workers on Ray, or servers (docs/engines.md)."""

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from flowalign.config.method import Method
from flowalign.errors import ConfigError, nearest
from flowalign.settings import Section

HERE = "trainside"
"""Name of the engine that is the process which learns."""
ENGINES: dict[str, dict[str, str | None]] = {
    "pictures": {HERE: None, "workers": None, "sglang": "flowalign.training.engines.sglang:SGLang"},
    "text": {
        HERE: None,
        "workers": None,
        "vllm": "flowalign.training.engines.vllm_texts:VLLM",
        "sglang": "flowalign.training.engines.sglang_texts:SGLangTexts",
    },
}
"""Engines by the kind of model: the class of a server; None of those that sample in flowalign's processes."""
INSIDE = "vllm"
"""Name of the engine that is a server where it has a url, and otherwise samples in flowalign's processes."""


def check_name(name: str, kind: str) -> None:
    """Refuse an engine that does not sample models of this kind."""
    if name not in ENGINES[kind]:
        raise ConfigError(f"rollout.engine: '{name}' samples no {kind} here; {nearest(name, ENGINES[kind])}")


class ServerSettings(Section):
    """Settings of engines that are servers."""

    url: list[str] = Field(min_length=1)
    """Address of the server, or a list of several, which share the requests."""
    staleness: int = Field(0, ge=0)
    """Iterations that servers sample ahead, with weights that are as old; 0: they wait for every update."""
    timeout: float = Field(600, gt=0)
    """Seconds that a request may take."""
    retries: int = Field(3, ge=0)
    """Further attempts of a request that servers answer with an error of theirs, each at the next one."""
    patience: float = Field(600, ge=0)
    """Seconds to go on trying while no server answers."""
    mismatch: float | None = Field(None, gt=0)
    """Largest mean difference of log-probabilities from a replay's, as a share of the clip range, before the run ends;
    null: any."""

    @field_validator("url", mode="before")
    @classmethod
    def _several(cls, value: object) -> Any:
        return [value] if isinstance(value, str) else value

    def check(self, config: Any, algorithm: Method, processes: int) -> None:
        """Refuse settings that do not work with servers, before a model loads.

        Args:
            config: the whole configuration.
        """
        for url in self.url:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"rollout.engine.url: '{url}' is no address; http://host:port works")
        if "served" not in algorithm.combines:
            raise ConfigError(
                f"rollout.engine: '{config.algorithm.name}' asks more of sampling than whole trajectories of prompts, "
                "which is all that a server draws; trainside works"
            )
        if config.rollout.search is not None:
            raise ConfigError("rollout.engine: a search asks for rewards, and servers have none; search: null works")
        if config.rows(processes) != processes:
            raise ConfigError("rollout.engine: model.context_parallel shares samples among processes; trainside works")
        if self.staleness:
            check_staleness("rollout.engine", config, algorithm)
            if len(self.url) < processes:
                raise ConfigError(
                    f"rollout.engine.staleness: {processes} processes sample ahead, each with weights of its own time, "
                    f"and {len(self.url)} servers have one set each; {processes} servers work, or staleness: 0"
                )


def check_staleness(where: str, config: Any, algorithm: Method) -> None:
    """Refuse methods and settings that do not work with samples of earlier weights.

    Args:
        where: the settings with the staleness.
    """
    if "ratios" not in algorithm.combines:
        raise ConfigError(
            f"{where}.staleness: '{config.algorithm.name}' has no ratios to earlier weights, by which "
            "samples of theirs would be corrected; 0 works, or flow_grpo and, for texts, grpo"
        )
    replayed = config.training.old_log_prob == "replayed"
    replayed |= config.training.old_log_prob is None and algorithm.replays_old(config)
    if replayed and getattr(algorithm.settings, "off_policy", None) is None:
        raise ConfigError(
            "training.old_log_prob: ratios to a replay by the current weights would leave out that earlier ones "
            "sampled; sampled works, or algorithm.off_policy={level: token}"
        )
    for key in ("dynamic_sampling", "replay"):
        if getattr(config.data, key) is not None:
            raise ConfigError(
                f"data.{key}: chooses groups by what the current weights make of them, and samples are drawn ahead; "
                f"{where}.staleness: 0 works"
            )
