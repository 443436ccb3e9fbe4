"""The table of models: what is registered is tested and documented."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.evaluation.benchmarks.run import own_sampling
from flowalign.planning.random_models import random_pipeline
from flowalign.planning.tiny_pipelines import PIPELINES, Unguarded, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.families import Family, family_of
from flowalign.registry import names, resolve
from flowalign.training import Trainer
from flowalign.training.building import build_policy
from samplers import All, flow_sde
from samplers.completion import complete, path
from tests.flowalign.policies.diffusion import tried

DOCS = Path(__file__).parents[4] / "docs" / "models.md"


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """The pipeline classes that the conformance suite has a tiny pipeline of."""
    return {type(build(name)).__name__ for name in PIPELINES}


@pytest.mark.parametrize("name", names("models"))
def test_every_model_is_documented_and_conforms(name: str, tested: set[str]) -> None:
    family: type[Family] = resolve("models", name)
    assert family.pipelines and set(family.pipelines) <= tested
    rows = [line for line in DOCS.read_text().splitlines() if f"| `{name}` |" in line]
    assert len(rows) == 1 and all(f"`{pipeline}`" in rows[0] for pipeline in family.pipelines)
    # guidance that a class does not name itself stands in the table
    assert family.guidance.split(" in one call")[0].split(" a step")[0] in rows[0]


def test_the_table_of_what_is_run_is_that_of_the_tests(tmp_path: Path) -> None:
    assert tried.on_page()[1] == tried.table(), "python -m tests.flowalign.policies.diffusion.tried --table"
    passed = tried.tried()
    assert passed.keys() == PIPELINES.keys()
    for method in passed["dit"]:
        (tmp_path / method).mkdir()
        tried.iterate("dit", method, tmp_path / method)
    assert passed["dit"] == list(tried.METHODS)


def test_a_class_is_asked_for_by_its_word_or_number(tmp_path: Path) -> None:
    pipeline = build("dit")
    family = family_of("DiTPipeline")
    encoded = family.encode(pipeline, ["two blue squares", "207", ""])["class_labels"]
    # an empty prompt is the class of no class, as in guidance
    assert [int(number) for number in encoded] == [1, 207, 1000]
    with pytest.raises(ConfigError, match="'a cat' is none that it knows by its word or number"):
        family.encode(pipeline, ["a cat"])
    pipeline.save_pretrained(tmp_path)
    own = [f"model.path={tmp_path}", "model.encode={}", "rollout.sigmas=null", "evaluation.sigmas=null"]
    with pytest.raises(ConfigError, match="model.lora: diffusers has no adapters for the network of DiTPipeline; null"):
        build_policy(load(recipe("tiny_sd3/flow_grpo"), own), torch.device("cpu"))


def test_edits_of_longcat_see_half_the_picture_and_refuse_prompts_at_which_diffusers_fails() -> None:
    pipeline, picture = build("longcat_image_edit"), Image.new("RGB", (112, 56))
    family = family_of("LongCatImageEditPipeline")
    pipeline.image_processor_vl.size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    pipeline.tokenizer_max_length = 4
    [embeds] = family.encode(pipeline, ["two red red red"], image=[picture])["prompt_embeds"]
    # of half the sides, two tokens of 28 pixels between two marks
    assert len(embeds) == 2 + 2 + 4
    with pytest.raises(ConfigError, match=r"takes prompts of up to 4 tokens, and '\"red\"' has 5; a shorter one works"):
        family.encode(pipeline, ['"red"'], image=[picture])
    with pytest.raises(ConfigError, match=r"4 tokens and takes no max_sequence_length; model.encode=\{\} works"):
        family.encode(pipeline, ["red"], image=[picture], max_sequence_length=77)


def test_glm_images_tokens_are_drawn_once_a_sample_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, pipe = PIPELINES["glm_image"], build("glm_image")
    policy, settings = DiffusersPolicy(pipe, encode_options=tiny.encode), {"steps": 2, "guidance": 2.0} | tiny.call
    # read letter by letter, so that its embedding is longer than that of no text
    prompt = 'a sign "RED"'
    state = torch.get_rng_state()
    rollout = policy.sample([prompt] * 2, [4, 5], **settings)
    assert torch.equal(torch.get_rng_state(), state)
    own = torch.Generator().manual_seed(4)
    call = tiny.call | tiny.encode | {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt"}
    plain = build("glm_image")(prompt, generator=own, **call).images
    torch.testing.assert_close(policy.decode_pixels(rollout.trajectory.final[:1]), plain, atol=1e-4, rtol=0)
    [conditions] = rollout.conditions.parts
    given, _ = conditions.gather(torch.arange(2), torch.zeros(2, dtype=torch.long))
    assert not torch.equal(*given["prior_token_id"])
    monkeypatch.setattr(pipe, "generate_prior_tokens", None)
    again = policy.sample([prompt] * 2, [4, 5], **settings)
    assert torch.equal(again.trajectory.final, rollout.trajectory.final)
    with pytest.raises(ConfigError, match="GLM-Image has no usual size; set height and width"):
        policy.sample([prompt], [4], steps=1)
    # clean latents and pictures are each other's inverse but for the VAE
    monkeypatch.setattr(pipe.vae, "decode", lambda z, return_dict: (z,))
    monkeypatch.setattr(pipe.vae, "encode", lambda z: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: z)))
    latents = rollout.trajectory.final
    torch.testing.assert_close(policy.family.latents(pipe, policy.family.decode(pipe, latents)), latents)


@pytest.mark.parametrize(("spacing", "steps"), [("trailing", 7), ("linspace", 5), ("leading", 7)])
def test_ddims_pictures_whatever_its_spacing(spacing: str, steps: int) -> None:
    """Its steps are of 1000 // steps, which is not where the next timestep is."""
    scheduler = diffusers.DDIMScheduler.from_config(
        build("sd15").scheduler.config, timestep_spacing=spacing, clip_sample=False, set_alpha_to_one=True
    )
    prompts, call = ["a red circle", "two blue squares"], PIPELINES["sd15"].call
    pipe = build("sd15")
    pipe.scheduler = scheduler
    policy = DiffusersPolicy(pipe)
    rollout = policy.sample(prompts, [4, 5], steps=steps, guidance=3.0, **call)
    with torch.no_grad():
        pixels = (policy.family.decode(pipe, rollout.trajectory.final) / 2 + 0.5).clamp(0, 1)
    own = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    plain = pipe(prompts, generator=own, num_inference_steps=steps, guidance_scale=3.0, output_type="pt", **call).images
    torch.testing.assert_close(pixels, plain, atol=1e-4, rtol=0)
    # a replay knows the steps too, and so do completions
    assert policy.verify(rollout) < 1e-4
    rows = torch.arange(2)
    finished = complete(
        policy.at(rollout), rollout.trajectory.latents[:, 0], rows, [path(0, steps)] * 2, rollout.trajectory.sigmas
    )
    torch.testing.assert_close(finished, rollout.trajectory.final, atol=1e-4, rtol=0)


