"""What every model family must do, each on a tiny random pipeline of its real class."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance, DDIMScheduler, DiffusionPipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from flowalign.data import Source
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import DATA, PIPELINES, Tiny, _resolved, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.sources import opened
from samplers import All, Kernel, ddim, flow_sde
from samplers import ode as euler

# of different lengths; two of one group, which a call makes together where it makes no others
PROMPTS = ["a red circle", "a red circle", "two blue squares", "a green triangle above a blue circle"]
SEEDS = [4, 5, 6, 7]
NEGATIVE = ["", "", "three red circles", "noise"]
"""where guidance asks for them"""
STEPS = 3
EVERY_STEP = All().etas(STEPS, 0.7, 0, 0)


# of the module, so that all tests of one family follow each other and share its policy
@pytest.fixture(scope="module", params=sorted(PIPELINES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def a_megapixel_is_much() -> Iterator[None]:
    """Pipelines that edit bring pictures to a megapixel first, which takes a tiny network minutes."""
    with pytest.MonkeyPatch.context() as patch:
        of_small_areas(patch)
        yield


def of_small_areas(patch: pytest.MonkeyPatch) -> None:
    of_area, area = pipeline_qwenimage_edit.calculate_dimensions, 32 * 32
    patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: of_area(area, ratio))
    patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area)
    # whose pipeline takes no other size than the area's
    of_sides = pipeline_longcat_image_edit.calculate_dimensions
    patch.setattr(pipeline_longcat_image_edit, "calculate_dimensions", lambda _, ratio: of_sides(16 * 32, ratio))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


def draw_pictures(folder: Path) -> list[str]:
    """Noise, not of the samples' size."""
    rng = np.random.default_rng(0)
    files = []
    for number in range(5):
        noise = rng.integers(0, 255, (5, 9, 3)).astype(np.uint8)
        files.append(str(folder / f"{number}.png"))
        Image.fromarray(noise).resize((36, 20), Image.Resampling.BICUBIC).save(files[-1])
    return files


@pytest.fixture
def first_of_its_network(name: str) -> None:
    """Of what is the network's own, one pipeline for each class of networks and way of loading LoRAs is enough."""
    if next(other for other in PIPELINES if network_of(other) == network_of(name)) != name:
        pytest.skip("another pipeline has this network")


def network_of(name: str) -> tuple[list[str], list[str]]:
    """Classes of a pipeline's denoisers, and of what reads its LoRAs."""
    made = PIPELINES[name]
    denoisers = [made.components[key] for key in ("unet", "transformer", "transformer_2") if key in made.components]
    bases = [base.__name__ for base in getattr(diffusers, made.pipeline).__mro__]
    classes = [_resolved(DATA["parts"], part)["class"] for part in denoisers]
    return classes, [base for base in bases if base.endswith("LoraLoaderMixin")]


@pytest.fixture(scope="module")
def tiny(name: str, pictures: list[str]) -> Tiny:
    return from_pictures(PIPELINES[name], pictures)


def from_pictures(made: Tiny, pictures: list[str]) -> Tiny:
    """With a picture for each prompt, where it makes samples from pictures."""
    if not made.images:
        return made
    mask = pictures[4] if made.masked else None
    # the second as the first
    sources = [Source(tuple(pictures[(i + n) % 4] for n in range(made.images)), mask) for i in (0, 0, 1, 2)]
    return dataclasses.replace(made, sources=sources)


@pytest.fixture(scope="module")
def policy(name: str) -> DiffusersPolicy:
    """As it was built: what no test trains."""
    return DiffusersPolicy(build(name), encode_options=PIPELINES[name].encode)


@pytest.fixture
def fresh(name: str) -> DiffusersPolicy:
    """A test's own, to train."""
    return DiffusersPolicy(build(name), encode_options=PIPELINES[name].encode)


@pytest.fixture(scope="module")
def together(policy: DiffusersPolicy, tiny: Tiny) -> Rollout:
    """All samples in one batch."""
    return roll(policy, tiny)


@pytest.fixture(scope="module")
def in_parts(policy: DiffusersPolicy, tiny: Tiny) -> Rollout:
    """Three samples and then one."""
    return roll(policy, tiny, batch_size=3)


