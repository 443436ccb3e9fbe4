"""The plan of a run against what is measured on a CPU, and its figures and errors."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flowalign.app.cli.main import main
from flowalign.config import Weighted, load, recipe
from flowalign.errors import ConfigError
from flowalign.planning.plan import _plan, _rewards, advise, measure, memory_of, plan
from flowalign.planning.published_pipelines import NAMES, PARTS, PIPELINES, network
from flowalign.planning.resources import GIB, RunPlan
from flowalign.planning.tiny_pipelines import build
from flowalign.training import Trainer

SMALL = ["evaluation.prompts=null", "training.iterations=1", "training.prompts_per_iteration=2", "rollout.steps=4"]
SMALL += ["training.group_size=4", "training.updates_per_iteration=1", "rollout.guidance=3", "name=run"]
SMALL += ["rollout.sigmas=null", "rollout.share_start_noise=false"]
BILLIONS = {
    "sd15": 0.860,
    "sd15_inpaint": 0.860,
    "sdxl": 2.567,
    "sdxl_inpaint": 2.567,
    "sd35_medium": 2.24,  # and 0.23 of positions, which are no parameters
    "sd35_large": 8.06,
    "flux_dev": 11.9,
    "flux_schnell": 11.9,
    "flux_kontext": 11.9,
    "flux_fill": 11.9,
    "flux2_klein_4b": 3.9,
    "flux2_klein_9b": 9.1,
    "flux2_dev": 32.2,
    "qwen_image": 20.4,
    "qwen_image_edit_2511": 20.4,
    "z_image": 6.15,
    "longcat_image": 6.27,  # its page says 6B
    "skyreels_v2_14b": 14.3,
    "skyreels_v2_1_3b": 1.44,  # with the embedding of frame rates
    "cosmos2_2b": 1.96,
    "cosmos2_14b": 14.3,
    "ideogram4": 9.3,
    "krea2": 12.9,
    "ernie_image": 8.0,  # its page says 8B
    "ovis_image": 7.4,  # its page says 7B
    "aura_flow": 6.8,
    "mochi": 10.0,
    "prx_pixel_7b": 7.0,
    "chrono_edit_14b": 16.4,
    "hidream_i1": 17.1,  # its page says 17B
    "dit_xl_2": 0.75,  # 0.68 on its page; diffusers has the embeddings of classes and times in every block
    "dit_xl_2_512": 0.75,
    "prx_1_3b": 1.2,
    "glm_image": 7.0,  # its page says 7B
    "stable_audio3_medium": 1.45,
    "sana_video_2b": 2.06,
    "wan_vace_1_3b": 2.15,  # with the blocks that read the control
    "wan_vace_14b": 17.3,
    "wan_1_3b": 1.42,
    "wan_14b": 14.3,
    "wan21_i2v_14b": 16.4,
    "wan22_i2v_14b": 14.3,
    "wan22_5b": 5.0,
    "cogview4": 6.37,
    "kandinsky5_lite_video": 2.0,
    "kandinsky5_lite_image": 6.0,
    "kandinsky5_lite_edit": 6.0,
    "hunyuan_video15": 8.3,
    "ltx2": 18.9,
}
"""parameters as the models' pages have them"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(recipe("tiny_sd3/flow_grpo"), [*SMALL, f"output={tmp_path_factory.mktemp('runs')}"])


@pytest.fixture(scope="module")
def made(config: Any) -> RunPlan:
    return plan(config)


def test_operations_and_memory_are_those_of_a_real_iteration(config: Any, made: RunPlan) -> None:
    trainer = Trainer(config, progress=False)
    trainer.algorithm.verify = lambda *_: None
    trainer.learner.mismatch = lambda *_: {}
    seen: dict[str, Any] = {}
    learn = trainer.learner.learn

    def learned(experience: Any, *args: Any) -> Any:
        seen.update(experience=experience, before=counter.get_total_flops())
        return learn(experience, *args)

    trainer.learner.learn = learned
    with FlopCounterMode(display=False) as counter:
        trainer.iterate()
    planned = made.flops["rollout"] + made.flops["decoding"] + made.flops["prompts"]
    assert seen["before"] == pytest.approx(planned, rel=0.1)
    rows = seen["experience"].items
    useful = trainer.learner._with_gradient(seen["experience"], rows)
    # items without an advantage are left out, which a plan cannot know
    share = len(useful) / len(rows)
    assert counter.get_total_flops() - seen["before"] == pytest.approx(made.flops["update"] * share, rel=0.1)

    policy, rollout = trainer.policy, seen["experience"].rollout
    samples, steps = rows[:8].unbind(1)
    for costs, prepare in (
        (made.costs.activations, lambda: None),
        (made.costs.checkpointed, policy.checkpoint_gradients),
    ):
        prepare()
        policy.score(rollout, samples, steps).log_prob.sum().backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            policy.score(rollout, samples, steps).log_prob.sum().backward()
        events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        sizes = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"])
        assert sizes.cumsum(0).max().item() == pytest.approx(8 * costs, rel=0.1)
    whole = sum(p.numel() * 4 for p in policy.network.parameters())
    assert made.memory["update"]["weights"] * GIB == pytest.approx(whole, rel=0.02)


