"""Feature caches in rollouts, by diffusers' hooks: what hardly changes from step to step is not computed again.

A cached velocity is not what a replay computes. Caches are on in rollouts alone: not in replay, in completions or in
evaluation. Each call of the pipeline begins with an empty cache, and each branch of guidance has its own. first_block
decides by the mean over a batch: a sample then depends, a little, on those beside it.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from diffusers import FirstBlockCacheConfig, ModelMixin, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks.first_block_cache import FBCBlockHook, FBCHeadBlockHook
from diffusers.models.cache_utils import CacheMixin
from pydantic import Field

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.conditions import standing_in
from flowalign.policies.diffusion.scheduler import TransitionScheduler

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0)]
Timestep = Annotated[float, Field(ge=-1, le=1001)]


def first_block(policy: object, *, threshold: Share = 0.05) -> FirstBlockCacheConfig:
    """The blocks after the first are left out while what the first adds hardly changes (TeaCache, arXiv 2411.19108).

    Args:
        threshold: mean size of that change, relative, from which on all blocks are computed.
    """
    return FirstBlockCacheConfig(threshold=threshold)


def taylor_seer(
    policy: Any,
    *,
    interval: Count = 5,
    before: Count = 3,
    after: Count | None = None,
    order: Annotated[int, Field(ge=0)] = 1,
    lite: bool = False,
) -> TaylorSeerCacheConfig:
    """Attention is predicted by a Taylor series over steps (TaylorSeer, arXiv 2503.06923).

    Args:
        interval: steps from one that is computed to the next.
        before: steps at the start that are computed.
        after: the step from which on all are computed.
        order: order of the series.
        lite: predict the network's last layer alone, and leave out all blocks.
    """
    return TaylorSeerCacheConfig(
        cache_interval=interval,
        disable_cache_before_step=before,
        disable_cache_after_step=after,
        max_order=order,
        taylor_factors_dtype=torch.float32 if policy.compute_dtype == torch.float32 else torch.bfloat16,
        use_lite_mode=lite,
    )


def pyramid_attention(
    policy: Any, *, every: Annotated[int, Field(ge=2)] = 2, low: Timestep = 100, high: Timestep = 800
) -> PyramidAttentionBroadcastConfig:
    """Attention is computed at every `every`-th step and kept for those between (PAB, arXiv 2408.12588).

    Args:
        low, high: timesteps, of 1000, between which it is kept.
    """
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=every,
        spatial_attention_timestep_skip_range=(low, high),
        current_timestep_callback=lambda: 1000 * policy.pipeline.scheduler.level,
    )


CACHES: dict[str, Callable[..., Any]] = {
    "first_block": first_block,
    "taylor_seer": taylor_seer,
    "pyramid_attention": pyramid_attention,
}


def check_cacheable(network: type) -> None:
    """Refuse a class of networks that diffusers has no caches for.

    Raises:
        ConfigError: names it.
    """
    if not issubclass(network, CacheMixin):
        raise ConfigError(f"rollout.cache: diffusers has no caches for {network.__name__} (no CacheMixin); null works")


@contextlib.contextmanager
def caching(policy: Any, make: Callable[[Any], Any], scheduler: TransitionScheduler | None = None) -> Iterator[None]:
    """Within it the denoiser's networks use a cache, empty at the start.

    Args:
        make: the cache's configuration, of a policy.
        scheduler: the rollout's; the calls within one of its steps are the branches of guidance. None: nothing is
            sampled.

    Raises:
        ConfigError: the cache does not fit the network, or its guidance.
    """
    networks = list(policy.networks.values())
    for network in networks:
        check_cacheable(type(network))
        config = make(policy)
        try:
            network.enable_cache(config)
        except ValueError as error:
            raise ConfigError(f"rollout.cache: it does not fit {type(network).__name__}: {error}") from error
    step, calls = -1, 0

    def of_its_branch(network: ModelMixin, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> object:
            nonlocal step, calls
            assert scheduler is not None
            step, calls = scheduler.taken, calls + 1 if step == scheduler.taken else 0
            if calls and isinstance(config, PyramidAttentionBroadcastConfig):
                raise ConfigError(
                    "rollout.cache: pyramid_attention cannot tell the branches of guidance apart, for which "
                    f"{type(policy.pipeline).__name__} calls its network twice a step; first_block works"
                )
            with network.cache_context(f"call {calls}"):
                return own(*args, **kwargs)

        return forward

    try:
        with contextlib.ExitStack() as stack:
            for network in networks:
                _check_hooks(network)
                stack.enter_context(standing_in([network], functools.partial(of_its_branch, network)))
            yield
    finally:
        for network in networks:
            if network.is_cache_enabled:
                network.disable_cache()


def _check_hooks(network: ModelMixin) -> None:
    """Refuse a cache that finds nothing in a network, and blocks that the hooks of first_block would fail at."""
    registries = [module._diffusers_hook for module in network.modules() if hasattr(module, "_diffusers_hook")]
    hooks = [(registry._module_ref, hook) for registry in registries for hook in registry.hooks.values()]
    name = type(network).__name__
    if not hooks:
        raise ConfigError(f"rollout.cache: it finds nothing to keep in {name}; another may, such as first_block")
    blocks = [(module, hook._metadata) for module, hook in hooks if isinstance(hook, FBCHeadBlockHook | FBCBlockHook)]
    kinds = {known.return_encoder_hidden_states_index is None for _, known in blocks}
    named = all("hidden_states" in inspect.signature(type(module).forward).parameters for module, _ in blocks)
    if len(kinds) > 1 or not named:
        raise ConfigError(
            f"rollout.cache: diffusers' first_block cannot read the blocks of {name}; another may, such as taylor_seer"
        )