def test_a_vae_that_overflows_in_float16_decodes_in_float32() -> None:
    """Stable Diffusion XL's, as in its pipeline's own call."""
    pipe = build("sdxl")
    pipe.vae.decoder.conv_in.weight.data *= 1e4
    policy = DiffusersPolicy(pipe.to(torch.float16))
    latents = 30 * torch.randn(1, 4, 4, 8)
    pixels = policy.decode_pixels(latents)
    assert pixels.isfinite().all() and pixels.std() > 0
    assert policy.family.latents(pipe, 2 * pixels - 1).isfinite().all()
    own = pipe.image_processor.postprocess(pipe.vae.decode(latents / pipe.vae.config.scaling_factor)[0], "pt")
    torch.testing.assert_close(pixels, own)


def test_filling_by_a_network_that_sees_no_mask_is_refused() -> None:
    parts = build("sd15").components
    pipeline = diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
    with pytest.raises(ConfigError, match="StableDiffusionInpaintPipeline cannot be trained.*sees no mask"):
        DiffusersPolicy(pipeline)


@pytest.mark.parametrize(
    ("name", "call", "says"),
    [
        # four latent frames are evened out with those after them
        ("kandinsky5_i2v", {"height": 16, "width": 32, "num_frames": 13}, "fewer frames than num_frames 17"),
        # of an area among its own
        ("hunyuan_video15_i2v", {"height": 8, "width": 16, "num_frames": 5}, "height 12 with width 20 would work"),
    ],
)
def test_what_a_pipeline_cannot_begin_with_a_picture(name: str, call: dict[str, int], says: str) -> None:
    policy = DiffusersPolicy(build(name))
    with pytest.raises(ConfigError, match=says):
        policy.family.check_size(policy.pipeline, call)
    with pytest.raises(ConfigError, match="set the height and width"):
        policy.sample(["a cat"], [0], steps=1, metadata=[{"image": "a.png"}])


