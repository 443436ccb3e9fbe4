"""The policy over a diffusers pipeline, on the shipped tiny Stable Diffusion 3."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flowalign.data import ASSETS
from flowalign.errors import ConfigError, FlowalignError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.families import family_of
from samplers import All, Window, dance_sde, flow_sde, ode
from samplers.completion import fork
from samplers.kernels import Kernel

TINY = ASSETS / "tiny_sd3"
PROMPTS = ["a red circle", "two blue squares", "a red circle", "a green triangle above a blue circle"]
SEEDS = [4, 5, 6, 7]
SIGMAS = [1.0, 0.75, 0.5, 0.25]
EVERY_STEP = All().etas(4, 0.7, 0, 0)

Make = Callable[..., DiffusersPolicy]


@pytest.fixture(scope="module")
def policy(tiny_policy: Make) -> DiffusersPolicy:
    """The base; tests that change weights make their own."""
    return tiny_policy()


def plain(**components: Any) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(
        TINY, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32, **components
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: StableDiffusion3Pipeline, seeds: list[int] = SEEDS, **call: Any) -> Tensor:
    """Pixels [B, 3, H, W] in [0, 1] of the pipeline's own call."""
    generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    call = {"num_inference_steps": 4, "max_sequence_length": 0, "guidance_scale": 1.0, "output_type": "pt"} | call
    return pipe(PROMPTS[: len(seeds)], generator=generator, **call).images


@torch.no_grad()
def pixels(policy: DiffusersPolicy, rollout: Rollout) -> Tensor:
    return (policy.family.decode(policy.pipeline, rollout.trajectory.final) / 2 + 0.5).clamp(0, 1)


def roll(policy: DiffusersPolicy, **settings: Any) -> Rollout:
    settings = {"steps": 4, "sigmas": SIGMAS, "kernel": flow_sde, "eta": EVERY_STEP} | settings
    return policy.sample(PROMPTS, SEEDS, **settings)


def everything(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """All (sample, step) pairs in random order."""
    batch, steps = rollout.trajectory.mask.shape
    pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(steps))
    return pairs[torch.randperm(len(pairs))].unbind(1)


def scramble(policy: DiffusersPolicy, scale: float = 0.05) -> None:
    """Move every trained weight, as training would."""
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(scale * torch.randn_like(parameter))


# Sampling


@pytest.mark.parametrize("sigmas", [None, SIGMAS])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_ode_sampling_is_the_pipelines_own_call(
    policy: DiffusersPolicy, guidance: float, sigmas: list[float] | None
) -> None:
    call = {} if sigmas is None else {"sigmas": sigmas}
    expected = picture(plain(), guidance_scale=guidance, **call)
    rollout = policy.sample(PROMPTS, SEEDS, steps=4, guidance=guidance, sigmas=sigmas)
    assert expected.std() > 0.1
    torch.testing.assert_close(pixels(policy, rollout), expected, atol=1e-4, rtol=0)


def test_ode_sampling_is_the_pipelines_own_call_with_its_default_prompt_encoding(tiny_policy: Make) -> None:
    policy = tiny_policy(encode_options={})
    expected = picture(plain(), SEEDS[:2], guidance_scale=2.0, num_inference_steps=2, max_sequence_length=256)
    rollout = policy.sample(PROMPTS[:2], SEEDS[:2], steps=2, guidance=2.0)
    torch.testing.assert_close(pixels(policy, rollout), expected, atol=1e-4, rtol=0)


def test_decoded_pictures_are_the_pipelines(policy: DiffusersPolicy) -> None:
    expected = picture(plain(), SEEDS[:1])[0]
    [image] = policy.decode(policy.sample(PROMPTS[:1], SEEDS[:1], steps=4))
    assert image.size == (32, 32) and image.mode == "RGB"
    levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)
    assert (levels / 255 - expected).abs().max() <= 0.51 / 255


@pytest.mark.parametrize("settings", [{"kernel": ode, "eta": None}, {"guidance": 3.0}])
def test_a_picture_does_not_depend_on_the_batch_size(policy: DiffusersPolicy, settings: dict) -> None:
    together = roll(policy, **settings)
    for batch_size in (1, 3):
        parts = roll(policy, **settings, batch_size=batch_size)
        torch.testing.assert_close(parts.trajectory.latents, together.trajectory.latents, atol=1e-4, rtol=0)
        torch.testing.assert_close(parts.trajectory.log_prob, together.trajectory.log_prob, atol=1e-4, rtol=0)
        assert parts.prompts == together.prompts