@pytest.fixture(scope="module")
def guided(policy: DiffusersPolicy, tiny: Tiny) -> Tensor:
    """What ODE sampling makes with guidance before any training."""
    return ode(policy, tiny, 3.0)


def roll(policy: DiffusersPolicy, tiny: Tiny, **settings: Any) -> Rollout:
    settings = {"steps": STEPS, "kernel": flow_sde, "eta": EVERY_STEP, "guidance": 3.0} | settings
    metadata: list[dict[str, Any]] = [{"image": own.images, "mask": own.mask} for own in tiny.sources or ()]
    if policy.family.negative(settings["guidance"]):
        records = metadata or [{}] * len(PROMPTS)
        metadata = [record | {"negative_prompt": text} for record, text in zip(records, NEGATIVE, strict=True)]
        settings = settings | ({"guidance_2": 2.0} if len(policy.networks) == 2 else {})
    return policy.sample(PROMPTS, SEEDS, metadata=metadata, **tiny.call, **settings)


def ode(policy: DiffusersPolicy, tiny: Tiny, guidance: float) -> Tensor:
    """Pixels of our ODE sampling, in [0, 1], or waves."""
    rollout = roll(policy, tiny, kernel=euler, eta=None, guidance=guidance)
    with torch.no_grad():
        return policy.decode_pixels(rollout.whole(rollout.trajectory.final))


