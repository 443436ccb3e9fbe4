"""The models and rewards that a configuration names, built."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, TorchDynamoPlugin

from flowalign import registry
from flowalign.config import BaseConfig, Config, Model, Named, TextConfig
from flowalign.data import shipped
from flowalign.data.sizes import rows_by_size
from flowalign.errors import ConfigError, nearest
from flowalign.policies.base import Policy
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.caching import check_cacheable
from flowalign.policies.diffusion.context_parallel import TokenParts, check_context_parallel
from flowalign.policies.diffusion.families import check_adapters, family_of
from flowalign.policies.diffusion.storage import check_arguments, described_by, load_config, network_class
from flowalign.policies.language.masked import MaskedPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.turns import AgentPolicy
from flowalign.policies.language.unified import UnifiedPolicy
from flowalign.policies.language.vision_language import VisionLanguagePolicy
from flowalign.policies.settings import Network, Sampling, TextModel
from flowalign.rollouts.language import LanguageSampler
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampler
from flowalign.training.distributed.heartbeat import ending_with_launcher
from flowalign.training.memory import check_precision
from rewards import Reward, Spec, WeightedSum, spec_of
from rewards.vision import allow_tf32


def leave_out_cudnn_attention() -> None:
    """Take cuDNN's attention out of torch's own choice, for this process; `model.attention: _native_cudnn` still asks
    for it by name.

    From torch 2.11 on it is the first choice on Hopper GPUs. Its backward pass read memory that it must not there
    (FLUX.1 in bfloat16, H100, torch 2.11), and has given NaN where it did not (pytorch issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def build_policy(
    config: BaseConfig, device: torch.device | str = "cpu", kind: type[DiffusersPolicy] = DiffusersPolicy
) -> Any:
    """Load the model of a configuration, without anything trainable yet.

    Args:
        kind: class of the policy, if it makes pictures.
    """
    check_precision(config.model.compute_dtype, torch.device(device))
    allow_tf32(config.model.tf32)
    if config.model.path.startswith(registry.GIVEN):
        name = config.model.path.removeprefix(registry.GIVEN)
        raise ConfigError(f"model.path: the model '{name}' was handed over in Python; hand it over again (policy=...)")
    path = shipped(config.model.path)
    if isinstance(config, TextConfig):
        language, settings = language_policy(config)
        text = language.from_pretrained(path, config.model.dtype, device, **settings)
        text.set_autocast(config.model.autocast)
        return text
    assert isinstance(config, Config)
    model = config.model
    described = None if model.config is None else str(shipped(model.config))
    if model.base_bits is not None and str(path).endswith(".safetensors"):
        raise ConfigError("model.base_bits: a single file is loaded as it is; null works, or a folder or hub name")
    sizes = {"rollout": _sides(config.rollout), "evaluation": _sides(config.evaluation)}
    if config.evaluation.also_at is not None:
        sizes["evaluation.also_at"] = config.evaluation.also_at.model_dump()
    for size in rows_by_size(config.build_algorithm().read(config.data).metadata):
        shown = ", ".join(f"{side} {pixels}" for side, pixels in size)
        sizes |= {f"data.prompts, {shown}": dict(size)} if size else {}
    for where, sides in sizes.items():
        check_arguments(described_by(path, described), sides, where)
    check_context_parallel(described_by(path, described), model)
    if config.rollout.cache is not None:
        check_cacheable(network_class(described_by(path, described)))
    pipeline = load_config(described_by(path, described))["_class_name"]
    config.build_algorithm().check_pipeline(config, pipeline)
    check_chunks(config, pipeline)
    if model.lora is not None:
        check_adapters(pipeline)
    policy = kind.from_pretrained(
        path,
        model.dtype,
        device,
        base_bits=model.base_bits,
        config=described,
        embeddings=model.embeddings,
        encode_options=model.encode,
        attention=model.attention,
    )
    policy.set_autocast(model.autocast)
    policy.save_memory(model)
    for where, sides in sizes.items():
        try:
            policy.family.check_size(policy.pipeline, sides)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return policy


def check_chunks(config: Config, pipeline: str) -> None:
    """Refuse chunks of a pipeline, by its class, that makes its samples as a whole."""
    for where, sampling in (("rollout", config.rollout), ("evaluation", config.evaluation)):
        if sampling.chunks > 1 and not family_of(pipeline).causal:
            raise ConfigError(f"{where}.chunks: {pipeline} makes its samples as a whole; 1 works")


def _sides(sampling: Sampling) -> dict[str, Any]:
    """The sizes that the settings give."""
    sides = {name: getattr(sampling, name) for name in ("height", "width", "num_frames", "duration")}
    return {name: size for name, size in sides.items() if size is not None}


def language_policy(config: TextConfig) -> tuple[type[LanguagePolicy], dict[str, Any]]:
    """The class of the policy that a configuration needs, and its settings."""
    model, environment = config.model, config.environment
    template = None if model.chat_template is None else Path(model.chat_template).read_text(encoding="utf-8")
    chat = {"system": model.system, "template": template, "template_arguments": model.chat_template_kwargs}
    if model.images:
        return VisionLanguagePolicy, chat
    if model.draws is not None:
        return UnifiedPolicy, model.draws.model_dump()
    if model.diffusion is not None:
        return MaskedPolicy, chat | {"chat": model.chat} | model.diffusion.model_dump()
    settings = chat | {"padding": model.padding, "chat": model.chat}
    if environment is None:
        return LanguagePolicy, settings
    checked = registry.check("environments", environment.name, environment.settings, "environment")
    make = partial(registry.resolve("environments", environment.name, "environment"), **checked)
    return AgentPolicy, settings | {"environment": make, "turns": environment.turns}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that accelerate does not know, or that are not installed, which it would leave out silently."""
    if not names:
        return
    known = {tracker.value: tracker for tracker in LoggerType}
    installed = {*get_available_trackers(), LoggerType.ALL}
    for name in names:
        if name not in known:
            raise ConfigError(f"trackers: there is no '{name}'; {nearest(name, known)}")
        if known[name] not in installed:
            raise ConfigError(f"trackers: '{name}' is not installed; pip install {name}, or leave it out")


def check_device(policy: Policy[Any], device: torch.device) -> None:
    """Refuse a policy that is not where this process trains."""
    if policy.device.type != device.type:
        raise ConfigError(
            f"policy: it is on '{policy.device}', and this process trains on '{device}'; "
            f"from_pretrained(..., device='{device}') works"
        )


def check_media(reward: Reward, model: Network) -> None:
    """Refuse rewards of texts for a model that makes pictures, and the other way round."""
    writes = isinstance(model, TextModel) and model.draws is None
    for single in reward.rewards if isinstance(reward, WeightedSum) else [reward]:
        needs = spec_of(single).needs
        texts, pictures = "text" in needs, bool(needs & {"image", "frames", "latents", "sound"})
        if (texts or pictures) and not (texts if writes else pictures):
            needed, samples = ("texts", "pictures") if texts else ("pictures", "texts")
            raise ConfigError(f"rewards: '{single.name}' scores {needed}, and this model makes {samples}")


def check_sound(config: BaseConfig, policy: Any = None) -> None:
    """Refuse rewards of sound, before they load, if the model makes none or a group's samples share theirs; and workers
    of a model that makes sounds.

    Args:
        policy: policy instead of the configuration's model.
    """
    trained, watched = (
        [entry.name for entry in named if any("sound" in _needs(kind) for kind in _within(entry))]
        for named in (config.rewards, [*(config.evaluation.rewards or []), *config.evaluation.panel])
    )
    names = [*trained, *watched]
    sent = isinstance(config, Config) and config.rollout.workers is not None
    if not names and not sent:
        return
    if not isinstance(config, Config):
        raise ConfigError(f"rewards: '{names[0]}' scores sound, and this model makes texts")
    described = None if config.model.config is None else str(shipped(config.model.config))
    made_by = (
        type(policy.pipeline).__name__
        if policy
        else load_config(described_by(shipped(config.model.path), described))["_class_name"]
    )
    family = family_of(made_by)
    if sent and family.makes_sound:
        raise ConfigError(
            f"rollout.workers: they send pictures, videos and texts, and {made_by} makes sounds; workers: null works"
        )
    if names and not (family.samples_sound or family.makes_sound):
        raise ConfigError(
            f"rewards: '{names[0]}' scores sound, and {made_by} makes none; LTX2Pipeline and StableAudio3Pipeline do"
        )
    if trained and family.samples_sound and config.rollout.share_start_noise:
        raise ConfigError(
            f"rollout.share_start_noise: '{trained[0]}' scores sound, and samples that begin together share theirs; "
            "share_start_noise: false works"
        )


def _within(named: Named) -> list[Any]:
    """The classes of a reward and of those inside it; none for a reward from Python, whose class is unknown."""
    return [] if named.name.startswith(registry.GIVEN) else registry.rewards_within(named.name, named.settings)


def _needs(kind: object) -> frozenset[str]:
    """Needs of a class of rewards; none if they depend on its settings."""
    spec = getattr(kind, "spec", None)
    return spec.needs if isinstance(spec, Spec) else frozenset()


def build_accelerator(**settings: object) -> Accelerator:
    """This process among the others, without the precision and compilation of the user's `accelerate config`.

    Args:
        settings: settings of accelerate.

    Raises:
        ConfigError: the launch configuration is for DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "the launch configuration asks for DeepSpeed, which is not supported; configs/accelerate/fsdp2.yaml shards "
            "the same"
        )
    with ending_with_launcher():
        return Accelerator(
            # without it processes of torchrun on a machine without accelerators would not find each other
            cpu=not torch.accelerator.is_available(),
            # networks are cast by model.dtype and compiled by model.compile
            mixed_precision="no",
            dynamo_plugin=TorchDynamoPlugin(backend="no"),
            **settings,
        )


