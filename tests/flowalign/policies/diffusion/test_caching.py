"""Feature caches in rollouts: diffusers' own results, nothing left behind, and no use where replays are compared."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.base import repeated_blocks
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.caching import CACHES, caching
from samplers.noise import generators
from tests.flowalign.small_run import small_run

PROMPTS = ["a red circle", "two blue squares"]
SEEDS = [4, 5]
STEPS = 6


def policy_of(name: str) -> DiffusersPolicy:
    return DiffusersPolicy(build(name), encode_options=PIPELINES[name].encode)


def sample(policy: DiffusersPolicy, name: str, guidance: float, **more: Any) -> torch.Tensor:
    call = PIPELINES[name].call
    return policy.sample(PROMPTS, SEEDS, steps=STEPS, guidance=guidance, **call, **more).trajectory.final


def theirs(policy: DiffusersPolicy, name: str, guidance: float, config: Any) -> torch.Tensor:
    """The same samples by plain diffusers."""
    pipeline, family, call = policy.pipeline, policy.family, PIPELINES[name].call
    embeds = policy.encoder.arguments(PROMPTS, [""] * 2, guidance)
    policy.denoiser.enable_cache(config)
    made = pipeline(
        **embeds,
        **family.arguments(guidance),
        **call,
        num_inference_steps=STEPS,
        generator=generators(SEEDS),
        output_type="latent",
        return_dict=False,
    )[0]
    policy.denoiser.disable_cache()
    return family.unpack(made, family.size(pipeline, call))


@pytest.mark.parametrize(
    ("name", "guidance", "cache", "settings", "config"),
    [
        # random networks: their first block changes more than a trained one's
        ("flux", 1.0, "first_block", {"threshold": 0.3}, lambda _: FirstBlockCacheConfig(0.3)),
        ("qwen_image", 3.0, "first_block", {"threshold": 0.5}, lambda _: FirstBlockCacheConfig(0.5)),
        ("wan", 3.0, "first_block", {"threshold": 0.2}, lambda _: FirstBlockCacheConfig(0.2)),
        (
            "qwen_image",
            3.0,
            "taylor_seer",
            {"interval": 2, "before": 1},
            lambda _: TaylorSeerCacheConfig(2, 1, taylor_factors_dtype=torch.float32),
        ),
        (
            "flux",
            1.0,
            "pyramid_attention",
            {"low": 0, "high": 1001},
            lambda pipeline: PyramidAttentionBroadcastConfig(
                2,
                spatial_attention_timestep_skip_range=(0, 1001),
                current_timestep_callback=lambda: pipeline.current_timestep,
            ),
        ),
    ],
)
def test_a_cached_rollout_is_diffusers_own(
    name: str, guidance: float, cache: str, settings: Mapping[str, Any], config: Callable[[Any], Any]
) -> None:
    policy = policy_of(name)
    plain = sample(policy, name, guidance)
    make = partial(CACHES[cache], **settings)
    cached = sample(policy, name, guidance, cache=make)
    expected = theirs(policy, name, guidance, config(policy.pipeline))
    scale = float(plain.abs().max())
    torch.testing.assert_close(cached, expected, atol=1e-5 * scale, rtol=0)
    assert (cached - plain).abs().max() > 1e-4 * scale
    # it begins empty and leaves nothing behind
    assert torch.equal(sample(policy, name, guidance, cache=make), cached)
    assert torch.equal(sample(policy, name, guidance), plain)


def test_blocks_are_left_out() -> None:
    policy, calls = policy_of("flux"), []
    *_, last = repeated_blocks(policy.denoiser)
    forward = last.forward
    last.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    sample(policy, "flux", 1.0, cache=partial(CACHES["first_block"], threshold=1e9))
    assert len(calls) == 1
    sample(policy, "flux", 1.0, cache=partial(CACHES["first_block"], threshold=0.0))
    assert len(calls) == 1 + STEPS


@pytest.mark.parametrize(
    ("name", "cache", "message"),
    [
        ("sd35", "first_block", "diffusers has no caches for SD3Transformer2DModel"),
        ("chroma", "first_block", "it does not fit ChromaTransformer2DModel"),
        ("flux2", "first_block", "(first_block cannot read the blocks of|it does not fit) Flux2Transformer2DModel"),
        ("kandinsky5_image", "first_block", "first_block cannot read the blocks of Kandinsky5Transformer3DModel"),
        ("wan", "taylor_seer", "it finds nothing to keep in WanTransformer3DModel"),
    ],
)
def test_networks_that_a_cache_does_not_fit(name: str, cache: str, message: str) -> None:
    policy = policy_of(name)
    with pytest.raises(ConfigError, match=f"rollout.cache: .*{message}"), caching(policy, CACHES[cache]):
        pass
    assert not getattr(policy.denoiser, "is_cache_enabled", False)


def test_attention_that_would_be_of_the_other_branch_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot tell the branches of guidance apart, for which QwenImagePipeline"):
        sample(policy_of("qwen_image"), "qwen_image", 3.0, cache=CACHES["pyramid_attention"])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("flow_grpo", [], "flow_grpo's ratios compare the two; training.old_log_prob: replayed works"),
        ("draft", [], "draft's updates compare the two; nft, raft and the others"),
        ("flow_grpo", ["training.old_log_prob=replayed"], "share_start_noise: false works"),
        ("g2rpo", ["training.old_log_prob=replayed", "rollout.share_start_noise=false"], "g2rpo makes its branches"),
        ("branch_grpo", ["training.old_log_prob=replayed", "rollout.share_start_noise=false"], "outside of the pipe"),
        ("nft", ["rollout.search={name: best_of_n}"], "a search samples without"),
        ("nft", ["model.compile=true"], "model.compile: false works"),
        ("nft", ["rollout.cache.treshold=0.1"], "'first_block' has no setting 'treshold'"),
    ],
)
def test_where_replays_are_compared_or_nothing_is_cached(name: str, settings: list[str], message: str) -> None:
    config = load(recipe(f"tiny_sd3/{name}"), ["rollout.cache={name: first_block}", *settings])
    with pytest.raises(ConfigError, match=f"rollout.cache: .*{message}"):
        config.check(1)


def test_a_pipeline_without_caches_is_refused_before_it_loads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout.cache: diffusers has no caches for SD3Transformer2DModel"):
        small_run("tiny_sd3/nft", tmp_path, "rollout.cache={name: first_block}")


@pytest.mark.parametrize("name", ["nft", "flow_grpo"])
def test_training(name: str, tmp_path: Path) -> None:
    own = ["training.old_log_prob=replayed"] if name == "flow_grpo" else []
    own += ["rollout.cache={name: first_block, threshold: 1.0}", "rollout.share_start_noise=false", "model.encode={}"]
    own += ["training.prompts_per_iteration=2", "training.group_size=2", "rollout.height=32", "rollout.width=32"]

    def brightness(images: list[Any], prompts: list[str]) -> list[float]:
        return [float(np.asarray(image).mean() / 255) for image in images]

    policy = policy_of("flux")
    run = small_run(f"tiny_sd3/{name}", tmp_path, *own, policy=policy, reward=brightness)
    before = {key: value.clone() for key, value in policy.trainable().items()}
    metrics = run.iterate()
    assert any(not torch.equal(value, before[key]) for key, value in policy.trainable().items())
    if name == "flow_grpo":
        # what the cache did to log-probabilities, and none of it in the ratios
        assert metrics["policy/mismatch"] > 1e-6
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