def plain(pipe: DiffusionPipeline, policy: DiffusersPolicy, tiny: Tiny, guidance: float) -> Tensor:
    """Pixels of the pipeline's own call."""
    if hasattr(pipe, "unet"):
        # Stable Diffusion's own scheduler is of a higher order
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False, set_alpha_to_one=True)
    seen: list[Tensor] = []
    if policy.family.name == "cosmos2":
        # its last step else stays at the last noise level, and its guardrail sees pixels of 8 bits
        pipe.scheduler.register_to_config(final_sigmas_type="zero")
        decode = pipe.vae.decode
        pipe.vae.decode = lambda *args, **more: seen.append(decode(*args, **more)[0]) or (seen[-1],)
    guided = policy.family.arguments(guidance)
    if hasattr(pipe, "guider"):
        pipe.guider = ClassifierFreeGuidance(1.0 if "distilled_guidance_scale" in guided else guidance)
    everyone = list(range(len(PROMPTS)))
    # where it takes no sides, they are the picture's
    accepted = inspect.signature(pipe.__call__).parameters
    call = {policy.family.renamed.get(name, name): value for name, value in tiny.call.items()}
    call = {name: value for name, value in call.items() if name in accepted}
    if policy.family.causal:
        frames = (tiny.call["num_frames"] - 1) // pipe.vae_scale_factor_temporal + 1
        call |= {"ar_step": STEPS, "causal_block_size": frames // tiny.call["chunks"]}
    made = []
    # a call knows the pictures of one sample, and no negative prompt is not the same as an empty one
    for rows in [[i] for i in everyone] if tiny.sources or tiny.alone else [everyone[:2], everyone[2:]]:
        texts = [NEGATIVE[i] for i in rows]
        if policy.family.negative(guidance):
            guided |= {"guidance_scale_2": 2.0} if len(policy.networks) == 2 else {}
            if "negative_prompt" not in accepted:
                guided |= {"negative_prompt_embeds": pipe.encode_prompt(texts, **tiny.encode)[0]}
            elif tiny.negative or texts[0]:
                guided |= {"negative_prompt": texts}
        given = {}
        if tiny.sources:
            given = tiny.source_inputs(*opened(tiny.sources[rows[0]], (tiny.call["width"], tiny.call["height"])))
        prompts, sources = [PROMPTS[i] for i in rows], [torch.Generator().manual_seed(SEEDS[i]) for i in rows]
        asked = {"prompt": prompts[0] if tiny.alone else prompts}
        if "class_labels" in accepted:
            asked = {"class_labels": pipe.get_label_ids(prompts)}
        if tiny.alone and "negative_prompt" in guided:
            guided |= {"negative_prompt": texts[0]}
        made += pipe(
            **asked,
            generator=sources[0] if tiny.alone else sources,
            num_inference_steps=STEPS,
            output_type="pt",
            return_dict=False,
            **call,
            **tiny.encode,
            **guided,
            **given,
        )[0]
    pixels = torch.cat(seen)[:, :, 0] if seen else torch.stack(made)
    if seen or policy.family.name == "prx_pixel":
        # whose tensors are not postprocessed
        pixels = (pixels / 2 + 0.5).clamp(0, 1)
    return pixels.transpose(1, 2) if pixels.dim() == 5 else pixels


def pairs(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """All (sample, step) pairs in random order."""
    batch, steps = rollout.trajectory.mask.shape
    all_pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(steps))
    return all_pairs[torch.randperm(len(all_pairs))].unbind(1)


def train(policy: DiffusersPolicy) -> None:
    """By a LoRA, or all weights where diffusers has no adapters for the network."""
    if policy.family.lora_targets:
        policy.add_lora(rank=2, alpha=4)
    else:
        policy.train_all()


def scramble(policy: DiffusersPolicy, scale: float = 0.1) -> None:
    """Move every trained weight, as training would."""
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(scale * torch.randn_like(parameter))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_ode_sampling_is_the_pipelines_own_call(
    name: str, policy: DiffusersPolicy, tiny: Tiny, guided: Tensor, guidance: float
) -> None:
    expected = plain(build(name), policy, tiny, guidance)
    assert expected.std() > 0.01
    own = guided if guidance == 3.0 else ode(policy, tiny, guidance)
    torch.testing.assert_close(own, expected, atol=policy.family.tolerance, rtol=0)


def test_what_guidance_has_no_use_for_is_refused(policy: DiffusersPolicy, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="guidance_rescale is not supported"):
        roll(policy, tiny, guidance_rescale=0.7)
    if len(policy.networks) == 1:
        with pytest.raises(ConfigError, match="guidance_2 is of a second denoiser"):
            roll(policy, tiny, guidance_2=2.0)
    if not tiny.sources:
        with pytest.raises(ConfigError, match="negative_prompt: the guidance of"):
            roll(policy, tiny, guidance=1.0, negative_prompt="noise")


@pytest.mark.parametrize("kernel", [ddim, flow_sde], ids=["ddim", "flow_sde, guided"])
def test_ratio_is_one_after_a_rollout(policy: DiffusersPolicy, tiny: Tiny, in_parts: Rollout, kernel: Kernel) -> None:
    """In any micro-batch of any mix of samples and steps, of rollouts joined from batches of other prompts."""
    rollout = in_parts if kernel is flow_sde else roll(policy, tiny, kernel=kernel, guidance=1.0, batch_size=3)
    assert rollout.trajectory.mask.any()
    samples, steps = pairs(rollout)
    old = rollout.trajectory.log_prob[samples, steps]
    parts = zip(samples.split(5), steps.split(5), strict=True)
    with torch.no_grad():
        new = torch.cat([policy.score(rollout, *part).log_prob for part in parts])
    torch.testing.assert_close(torch.exp(new - old), torch.ones(len(old)), atol=tiny.ratio, rtol=0)
    assert policy.verify(rollout) < policy.family.tolerance


def test_batch_composition_does_not_change_a_sample(
    policy: DiffusersPolicy, together: Rollout, in_parts: Rollout
) -> None:
    """Of three samples and of one against all four."""
    whole, parts = together.trajectory, in_parts.trajectory
    torch.testing.assert_close(parts.latents, whole.latents, atol=policy.family.tolerance, rtol=1e-4)
    torch.testing.assert_close(parts.log_prob, whole.log_prob, atol=policy.family.tolerance, rtol=0)


def test_branches_are_replayed_under_the_conditions_of_their_samples(
    policy: DiffusersPolicy, in_parts: Rollout
) -> None:
    rollout = in_parts
    rows = torch.tensor([3, 0])
    branch = rollout.branch(rollout.trajectory[rows], rows)
    with torch.no_grad():
        for step in (0, STEPS - 1):
            at = torch.full((2,), step)
            velocity = policy.velocity(branch, torch.arange(2), at)
            torch.testing.assert_close(
                velocity.float(), rollout.trajectory.velocity[rows, at], atol=policy.family.tolerance, rtol=1e-4
            )


@pytest.mark.usefixtures("first_of_its_network")
def test_every_lora_weight_gets_a_gradient_and_no_frozen_one(fresh: DiffusersPolicy, tiny: Tiny) -> None:
    train(fresh)
    scramble(fresh)
    rollout = roll(fresh, tiny)
    velocity = fresh.velocity(rollout, *pairs(rollout)).float()
    (velocity * torch.randn_like(velocity)).sum().backward()
    trained = fresh.trainable()
    assert trained
    for part, parameter in fresh.denoiser.named_parameters():
        if part not in trained:
            assert parameter.grad is None, part
        elif any(unused in part for unused in tiny.unused):
            assert parameter.grad is None or not parameter.grad.any(), part
        else:
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), part