def test_memory_adds_up_and_settings_change_it(config: Any, made: RunPlan) -> None:
    assert made.peak == max(sum(parts.values()) for parts in made.memory.values())
    assert made.costs.checkpointed < made.costs.activations
    update = made.memory["update"]
    assert update["moments"] == 2 * update["gradients"] == 2 * made.costs.trained * 4 / GIB
    shards = memory_of(config, made.costs, gpus=2, shards=2)["update"]
    assert shards["weights"] == pytest.approx(update["weights"] / 2, rel=0.05)
    assert shards["trajectories"] == update["trajectories"] / 2
    stored = config.model_copy(deep=True)
    stored.rollout.store, stored.training.micro_batch_size = "disk", 1
    # of a micro-batch and of the next one
    assert memory_of(stored, made.costs, gpus=1)["rollout"]["trajectories"] == 2 * made.costs.trajectory / GIB
    # an H100 makes 989 / 2 TFLOP/s in TF32
    assert made.seconds["15%"] == pytest.approx(sum(made.flops.values()) / (494.5e12 * 0.15))
    assert made.pictures_per_hour["25%"] > made.pictures_per_hour["15%"]
    # shapes are checked without a network
    assert made.advice == made.notes == []
    unknown = config.model_copy(update={"rewards": [Weighted(name="detection")]})
    assert _rewards(unknown) == ([], ["the reward detection is not counted: what network it asks is not known here"])


def test_rewards_count_at_their_own_precision(config: Any, made: RunPlan) -> None:
    scores = replace(made.costs, score={"float32": 2e12, "bfloat16": 1e12})
    half = config.model_copy(deep=True)
    half.model.dtype = "bfloat16"
    for tf32, single in ((True, 494.5e12), (False, 67e12)):
        half.model.tf32 = tf32
        found = _plan(half, scores, made.passes, "h100", 2, None, [])
        scored = 2 * 4 * made.passes.decoded
        expected = scored * (2e12 / single + 1e12 / 989e12) / (2 * 0.25)
        assert found.phases["25%"]["rewards"] == pytest.approx(expected)
        assert found.seconds["25%"] == pytest.approx(sum(found.phases["25%"].values()))


def test_what_decides_is_advised_first_and_what_does_not_is_left_out(config: Any, made: RunPlan) -> None:
    own = config.model_copy(deep=True)
    own.training.ema_decay = 0.9
    own.training.prompts_per_iteration = 8
    usable = 10.0
    sampled = replace(made.costs, trajectory=2**30)
    assert advise(own, sampled, 1, usable) == ["training.micro_batch_size: 1", "rollout.store: host"]
    learned = replace(made.costs, activations=2**33, checkpointed=2**28)
    own.training.micro_batch_size = 2
    assert advise(own, learned, 1, usable) == ["training.micro_batch_size: 1"]
    learned = replace(made.costs, activations=2**35, checkpointed=2**33)
    assert advise(own, learned, 1, usable) == [
        "model.gradient_checkpointing: true",
        "training.micro_batch_size: 1",
    ]


def test_a_rewards_gradient_takes_memory_of_the_vae(tmp_path: Path) -> None:
    config: Any = load(recipe("tiny_sd3/draft"), [*SMALL, f"output={tmp_path}"])
    made = plan(config)
    assert made.passes.differentiated == 1
    policy = Trainer(config, progress=False).policy
    latents = torch.randn(8, policy.latent_channels, 8, 8).requires_grad_()
    policy.decode_pixels(latents).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        policy.decode_pixels(latents).sum().backward()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"])
    assert made.costs.differentiating == pytest.approx(sizes.cumsum(0).max().item() / 8, rel=0.1)
    kept = max(made.costs.differentiating, made.costs.activations)
    assert made.memory["update"]["activations"] * GIB == pytest.approx(config.training.micro_batch_size * kept)


def test_networks_of_published_sizes_have_their_parameters() -> None:
    for name, billions in BILLIONS.items():
        # on torch's device without values, where they are made several times as fast as on the fake one
        count = sum(parameter.numel() for parameter in network(name).parameters())
        assert count / 1e9 == pytest.approx(billions, rel=0.03), name
    assert set(NAMES.values()) == PIPELINES.keys()
    every = [described.components for described in PIPELINES.values()]
    assert {parts.get("transformer", parts.get("unet")) for parts in every} == BILLIONS.keys()
    for name, part in PARTS.items():
        assert (
            "source" in part or part.get("like") or part["class"] in ("tokenizer", "diffusers.ClassifierFreeGuidance")
        ), name