@pytest.mark.parametrize("name", ["sd35", "hunyuan_image"])
def test_an_adapter_saved_from_gathered_weights_is_the_adapter(name: str, tmp_path: Path) -> None:
    """As where the network holds shards only; the one pipeline saves adapters itself, the other does not."""
    policy = DiffusersPolicy(build(name))
    policy.add_lora(2, 4)
    trained = policy.trainable()
    for parameter in trained.values():
        torch.nn.init.normal_(parameter)
    gathered = {key: value.clone() for key, value in policy.network.state_dict().items() if key in trained}
    policy.save(tmp_path / "own")
    policy.save(tmp_path / "gathered", gathered)
    own, other = (load_file(tmp_path / folder / "pytorch_lora_weights.safetensors") for folder in ("own", "gathered"))
    assert own.keys() == other.keys() and len(own) == len(trained)
    assert all(torch.equal(value, other[key]) for key, value in own.items())


def test_hidreams_experts_have_the_gradients_of_its_training_mode() -> None:
    """Which asks them in another way; outside of it diffusers' own has none."""
    policy = DiffusersPolicy(build("hidream"), encode_options=PIPELINES["hidream"].encode)
    layer = policy.denoiser.double_stream_blocks[0].block.ff_i
    for parameter in layer.parameters():
        parameter.requires_grad_()
    x = torch.randn(2, 5, 16, requires_grad=True)
    found = []
    for training in (False, True):
        out = layer.train(training)(x)
        inputs = [x, layer.gate.weight, *layer.experts.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-4)
    assert all(own.any() for own in found[0])
    with pytest.raises(ConfigError, match="of 16 x 8; 8 x 8 works"):
        policy.family.check_size(policy.pipeline, {"height": 16, "width": 8})


def test_cosmos_ends_on_the_predicted_picture_and_walks_as_its_pipeline_does_until_then() -> None:
    """EDM's states divided by 1 + k at the levels k / (1 + k), Karras' k from 80 to 0.002."""
    tiny, own = PIPELINES["cosmos2"], build("cosmos2")
    call = {"num_inference_steps": 4, "output_type": "latent", **tiny.call, **tiny.encode}
    seeds = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    prompts = ["a red circle", "two blue squares"]
    theirs = own(prompts, negative_prompt=["", ""], generator=seeds, guidance_scale=2.0, **call).images
    policy = DiffusersPolicy(build("cosmos2"), encode_options=tiny.encode)
    rollout = policy.sample(prompts, [4, 5], steps=4, guidance=3.0, **tiny.call)
    trajectory = rollout.trajectory
    k = 0.002
    assert trajectory.sigmas[[0, -2, -1]].tolist() == pytest.approx([80 / 81, k / (1 + k), 0])
    torch.testing.assert_close(trajectory.latents[:, -2] * (1 + k), theirs, atol=1e-4, rtol=0)
    predicted = (theirs - k * trajectory.velocity[:, -1]) / (1 + k)
    torch.testing.assert_close(trajectory.final, predicted, atol=1e-4, rtol=0)
    # a start noise that is moved nowhere is the same start
    policy.start_noise = lambda start: start.trajectory.latents[:, 0]
    again = policy.sample(prompts, [4, 5], steps=4, guidance=3.0, **tiny.call)
    torch.testing.assert_close(again.trajectory.final, trajectory.final, atol=1e-4, rtol=0)
    policy.start_noise = None
    # levels that an algorithm asks for are its own, but for those beyond the first of the schedule
    clean = policy.clean(prompts, trajectory.final, [4, 5], levels=torch.tensor([1.0, 0.5, 0.25]), **tiny.call)
    assert clean.sigmas.tolist() == pytest.approx([80 / 81, 0.5, 0.25])
    with pytest.raises(ConfigError, match="guides above 2 only"):
        policy.sample(prompts, [4, 5], steps=4, guidance=1.5, **tiny.call)


