"""UniGRPO on both networks of a pipeline: the tokens that GLM-Image's language model draws, and the steps after them.

What is compared with: plain calls of the pipeline, and a forward pass of transformers written out here.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from transformers import GlmImageForConditionalGeneration

from flowalign.app.export import write_lora
from flowalign.app.loading import load_for_sampling, load_modules
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.picture_tokens import PictureTokens, PictureWriter
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer

TINY = PIPELINES["glm_image"]
CPU = torch.device("cpu")
SMALL = [
    *"""
evaluation.prompts=null training.iterations=1 training.prompts_per_iteration=2 training.group_size=3
training.updates_per_iteration=1 training.micro_batch_size=8 training.optimizer.warmup_updates=0 training.previews=0
training.ema_decay=null training.ema_every=1 training.optimizer.learning_rate=1e-2 model.dtype=float32
model.gradient_checkpointing=false rollout.steps=3 rollout.height=32 rollout.width=64 algorithm.kl_weight=0
name=run
""".split(),
    "rewards=[{name: jpeg_size}]",
]


def sharp() -> DiffusionPipeline:
    """A tiny pipeline whose language model has likely and unlikely tokens, and draws as the published one does."""
    pipe = build("glm_image")
    network = pipe.vision_language_encoder
    network.lm_head.weight.data.mul_(20)
    network.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75, top_k=40)
    return pipe


def run_of(folder: Path, *overrides: str) -> Trainer:
    policy = DiffusersPolicy(sharp(), encode_options=TINY.encode)
    config = load(recipe("glm_image/uni_grpo"), [*SMALL, f"output={folder}", *overrides])
    return Trainer(config, policy, progress=False)


def plain_log_probs(network: GlmImageForConditionalGeneration, record: PictureTokens, row: int) -> Tensor:
    """[T] of one picture: the prompt in order, the preview in its grid, then the picture in its own."""
    prompt = record.prompt_ids[row][record.prompt_mask[row]]
    tokens = record.completion_ids[row][record.mask[row]]
    places, start = [[i, i, i] for i in range(len(prompt))], len(prompt)
    for _, height, width in reversed(record.grids[row].tolist()):
        places += [[start, start + i, start + j] for i in range(height) for j in range(width)]
        start += max(height, width)
    position_ids = torch.tensor(places).T[:, None]
    logits = network(input_ids=torch.cat([prompt, tokens])[None], position_ids=position_ids).logits[0]
    logits = logits[len(prompt) - 1 : -1] / 0.9
    kth = logits.topk(40).values[:, -1:]
    logits = logits.masked_fill(logits < kth, -torch.inf)
    ordered, order = logits.sort(descending=True)
    chance = ordered.softmax(-1)
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, chance.cumsum(-1) - chance >= 0.75)
    return logits.masked_fill(cut, -torch.inf).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def test_tokens_are_the_pipelines_and_have_the_probabilities_they_were_drawn_with() -> None:
    pipe, call = sharp(), {"height": 64, "width": 96}
    prompts, seeds = ["a red circle", "two", 'a sign "RED"'], [3, 4, 5]
    plain = [
        pipe.generate_prior_tokens([prompt], 64, 96, device=CPU, generator=torch.Generator().manual_seed(seed))[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    writer = PictureWriter(pipe, "vision_language_encoder", CPU)
    state = torch.get_rng_state()
    # the second batch is of other widths
    written = writer.write(prompts, seeds, [0] * 3, call, batch_size=2)
    assert torch.equal(torch.get_rng_state(), state)
    record = written.record
    assert written.texts == prompts and torch.equal(written.arguments["prior_token_ids"], torch.cat(plain))
    # one of the preview, and 2 x 3
    assert isinstance(record, PictureTokens) and record.mask.shape == (3, 7) and record.mask.all()
    rows = torch.tensor([2, 0, 1])
    again, _ = writer.log_probs(record, rows)
    torch.testing.assert_close(again, record.log_prob[rows], atol=1e-4, rtol=0)
    for row in range(3):
        literal = plain_log_probs(pipe.vision_language_encoder, record, row)
        torch.testing.assert_close(literal, record.log_prob[row], atol=1e-4, rtol=0)
    # pictures of another size in the same record
    other = writer.write(["two"], [4], [0], {"height": 32, "width": 64}, 1).record
    joined = PictureTokens.cat([record, other])
    again, _ = writer.log_probs(joined, torch.tensor([3, 1]))
    torch.testing.assert_close(again, joined.log_prob[[3, 1]], atol=1e-4, rtol=0)


def test_the_tokens_gradient_is_that_of_grpo_and_the_picture_is_drawn_from_them(tmp_path: Path) -> None:
    run = run_of(tmp_path, "algorithm.writer.lora=null", "algorithm.text_weight=0.5")
    batch = run.groups.draw(0).batch
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    record, network = experience.rollout.written, run.policy.pipeline.vision_language_encoder
    assert experience.metrics["text/tokens"] == 3 and experience.advantage.any()
    loss, values = run.algorithm.losses(run.policy, experience, experience.items)
    # the first update's ratio is 1: once a picture, for each of its items
    torch.testing.assert_close(values["text/ratio"].mean(), torch.ones(()), atol=1e-4, rtol=0)
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert parameters and not any("visual" in name or "vqmodel" in name for name in parameters)
    gradient = torch.autograd.grad(loss.mean(), list(parameters.values()))
    means = torch.stack([plain_log_probs(network, record, row).mean() for row in range(len(record))])
    total = -(experience.advantage[:, 0] * means).sum()
    literal = torch.autograd.grad(0.5 * total / len(record), list(parameters.values()))
    for name, ours, theirs in zip(parameters, gradient, literal, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")

    ode = run.policy.sample(["two"], [7], steps=2, **TINY.call)
    tokens = run.policy.writer.write(["two"], [7], [0], TINY.call, 1).arguments["prior_token_ids"]
    call = TINY.call | TINY.encode | {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "pt"}
    generator = torch.Generator().manual_seed(7)
    for given in ({"prior_token_ids": tokens}, {}):
        picture = sharp()("two", generator=generator.manual_seed(7), **given, **call).images
        torch.testing.assert_close(run.policy.decode_pixels(ode.trajectory.final), picture, atol=1e-4, rtol=0)
    other = sharp()("two", generator=generator.manual_seed(7), prior_token_ids=(tokens + 1) % 128, **call).images
    assert (other - picture).abs().max() > 1e-3


@pytest.mark.parametrize("lora", [2, None])
def test_both_networks_move_and_plain_diffusers_draws_the_same(lora: int | None, tmp_path: Path) -> None:
    run = run_of(tmp_path, f"algorithm.writer.lora={lora or 'null'}")
    prompt, call = 'a sign "RED"', TINY.call | {"steps": 2}
    policy, family = run.policy, run.policy.family
    policy.writer, writer = None, policy.writer
    before = policy.sample([prompt], [7], **call).trajectory.final
    policy.writer = writer
    start = {name: value.detach().clone() for name, value in run.learner.parameters.items()}
    run.train()
    moved = {name for name, value in run.learner.parameters.items() if not torch.equal(value, start[name])}
    assert any(name.startswith("writer.") for name in moved) and any("lora" in name for name in moved)
    after = policy.sample([prompt], [7], **call)
    if lora is not None:
        assert torch.equal(policy.sample([prompt], [7], rlg=0, **call).trajectory.final, before)
    else:
        with pytest.raises(ConfigError, match="rlg 0 is the base, and the weights that its vision_language_encoder"):
            policy.sample([prompt], [7], rlg=0, **call)
    # tokens of earlier weights are not kept
    policy.writer = None
    assert torch.equal(policy.sample([prompt], [7], **call).trajectory.final, after.trajectory.final)
    assert not torch.equal(after.trajectory.final, before) and len(family.tokens) == 1

    pipe, folder = sharp(), tmp_path / "run" / "lora"
    saved = folder / "vision_language_encoder"
    if lora is None:
        network = GlmImageForConditionalGeneration.from_pretrained(saved)
        network.generation_config = pipe.vision_language_encoder.generation_config
        pipe.vision_language_encoder = network.eval()
    else:
        pipe.vision_language_encoder.load_adapter(str(saved))
    pipe.transformer.load_lora_adapter(str(folder), prefix=None, weight_name="pytorch_lora_weights.safetensors")
    given = TINY.call | TINY.encode | {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "pt"}
    picture = pipe(prompt, generator=torch.Generator().manual_seed(7), **given).images
    torch.testing.assert_close(policy.decode_pixels(after.trajectory.final), picture, atol=1e-4, rtol=0)

    # an export has both, and a LoRA alone would leave one out
    (tmp_path / "export").mkdir()
    index = {"_class_name": type(pipe).__name__, **pipe.config}
    with mock.patch("flowalign.app.export.load_config", lambda base: index):
        files = write_lora(tmp_path / "run", run.config, "diffusers", tmp_path / "export")
    assert [file.name for file in files] == ["pytorch_lora_weights.safetensors", "vision_language_encoder"]
    exported = sorted((tmp_path / "export" / "vision_language_encoder").iterdir())
    assert [file.read_bytes() for file in exported] == [file.read_bytes() for file in sorted(saved.iterdir())]
    with pytest.raises(ConfigError, match="--lora: .* has a writer too .vision_language_encoder."):
        load_for_sampling("tiny_sd3", folder, "float32")

    # what is loaded from the checkpoint, twice as a film does
    again = DiffusersPolicy(sharp(), encode_options=TINY.encode)
    again.load(folder)
    for _ in range(2):
        load_modules(run.config.build_algorithm().modules(again), tmp_path / "run")
    torch.testing.assert_close(again.sample([prompt], [7], **call).trajectory.final, after.trajectory.final)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm.writer.temperature=0.5", "own language model has its own temperature; leave them out"),
        ("model.path=tiny_sd3", "StableDiffusion3Pipeline has no language model that draws a picture's tokens"),
    ],
)
def test_what_an_own_writer_cannot_be_is_refused(change: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(load(recipe("glm_image/uni_grpo"), [*SMALL, f"output={tmp_path}", change]), progress=False)


def test_a_rule_that_cannot_be_scored_again_is_refused() -> None:
    pipe = build("glm_image")
    pipe.vision_language_encoder.generation_config.typical_p = 0.5
    with pytest.raises(ConfigError, match="draws by a TypicalLogitsWarper, which cannot be scored again"):
        PictureWriter(pipe, "vision_language_encoder", CPU)
