"""Loading a run, a folder or a hub name as a policy that is ready to sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flowalign.config import load
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.base import Policy, best_device, fitting_lora
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling, SamplingSettings
from flowalign.runs.checkpoint import Checkpoints, fitting
from flowalign.training.building import build_policy

ENCODE: dict[str, dict[str, Any]] = {
    **{name: {"max_sequence_length": 0} for name in ("tiny_sd3", "tiny_sd3_64", "tiny_speller")},
    "tiny_video": {"max_sequence_length": 8},
}
"""Encoding with which the shipped models were trained: without the 256 empty tokens that replace a missing T5."""


def load_for_sampling(
    model: str,
    lora: Path | None,
    dtype: str,
    trained: bool = True,
    kind: type[DiffusersPolicy] = DiffusersPolicy,
) -> tuple[Policy[Any], SamplingSettings]:
    """A policy ready to sample, and its sampling settings.

    Args:
        model: a run's folder, a pipeline's folder, a hub name, or a shipped model. A language model: a run's folder.
        lora: folder with LoRA weights.
        trained: load a run's trained weights; otherwise those it started from.
        kind: class of the policy, if it makes pictures.
    """
    device = best_device()
    folder, weights = Path(model), lora
    if (folder / "config.yaml").is_file():
        config = load(folder / "config.yaml")
        policy: Policy[Any] = build_policy(config, device, kind)
        if config.model.lora is not None and config.model.lora.path is not None:
            policy.start_from_lora(config.model.lora.path)
        sampling: SamplingSettings = config.evaluation
        if trained and weights is None:
            load_trained(policy, folder)
            algorithm = config.build_algorithm()
            if algorithm.samples_otherwise:
                load_modules(algorithm.modules(policy), folder)
        elif isinstance(sampling, Sampling) and isinstance(sampling.rlg, float):
            # there is no LoRA to weigh
            sampling = sampling.model_copy(update={"rlg": 1.0})
    else:
        policy = kind.from_pretrained(shipped(model), dtype, device, encode_options=ENCODE.get(model))
        sampling = Sampling()
    if weights is not None:
        # as transformers and peft save one
        settings = [file for name in ("config.json", "adapter_config.json") for file in Path(weights).glob(f"*/{name}")]
        if settings:
            raise ConfigError(
                f"--lora: {weights} has a writer too ({settings[0].parent.name}); the run's folder takes both"
            )
        with fitting_lora("--lora", weights):
            policy.load(weights)
    return policy, sampling


def load_trained(policy: Policy[Any], run: Path) -> None:
    """Load a run's newest weights into its policy.

    These are the exported ones, which a resumed run updates or removes, else those of its newest checkpoint.

    Raises:
        ConfigError: the run has no trained weights yet.
    """
    exported = [folder for folder in (run / "lora", run / "model") if folder.is_dir()]
    if exported:
        with fitting(exported[0]):
            policy.load(exported[0])
        return
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    newest = checkpoints.newest()
    if newest is None:
        raise ConfigError(f"{run} holds no trained weights yet")
    with fitting(newest):
        if checkpoints.state(newest)["config"]["model"]["lora"] is not None:
            policy.load(newest)
            return
        tensors, _ = checkpoints.load(newest)
        # the averaged weights, if there are any
        values = tensors.get("ema", tensors["trainable"])
        weights = {name: values[name] for name, _ in policy.network.named_parameters()}
        policy.network.load_state_dict(weights, strict=False)


def load_modules(modules: Mapping[str, nn.Module], run: Path) -> None:
    """Load the weights of further networks, besides the policy's, from a run's newest checkpoint.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if not modules:
        return
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    newest = checkpoints.newest()
    if newest is None:
        raise ConfigError(f"{run} holds no checkpoint, where {', '.join(modules)} would be")
    tensors, _ = checkpoints.load(newest)
    values = tensors.get("ema", tensors["trainable"])
    for name, module in modules.items():
        state = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        with fitting(newest):
            # what is frozen or tied is not among them
            module.load_state_dict({**module.state_dict(), **state})