def build_sampler(config: BaseConfig, policy: Any, needs: frozenset[str]) -> Sampler:
    """The sampler of this process.

    Args:
        needs: needs of the reward, as in `rewards.Spec`.
    """
    if isinstance(config, TextConfig):
        return LanguageSampler(config, policy)
    assert isinstance(config, Config)
    return DiffusionSampler(config, policy, needs)


def share_tokens(policy: Policy, processes: Processes) -> Callable[[], AbstractContextManager[None]]:
    """Divide each sample's tokens among the processes that share it; return a context in which each has all tokens."""
    if not isinstance(policy, DiffusersPolicy):
        return nullcontext
    policy.family.parts = processes.columns
    return TokenParts(policy.every_network, processes.mesh).joined if processes.columns > 1 else nullcontext


def make_trainable(policy: Policy, model: Network, keep_reference: bool) -> None:
    """Make a policy trainable by its model section: an adapter or all weights, recomputed or compiled blocks.

    Args:
        keep_reference: keep the start weights, which training needs.
    """
    policy.set_autocast(model.autocast)
    texts = model.text_lora if isinstance(model, Model) else None
    if texts is not None:
        assert isinstance(policy, DiffusersPolicy)
        policy.add_text_lora(texts)
    if policy.lora_config is not None:
        assert policy.lora, "a policy that came with its adapter"
    elif texts is not None and not texts.denoiser:
        pass  # the denoiser stays as it is
    elif model.lora is not None and model.lora.path is not None:
        policy.start_from_lora(model.lora.path)
    elif model.lora is not None:
        policy.add_lora(model.lora.rank, model.lora.alpha, model.lora.targets, model.lora.init)
    else:
        if keep_reference:
            policy.keep_reference()
        policy.train_all()
    if model.gradient_checkpointing:
        policy.checkpoint_gradients()
    if isinstance(model, Model) and model.compile:
        policy.compile()