def test_a_stochastic_rollout_without_noise_is_the_ode(policy: DiffusersPolicy) -> None:
    silent, expected = roll(policy, eta=torch.zeros(4)), roll(policy, kernel=ode, eta=None)
    torch.testing.assert_close(silent.trajectory.final, expected.trajectory.final, atol=1e-5, rtol=0)


def test_start_and_step_noise_have_seeds_of_their_own(policy: DiffusersPolicy) -> None:
    made = policy.sample(
        ["a red circle"] * 3,
        [1, 1, 2],
        noise_seeds=[8, 9, 8],
        steps=4,
        kernel=flow_sde,
        eta=Window(start=1).etas(4, 0.7, 0, 0),
    ).trajectory
    assert torch.equal(made.latents[0, 0], made.latents[1, 0])
    # the first step is deterministic
    torch.testing.assert_close(made.latents[0, 1], made.latents[1, 1], atol=1e-6, rtol=0)
    assert not torch.allclose(made.latents[0, 2], made.latents[1, 2], atol=0.1)
    noise = (made.latents[:, 2] - made.latents[:, 1])[[0, 2]]
    assert not torch.allclose(made.latents[0, 0], made.latents[2, 0], atol=0.1) and noise.isfinite().all()


def test_the_pipelines_scheduler_is_put_back(policy: DiffusersPolicy) -> None:
    own = policy.pipeline.scheduler
    roll(policy)
    with pytest.raises(FlowalignError, match="the plan has 3 steps"):
        roll(policy, eta=torch.ones(3))
    assert policy.pipeline.scheduler is own


def test_guidance_below_one_is_refused(policy: DiffusersPolicy) -> None:
    with pytest.raises(ConfigError, match="guidance"):
        roll(policy, guidance=0.5)


# Replay


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("batch_size", [2, 64])
def test_ratio_is_one_after_a_rollout(policy: DiffusersPolicy, guidance: float, batch_size: int) -> None:
    """In any micro-batch, of any mix of samples and steps."""
    rollout = roll(policy, guidance=guidance, batch_size=batch_size)
    samples, steps = everything(rollout)
    old = rollout.trajectory.log_prob[samples, steps]
    for size in (1, 5, 16):
        parts = zip(samples.split(size), steps.split(size), strict=True)
        with torch.no_grad():
            new = torch.cat([policy.score(rollout, *part).log_prob for part in parts])
        torch.testing.assert_close(torch.exp(new - old), torch.ones(16), atol=1e-6, rtol=0)
    assert policy.verify(rollout) < 1e-5


def test_ratio_moves_with_the_weights(tiny_policy: Make) -> None:
    policy = tiny_policy()
    policy.add_lora(rank=4, alpha=8)
    rollout = roll(policy)
    samples, steps = everything(rollout)
    scramble(policy)
    with torch.no_grad():
        ratio = torch.exp(policy.score(rollout, samples, steps).log_prob - rollout.trajectory.log_prob[samples, steps])
    assert ((ratio - 1).abs() > 1e-4)[steps < 3].float().mean() > 0.9
    with pytest.raises(FlowalignError, match="replaying StableDiffusion3Pipeline differs"):
        policy.verify(rollout)