@pytest.mark.usefixtures("first_of_its_network")
def test_weights_that_the_network_cannot_use_are_not_trained(
    name: str, fresh: DiffusersPolicy, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = fresh.untrained
    if not unusable:
        pytest.skip("it can use all")
    if not fresh.family.lora_targets:
        fresh.train_all()
        assert fresh.trainable() and not any(part.startswith(unusable) for part in fresh.trainable())
        return
    everything, linear, published = (DiffusersPolicy(build(name), encode_options=tiny.encode) for _ in range(3))
    everything.train_all()
    linear.add_lora(2, 4, "all-linear")
    # a published adapter may have them
    with monkeypatch.context() as patch:
        patch.setattr(type(fresh.family), "dead_ends", ())
        published.add_lora(2, 4, "all-linear")
        assert any(part.startswith(unusable) for part in published.trainable())
        published.save(tmp_path)
    fresh.start_from_lora(tmp_path)
    for policy in (everything, linear, fresh):
        assert policy.trainable() and not any(part.startswith(unusable) for part in policy.trainable())


@pytest.mark.usefixtures("first_of_its_network")
def test_the_unconditional_branch_of_guidance_can_go_without_a_gradient(
    fresh: DiffusersPolicy, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fresh.family.negative(3.0):
        pytest.skip("its guidance has one branch")
    train(fresh)
    scramble(fresh)
    rollout = roll(fresh, tiny)
    samples, steps = pairs(rollout)
    weight = torch.randn_like(rollout.trajectory.velocity[samples, steps])

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        fresh.denoiser.zero_grad()
        velocity = fresh.velocity(rollout, samples, steps).float()
        (velocity * weight).sum().backward()
        return velocity, {name: p.grad.clone() for name, p in fresh.trainable().items() if p.grad is not None}

    both, gradient_of_both = gradients()
    mixed = fresh.family.velocity

    def detached(outputs: list[Any], copies: list[int], guidance: float) -> Tensor:
        """The family's formula, its unconditional output detached: the one that no guidance is without."""
        branches = [half for output in outputs for half in halves(output, 2 // len(outputs))]
        leaves = [torch.as_tensor(own).detach().requires_grad_() for own in map(stacked, branches)]
        without = mixed(joined(leaves, outputs), copies, 1.0).sum()
        sizes = [grad.abs().max() for grad in torch.autograd.grad(without, leaves)]
        [unconditional] = [n for n in range(2) if sizes[n] < 1e-5 * sizes[1 - n]]
        parts = [stacked(own) for own in branches]
        parts[unconditional] = parts[unconditional].detach()
        return mixed(joined(parts, outputs), copies, guidance)

    monkeypatch.setattr(fresh.family, "velocity", detached)
    _, literal = gradients()
    monkeypatch.undo()
    fresh.guidance_gradient = "conditional"
    conditional, own = gradients()

    close = {"atol": fresh.family.tolerance, "rtol": 1e-3}
    torch.testing.assert_close(conditional, both, **close)
    scale = max(grad.abs().max() for grad in literal.values())
    assert own.keys() == literal.keys()
    for part, grad in literal.items():
        torch.testing.assert_close(own[part] / scale, grad / scale, **close)
    assert any((own[part] - grad).abs().max() > 1e-2 * scale for part, grad in gradient_of_both.items())


def halves(output: Any, count: int) -> list[Any]:
    """The branches in the output of one call, a tensor or a list of tensors."""
    if isinstance(output, Tensor):
        return list(output.chunk(count))
    size = len(output) // count
    return [output[i * size : (i + 1) * size] for i in range(count)]


def stacked(branch: Any) -> Tensor:
    return branch if isinstance(branch, Tensor) else torch.stack(branch)


def joined(branches: list[Tensor], outputs: list[Any]) -> list[Any]:
    """The inverse of `halves` for all calls."""
    if len(outputs) == 2:
        return branches
    whole = torch.cat(branches)
    return [whole if isinstance(outputs[0], Tensor) else list(whole)]


@pytest.mark.usefixtures("first_of_its_network")
def test_a_saved_lora_gives_the_same_picture_in_plain_diffusers(
    name: str, fresh: DiffusersPolicy, tiny: Tiny, guided: Tensor, tmp_path: Path
) -> None:
    if not fresh.family.lora_targets:
        with pytest.raises(ConfigError, match="model.lora: diffusers has no adapters for .*; null trains all weights"):
            fresh.add_lora(rank=2, alpha=8)
        return
    fresh.add_lora(rank=2, alpha=8)
    scramble(fresh, 0.2)
    expected = ode(fresh, tiny, 3.0)
    assert (expected - guided).abs().max() > 1e-2
    fresh.save(tmp_path)
    again = DiffusersPolicy(build(name), encode_options=tiny.encode)
    again.load(tmp_path)
    torch.testing.assert_close(ode(again, tiny, 3.0), expected, atol=fresh.family.tolerance, rtol=0)
    pipe = build(name)
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(tmp_path)
        if len(fresh.networks) > 1:
            second = "pytorch_lora_weights_transformer_2.safetensors"
            pipe.load_lora_weights(tmp_path, weight_name=second, load_into_transformer_2=True)
    else:
        pipe.transformer.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(plain(pipe, fresh, tiny, 3.0), expected, atol=fresh.family.tolerance, rtol=0)


@pytest.mark.usefixtures("first_of_its_network")
def test_a_saved_denoiser_gives_the_same_picture(name: str, fresh: DiffusersPolicy, tiny: Tiny, tmp_path: Path) -> None:
    fresh.train_all()
    scramble(fresh, 0.02)
    fresh.save(tmp_path)
    pipe = build(name)
    for part, network in fresh.networks.items():
        setattr(pipe, part, type(network).from_pretrained(tmp_path / part))
    torch.testing.assert_close(
        plain(pipe, fresh, tiny, 3.0), ode(fresh, tiny, 3.0), atol=fresh.family.tolerance, rtol=0
    )


@pytest.mark.usefixtures("first_of_its_network")
def test_bfloat16_stays_close_to_float32(
    name: str, policy: DiffusersPolicy, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Final latents within a tenth of their size of float32's, and replay within a twentieth of the rollout."""
    exact = roll(policy, tiny, eta=None).trajectory.final
    # earlier versions of torch draw other numbers in 16 bits
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, dtype=None, **more: draw(*size, **more).to(dtype))
    half = DiffusersPolicy(build(name).to(torch.bfloat16), encode_options=tiny.encode)
    rollout = roll(half, tiny, eta=None)
    assert rollout.trajectory.latents.dtype == torch.float32
    assert (rollout.trajectory.final - exact).norm() < 0.1 * exact.norm()
    assert half.verify(rollout) < 5e-2


def test_sizes_that_cannot_be_made_are_refused_with_those_that_can(policy: DiffusersPolicy, tiny: Tiny) -> None:
    for side, size in tiny.call.items():
        if side != "num_frames" and policy.family.multiple(policy.pipeline) == 1:
            continue  # any would do
        with pytest.raises(ConfigError, match=rf"cannot make .*{side} {size + 1}.*{size}.* work$"):
            roll(policy, dataclasses.replace(tiny, call=tiny.call | {side: size + 1}))


def test_pictures(policy: DiffusersPolicy, tiny: Tiny, together: Rollout) -> None:
    made = policy.decode(together, batch_size=3)
    assert len(made) == len(PROMPTS)
    if policy.family.makes_sound:
        length = int(tiny.call["duration"] * 1600)
        assert {(sound.waveform.shape, sound.rate) for sound in made} == {((2, length), 1600)}
        with torch.no_grad():
            waves = policy.decode_pixels(together.trajectory.final)
        assert waves.min() < 0 < waves.max()
        torch.testing.assert_close(torch.stack([torch.from_numpy(sound.waveform) for sound in made]), waves)
        return
    for picture in made:
        frames = picture if "num_frames" in tiny.call else [picture]
        assert len(frames) == tiny.call.get("num_frames", 1)
        assert {frame.size for frame in frames} == {(tiny.call["width"], tiny.call["height"])}