def test_cosmos_says_what_it_needs_to_load(tmp_path: Path) -> None:
    build("cosmos2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="needs cosmos_guardrail: pip install cosmos_guardrail$"):
        DiffusersPolicy.from_pretrained(tmp_path)
    # a plan and a dry run do without
    random = random_pipeline(str(tmp_path), torch.float32, torch.device("cpu"))
    assert isinstance(random.safety_checker, Unguarded) and random.transformer.config.num_layers == 2


def test_ideograms_other_network_guides_and_stays() -> None:
    tiny = PIPELINES["ideogram4"]
    policy = DiffusersPolicy(build("ideogram4"), encode_options=tiny.encode)
    policy.add_lora(2, 4)
    guide, call = policy.guide, {"steps": 2, **tiny.call}
    assert guide is policy.pipeline.unconditional_transformer and not any(p.requires_grad for p in guide.parameters())
    prompts = ["a red circle", "a green triangle above a blue circle"]
    plain, guided = (policy.sample(prompts, [4, 5], guidance=scale, **call) for scale in (1.0, 3.0))
    # without guidance it is not asked
    assert (plain.conditions.branches, guided.conditions.branches) == (1, 2)
    # what is kept are features of texts, as many as the longest has tokens, and none for the other network
    kept = [calls["encoder_hidden_states"].shape[1] for calls in guided.conditions.calls[0]]
    tokens = [calls["indicator"].shape[1] for calls in guided.conditions.calls[0]]
    assert kept == [7, 0] and tokens == [7 + 32, 32]
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.3)
    other = policy.sample(prompts, [4, 5], guidance=3.0, **call)
    assert (other.trajectory.final - guided.trajectory.final).abs().max() > 1e-2
    again = policy.sample(prompts, [4, 5], guidance=1.0, **call)
    assert torch.equal(again.trajectory.final, plain.trajectory.final)
    # clean latents and pictures are each other's inverse but for the VAE
    latents = plain.trajectory.final
    seen = policy.pipeline.vae
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "decode", lambda z, return_dict: (z,))
        patch.setattr(seen, "encode", lambda z: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: z)))
        family = policy.family
        torch.testing.assert_close(family.latents(policy.pipeline, family.decode(policy.pipeline, latents)), latents)


SCALES = [7.0, 3.0, 1.0]


def sampled(name: str, guidance: float | list[float], **settings: Any) -> tuple[DiffusersPolicy, Rollout]:
    tiny = PIPELINES[name]
    policy = DiffusersPolicy(build(name), encode_options=tiny.encode)
    call = {"steps": 3, "kernel": flow_sde, "eta": All().etas(3, 0.7, 0, 0), **tiny.call}
    return policy, policy.sample(["a red circle", "two blue squares"], [4, 5], guidance=guidance, **call | settings)