def test_noise_that_leaves_the_samples_is_refused(policy: DiffusersPolicy) -> None:
    """Replay reproduces it, with ratio 1; the pictures are noise all the same."""

    def loud_end(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = ode(x, v, sigma, sigma_next, eta)
        return mean, torch.where(sigma_next == 0, 20 * eta, std)

    noisy = roll(policy, kernel=loud_end, eta=torch.ones(4))
    with pytest.raises(FlowalignError, match=r"StableDiffusion3Pipeline away.*finished latents have.*smaller rollout"):
        policy.verify(noisy)
    rollout, forwards = roll(policy), policy.forwards
    assert policy.verify(rollout) < 1e-5 and policy.forwards == forwards


def test_a_step_that_leaves_the_schedule_is_refused_though_the_network_brings_it_back() -> None:
    """As flow_sde's first one on Sana's own schedule did, from 0.99975, when it tested for a level of 1 itself."""

    def exact(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        finite = torch.where(sigma == 1, sigma_next, sigma)
        return dance_sde(x, v, sigma, sigma_next, eta * (sigma / (1 - finite)).sqrt())

    sana = DiffusersPolicy(build("sana"))

    def walked(kernel: Kernel, eta: float) -> Rollout:
        etas = All().etas(20, eta, 0, 0)
        return sana.sample(PROMPTS[:2], SEEDS[:2], steps=20, kernel=kernel, eta=etas, **PIPELINES["sana"].call)

    rollout = walked(exact, 0.7)
    # the check of finished latents, five times, lets it pass
    assert rollout.trajectory.final.std() < 5 * walked(flow_sde, 0.0).trajectory.final.std()
    with pytest.raises(FlowalignError, match=r"after step 1 of 20 a state has a standard deviation of 1\d times what"):
        sana.verify(rollout)
    assert sana.verify(walked(flow_sde, 0.7)) < sana.family.tolerance


def test_bfloat16_keeps_latents_in_float32_and_ratios_close_to_one(tiny_policy: Make) -> None:
    policy = tiny_policy(dtype=torch.bfloat16)
    policy.add_lora(rank=4, alpha=8)
    rollout = roll(policy, guidance=3.0)
    trajectory = rollout.trajectory
    assert trajectory.latents.dtype == trajectory.log_prob.dtype == torch.float32
    assert not torch.equal(trajectory.latents.bfloat16().float(), trajectory.latents)
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    samples, steps = everything(rollout)
    with torch.no_grad():
        new = policy.score(rollout, samples, steps).log_prob
    off = torch.exp(new - trajectory.log_prob[samples, steps]) - 1
    # another order of summation moves a bfloat16 velocity by a part in 256
    assert off.abs().max() < 5e-3
    # and does so without a bias: rounded latents would pull every ratio below 1
    assert off.mean().abs() < 1e-3
    assert policy.verify(rollout) < 5e-2


# What is trained


def loss_of(policy: DiffusersPolicy, rollout: Rollout) -> Tensor:
    torch.manual_seed(1)
    samples, steps = everything(rollout)
    return (policy.velocity(rollout, samples, steps).float() * torch.randn(16, 4, 8, 8)).sum()


def gradients(policy: DiffusersPolicy, rollout: Rollout) -> dict[str, Tensor | None]:
    policy.denoiser.zero_grad()
    loss_of(policy, rollout).backward()
    return {name: p.grad for name, p in policy.denoiser.named_parameters()}


@pytest.mark.parametrize("lora", [True, False])
def test_every_trained_weight_gets_a_gradient_and_no_frozen_one(tiny_policy: Make, lora: bool) -> None:
    policy = tiny_policy()
    if lora:
        policy.add_lora(rank=4, alpha=8)
        scramble(policy)  # LoRA starts at B = 0, where A has no gradient
    else:
        policy.train_all()
    trained = policy.trainable()
    grads = gradients(policy, roll(policy))
    last = len(policy.denoiser.transformer_blocks) - 1
    for name, grad in grads.items():
        if name not in trained:
            assert grad is None, name
        elif f"transformer_blocks.{last}.attn.add_q_proj" in name or f"blocks.{last}.attn.norm_added_q" in name:
            # SD3's last block drops the text stream's output, so that its queries are of no use
            assert grad is not None and not grad.any(), name
        else:
            assert grad is not None and grad.isfinite().all() and grad.any(), name
    assert not any(p.requires_grad for p in policy.pipeline.vae.parameters())
    assert not any(p.requires_grad for p in policy.pipeline.text_encoder.parameters())


def test_gradient_checkpointing_gives_the_same_gradient(tiny_policy: Make) -> None:
    policy = tiny_policy()
    policy.add_lora(rank=4, alpha=8)
    scramble(policy)
    rollout = roll(policy)
    expected = {name: grad.clone() for name, grad in gradients(policy, rollout).items() if grad is not None}
    calls: list[int] = []
    policy.denoiser.transformer_blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    policy.denoiser.enable_gradient_checkpointing()
    again = gradients(policy, rollout)
    assert len(calls) == 2  # forward, and once more on the way back
    for name, grad in expected.items():
        torch.testing.assert_close(again[name], grad)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_guidance_with_a_conditional_gradient_is_the_detached_formula(
    tiny_policy: Make, dtype: str, tolerance: float
) -> None:
    """v = u.detach() + g * (c - u.detach()), each of the two called by itself; the network sees no more than that."""
    policy = tiny_policy(dtype=dtype)
    policy.add_lora(rank=4, alpha=8)
    scramble(policy)
    rollout = roll(policy, guidance=3.0)
    samples, steps = everything(rollout)
    x = rollout.trajectory.latents[samples, steps].to(policy.dtype)
    time = 1000 * rollout.trajectory.sigmas[steps]
    embeds = policy.encoder.arguments(PROMPTS, [""] * len(PROMPTS), 3.0)

    def branch(prefix: str) -> Tensor:
        tokens, pooled = (embeds[f"{prefix}{name}"][samples] for name in ("prompt_embeds", "pooled_prompt_embeds"))
        return policy.denoiser(x, tokens, pooled, time)[0]

    with policy._autocast():
        u, c = branch("negative_").detach(), branch("")
        literal = u + 3.0 * (c - u)
    weight = torch.randn_like(literal)
    (literal * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in policy.trainable().items()}

    policy.denoiser.zero_grad()
    policy.guidance_gradient = "conditional"
    learned: list[bool] = []
    policy.denoiser.register_forward_hook(lambda *call: learned.append(call[-1][0].requires_grad))
    velocity = policy.velocity(rollout, samples, steps)
    (velocity * weight).sum().backward()
    assert learned == [False, True]
    sampled = rollout.trajectory.velocity[samples, steps]
    torch.testing.assert_close(velocity.float(), sampled, atol=50 * tolerance, rtol=0)
    scale = max(grad.abs().max() for grad in expected.values())
    for name, p in policy.trainable().items():
        torch.testing.assert_close(p.grad / scale, expected[name] / scale, atol=tolerance, rtol=0)


def test_lora_trains_a_small_part(tiny_policy: Make) -> None:
    policy = tiny_policy()
    policy.add_lora(rank=2, alpha=2, targets=["attn.to_q"])
    assert all("to_q.lora_" in name for name in policy.trainable())
    with pytest.raises(ConfigError, match=r"\['nothing'\] match nothing"):
        tiny_policy().add_lora(rank=2, alpha=2, targets=["nothing"])


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_is_the_base(tiny_policy: Make, policy: DiffusersPolicy, lora: bool) -> None:
    trained = tiny_policy()
    if lora:
        trained.add_lora(rank=4, alpha=8)
    else:
        trained.keep_reference()
        trained.train_all()
    rollout = roll(trained)
    samples, steps = everything(rollout)
    base = policy.velocity(rollout, samples, steps)
    with torch.no_grad():
        assert torch.equal(trained.velocity(rollout, samples, steps), base)
        scramble(trained, 0.05 if lora else 0.005)
        with trained.reference():
            assert torch.equal(trained.velocity(rollout, samples, steps), base)
        assert not torch.allclose(trained.velocity(rollout, samples, steps), base, atol=1e-3)


def test_without_a_kept_reference_full_training_has_none(tiny_policy: Make) -> None:
    policy = tiny_policy()
    policy.train_all()
    with pytest.raises(FlowalignError, match="keep_reference"), policy.reference():
        pass


@pytest.mark.parametrize("alpha", [4.0, 16.0])
def test_a_saved_lora_gives_the_same_picture_in_plain_diffusers(
    tiny_policy: Make, tmp_path: Path, alpha: float
) -> None:
    """Also where alpha is not the rank, which diffusers only knows from the file's metadata."""
    policy = tiny_policy()
    policy.add_lora(rank=4, alpha=alpha)
    base = pixels(policy, policy.sample(PROMPTS, SEEDS, steps=4))
    scramble(policy)
    policy.save(tmp_path)
    expected = pixels(policy, policy.sample(PROMPTS, SEEDS, steps=4))
    assert (expected - base).abs().max() > 0.1
    pipe = plain()
    pipe.load_lora_weights(tmp_path)
    torch.testing.assert_close(picture(pipe), expected, atol=1e-4, rtol=0)
    loaded = tiny_policy()
    loaded.load(tmp_path)
    torch.testing.assert_close(pixels(loaded, loaded.sample(PROMPTS, SEEDS, steps=4)), expected, atol=1e-4, rtol=0)
    with loaded.strength(0.7):
        weaker = pixels(loaded, loaded.sample(PROMPTS, SEEDS, steps=4))
    pipe.set_adapters(pipe.get_active_adapters(), 0.7)
    torch.testing.assert_close(picture(pipe), weaker, atol=1e-4, rtol=0)
    assert (weaker - expected).abs().max() > 0.01


def test_a_saved_denoiser_gives_the_same_picture_in_plain_diffusers(tiny_policy: Make, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.train_all()
    scramble(policy, 0.003)
    policy.save(tmp_path)
    expected = pixels(policy, policy.sample(PROMPTS, SEEDS, steps=4))
    transformer = SD3Transformer2DModel.from_pretrained(tmp_path / "transformer")
    torch.testing.assert_close(picture(plain(transformer=transformer)), expected, atol=1e-4, rtol=0)
    loaded = tiny_policy()
    loaded.load(tmp_path)
    torch.testing.assert_close(pixels(loaded, loaded.sample(PROMPTS, SEEDS, steps=4)), expected, atol=1e-4, rtol=0)


# Prompts


def test_each_distinct_prompt_is_encoded_once(tiny_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    encoded: list[str] = []
    own = policy.family.encode

    def counted(pipeline: Any, prompts: list[str], **options: Any) -> dict[str, Tensor]:
        encoded.extend(prompts)
        return own(pipeline, prompts, **options)

    monkeypatch.setattr(policy.family, "encode", counted)
    roll(policy)
    assert sorted(encoded) == sorted(set(PROMPTS))
    roll(policy, guidance=3.0)
    roll(policy, guidance=3.0)
    assert sorted(encoded) == sorted({*PROMPTS, ""})


def test_prompts_that_are_too_long_are_reported(tiny_policy: Make, caplog: pytest.LogCaptureFixture) -> None:
    policy = tiny_policy()
    limit = policy.pipeline.tokenizer.model_max_length
    long = " ".join(["red"] * (limit + 5))
    with caplog.at_level(logging.WARNING, logger="flowalign"):
        policy.encoder.encode(["a red circle", " ".join(["red"] * (limit - 2))])
        assert not caplog.records  # it just fits, with the start and the end token
        policy.encoder.encode(["a red circle", long])
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("flowalign")]
    assert len(messages) == 2  # one a tokenizer
    for message in messages:
        assert message.startswith(f"1 of 1 prompts are longer than the {limit} tokens")
        assert long in message and f"has {limit + 7}" in message


# What cannot be used


@pytest.mark.parametrize("backend", ["nonsense", "sage_hub_that_is_not_there", "flash"])
def test_an_attention_backend_that_cannot_be_used_is_one_line(tiny_policy: Make, backend: str) -> None:
    if backend == "flash" and torch.cuda.is_available():
        pytest.skip("flash attention may be installed here")
    with pytest.raises(ConfigError, match=f"attention backend '{backend}'") as caught:
        tiny_policy(attention=backend)
    assert "\n" not in str(caught.value)


def test_the_native_attention_backend_works(tiny_policy: Make, policy: DiffusersPolicy) -> None:
    torch.testing.assert_close(
        roll(tiny_policy(attention="native")).trajectory.final, roll(policy).trajectory.final, atol=1e-5, rtol=0
    )


def test_an_unknown_family_is_refused_with_those_supported() -> None:
    with pytest.raises(FlowalignError, match=r"LTX9Pipeline; supported: .*StableDiffusion3Pipeline.*docs/models.md"):
        family_of("LTX9Pipeline")


def test_a_pipeline_without_a_flow_scheduler_is_refused(tiny_policy: Make) -> None:
    from diffusers import DDIMScheduler

    policy = tiny_policy()
    policy.pipeline.scheduler = DDIMScheduler()
    with pytest.raises(FlowalignError, match="DDIMScheduler"):
        roll(policy)


def test_a_state_that_samples_share_is_replayed_once_with_all_their_gradients(tiny_policy: Make) -> None:
    policy = tiny_policy()
    policy.add_lora(rank=2, alpha=4)
    start = policy.sample(PROMPTS[:2], SEEDS[:2], steps=4, sigmas=SIGMAS, dry=True)
    samples, eta = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0.7, 0.7, 0])
    noise, sigmas = start.trajectory.latents[:, 0], start.trajectory.sigmas
    shared = start.branch(fork(policy.at(start), noise, sigmas, flow_sde, samples, eta, range(6)), samples)
    apart = replace(shared, trajectory=replace(shared.trajectory, nodes=None))
    rows, steps = shared.mask.nonzero().flip(0).unbind(1)
    weights = torch.randn(12, *noise.shape[1:])
    velocities, gradients, asked = [], [], []
    for rollout in (shared, apart):
        before = policy.forwards
        velocity = policy.velocity(rollout, rows, steps)
        asked.append(policy.forwards - before)
        (velocity * weights).sum().backward()
        velocities.append(velocity.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
        policy.model.zero_grad()
    # two states at the first stochastic step, six at the second
    assert asked == [2 + 6, 12]
    torch.testing.assert_close(*velocities)
    torch.testing.assert_close(*gradients)