def test_pictures_that_samples_are_made_from_count(tmp_path: Path) -> None:
    build("wan_i2v").save_pretrained(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", "model.encode={max_sequence_length: 20}", "model.dtype=float32"]
    sizes = ["rollout.height=64", "rollout.width=64", "rollout.num_frames=9", "rollout.steps=5"]
    groups = ["training.prompts_per_iteration=2", "training.group_size=6"]
    # whose prompts, with their pictures, are not there
    config = load(recipe("wan/flow_grpo_fast_i2v"), [*given, *sizes, *groups])
    config.rewards = [Weighted(name="jpeg_size")]
    made = plan(config)
    first, more = made.costs.sources
    # the image encoder sees a picture once a call, the VAE once a sample
    assert 0 < more < first and made.flops["sources"] == pytest.approx(2 * (2 * first + 4 * more))
    assert made.memory["encoding"]["conditioning"] * GIB == made.costs.conditioning > 0
    assert made.passes.update > 0 and made.largest_rollout_batch > 0


def test_bad_input_is_one_line(config: Any) -> None:
    with pytest.raises(ConfigError, match="--gpu: there is no 'h20'; did you mean 'h200'"):
        plan(config, "h20")
    with pytest.raises(ConfigError, match="--gpus: 5 are more than the 2 groups"):
        plan(config, gpus=5)
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": "Qwen/Qwen-Imag"})})
    with pytest.raises(ConfigError, match="did you mean 'qwen/qwen-image'"):
        plan(other)


def test_the_command_prints_tables_or_json(
    config: Any, made: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = replace(made, price={share: 2.5 * hours for share, hours in made.gpu_hours.items()})
    monkeypatch.setattr("flowalign.planning.plan.plan", lambda *_: priced)
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as left:
            main(["plan", "tiny_sd3/flow_grpo", "training.prompts_per_iteration=6", "--price", "2.5", *more])
        assert left.value.code == 0
        said = capsys.readouterr().out
        if more:
            assert json.loads(said)["peak"] == made.peak
        else:
            assert "GiB on each h100" in said and "it fits as it is" in said
            assert re.search(r"the run takes \S+ GPU hours = \S+ at 2.5 an hour", said)
            assert "its rate times sqrt(0.25) is 0.001" in said


@pytest.mark.slow
def test_processes_that_share_a_sample_each_have_half_of_its_operations_and_activations(tmp_path: Path) -> None:
    build("wan").save_pretrained(tmp_path / "model")
    sizes = ["rollout.height=128", "rollout.width=128", "rollout.num_frames=9", "model.dtype=float32"]
    given = [f"model.path={tmp_path / 'model'}", "model.encode={max_sequence_length: 20}"]
    config = load(recipe("wan/flow_grpo"), given + sizes)
    config.rewards = []
    whole, _ = measure(config)
    config.model.context_parallel.ulysses = 2
    half, _ = measure(config)
    assert (whole.shared, half.shared, half.divides) == (1, 2, (2,))
    assert half.forward == pytest.approx(whole.forward / 2, rel=0.05)
    # attention is computed again in the backward pass, and the input and the text are whole
    assert whole.backward / 2 < half.backward < 0.75 * whole.backward
    # without gradients the largest tensors of so small a network are its whole input and output
    assert half.sampling < whole.sampling and half.activations < 0.75 * whole.activations
    # a row of two processes has as many samples as one process had
    trajectories = [memory_of(config, half, gpus)["rollout"]["trajectories"] for gpus in (2, 4)]
    assert trajectories[0] == 2 * trajectories[1]
    with pytest.raises(ConfigError, match="3 cannot be divided by that; a multiple of 2"):
        config.rows(3)
    with pytest.raises(ConfigError, match="--gpus: 128 are more than the 32 groups.*at most 64 work"):
        plan(config, gpus=128)
    # advised where activations are what is too much, and only for more GPUs than share a sample already
    most = {"activations": 2**40, "checkpointed": 2**40, "sampling": 2**40}
    wanted = {
        divided: advise(config, replace(half, divides=divided, **most), 8, 300.0) for divided in ((2,), (2, 4, 8))
    }
    assert not any(way.startswith("model.context_parallel") for way in wanted[2,])
    # a TiB on two GPUs is half of that on four
    fewer = ["training.micro_batch_size: 1", "rollout.batch_size: 1"]
    assert wanted[2, 4, 8] == [*fewer, "model.context_parallel: {ulysses: 8}"]