def test_ideograms_scales_of_each_step_are_its_pipelines() -> None:
    tiny, own = PIPELINES["ideogram4"], [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    call = {"num_inference_steps": 3, "output_type": "pt", **tiny.call, **tiny.encode}
    prompts = ["a red circle", "two blue squares"]
    plain = build("ideogram4")(prompts, generator=own, guidance_schedule=SCALES, **call).images
    policy, rollout = sampled("ideogram4", SCALES, eta=None)
    torch.testing.assert_close(policy.decode_pixels(rollout.trajectory.final), plain, atol=1e-4, rtol=0)
    # the network without a prompt is asked at every step, be its scale 1 or not
    assert policy.forwards == 2 * 3 * 2 and rollout.conditions.branches == 2
    one = policy.sample(prompts, [4, 5], guidance=7.0, steps=3, **tiny.call)
    assert (rollout.trajectory.final - one.trajectory.final).abs().max() > 1e-2
    alike = policy.sample(prompts, [4, 5], guidance=[7.0] * 3, steps=3, **tiny.call)
    assert torch.equal(alike.trajectory.final, one.trajectory.final) and alike.guidance == (7.0,)
    own_call = own_sampling(policy)
    assert own_call.steps == 48 and own_call.guidance == [7.0] * 45 + [3.0] * 3


# two copies in one call; of a norm that is no line in the scale; texts called apart; two networks; chunks of frames
@pytest.mark.parametrize("name", ["ideogram4", "sd35", "qwen_image", "cogview4", "wan22_14b", "skyreels_v2_df"])
def test_every_step_is_guided_by_its_own_scale(name: str) -> None:
    policy, rollout = sampled(name, SCALES)
    _, one = sampled(name, SCALES[0])
    torch.testing.assert_close(rollout.trajectory.latents[:, 1], one.trajectory.latents[:, 1], atol=1e-4, rtol=0)
    # a micro-batch of several steps, in no order
    samples, steps = rollout.mask.nonzero().flip(0).unbind(1)
    assert len(steps.unique()) > 1
    scores = policy.score(rollout, samples, steps)
    torch.testing.assert_close(scores.log_prob, rollout.log_prob[samples, steps], atol=1e-5, rtol=0)
    velocities = policy.velocity(rollout, samples, steps)
    apart = []
    for scale in SCALES:
        guided = policy.velocity(replace(rollout, guidance=(scale,)), samples, steps)
        rows = torch.tensor(SCALES)[steps % 3] == scale
        torch.testing.assert_close(velocities[rows], guided[rows], atol=0, rtol=0)
        apart.append((velocities[~rows] - guided[~rows]).abs().max() > 1e-4)
    assert all(apart)
    # a schedule cut short keeps its scales
    if name == "skyreels_v2_df":
        assert rollout.until(1).guidance == ((7.0, 3.0),)


@pytest.mark.parametrize(
    ("name", "guidance", "settings", "says"),
    [
        ("flux", SCALES, {}, "FluxPipeline takes the scale as an input of its network, one for all steps; one number"),
        ("ltx2", SCALES, {}, "LTX2Pipeline makes a sound along with the pictures by one scale; one number works"),
        ("sd35", [3.0, 2.0], {}, "guidance: 2 scales for 3 steps; give one a step, or one for all"),
        ("sd35", [3.0, 2.0, 0.5], {}, "guidance 0.5 is below 1"),
        ("sd35", SCALES, {"cache": object}, "StableDiffusion3Pipeline takes one scale of guidance, and a cache needs"),
    ],
)
def test_scales_that_cannot_be_of_each_step(
    name: str, guidance: list[float], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        sampled(name, guidance, **settings)


def test_a_run_with_scales_of_each_step(tmp_path: Path) -> None:
    tiny = PIPELINES["ideogram4"]
    (tmp_path / "prompts.txt").write_text("two red circles\n")
    config: dict[str, Any] = {
        "model": {"path": "tiny_sd3", "lora": {"rank": 2, "alpha": 4}, "encode": tiny.encode},
        "data": {"prompts": str(tmp_path / "prompts.txt")},
        "rewards": [{"name": "jpeg_size"}],
        "algorithm": {"name": "flow_grpo"},
        "rollout": {"steps": 3, "eta": 0.7, "guidance": SCALES} | tiny.call,
        "training": {
            "iterations": 1,
            "prompts_per_iteration": 1,
            "group_size": 2,
            "previews": 0,
            "micro_batch_size": 3,
        },
        "output": str(tmp_path),
    }

    def train(**sections: dict[str, Any]) -> dict[str, Any]:
        whole = (
            config
            | {"name": f"run-{len(list(tmp_path.iterdir()))}"}
            | {name: config[name] | changed for name, changed in sections.items()}
        )
        policy = DiffusersPolicy(build("ideogram4"), encode_options=tiny.encode)
        trainer = Trainer(whole, policy, progress=False)
        trainer.train()
        return trainer.metrics.read()[-1]

    assert train()["policy/ratio"] == pytest.approx(1, abs=1e-4)
    # clean samples are noised to levels of their own, which are no steps
    with pytest.raises(ConfigError, match="algorithm.guidance: rollout.guidance has a scale for each step, .*e.g. 7$"):
        train(algorithm={"name": "nft"}, training={"group_size": 2})
    refused = [
        ({"guidance": [7.0, 3.0]}, "rollout.guidance: 2 scales for rollout.steps=3; give one a step, or one number"),
        ({"guidance": [7.0, 3.0, 0.5]}, "rollout.guidance: .*give a number from 1, which is none, or a list"),
        ({"save_every": 1}, "rollout.save_every: a file cannot describe .* guidance has a scale for each step"),
    ]
    for rollout, says in refused:
        with pytest.raises(ConfigError, match=says):
            train(rollout=rollout)
