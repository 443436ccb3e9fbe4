"""Runs whose pictures a server draws, by sglang's protocol over a real socket, have the numbers of runs without one."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgpack
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from flowalign.config import kind_of, load, recipe
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.rollouts.contract import describe, read, write
from flowalign.rollouts.verify import verify
from flowalign.settings import parse
from flowalign.training import Trainer
from flowalign.training.engines.sglang import SGLang
from tests.flowalign.training.processes import together
from tests.flowalign.training.small_run import settings

SMALL = {
    "rewards": [{"name": "jpeg_size"}],
    "rollout.sigmas": None,
    "rollout.batch_size": 1,
    "rollout.steps": 4,
    "rollout.plan": {"name": "window", "start": 1, "size": 2},
    "training.iterations": 2,
    "training.previews": 0,
    "training.checkpoint_every": 0,
    "training.old_log_prob": "replayed",
}
METHODS: dict[str, dict[str, Any]] = {
    "flow_grpo": SMALL,
    # with the states that a server returns
    "nft": {**SMALL, "algorithm": {"name": "nft", "own_states": True}, "training.old_log_prob": None},
}
"""Runs of two iterations with two groups of four pictures, which are sampled one by one, as the server does."""
SERVER = "rollout.engine={name: sglang, url: 'http://127.0.0.1:1', %s}"
SOUND = [SERVER % "", "rollout.sigmas=null", "rollout.order=1"]


def engine(*urls: str, **more: Any) -> dict[str, Any]:
    return {"name": "sglang", "url": list(urls), "generator_device": "cpu", "patience": 120, **more}


def configured(folder: Path, method: str, **changes: Any) -> Any:
    values = settings(folder, **METHODS[method] | changes)
    return parse(kind_of(values), values)


def noise(trainer: Trainer) -> dict[str, int]:
    """Seeds of the step noise by those of the start noise, of all iterations."""
    training = trainer.config.training
    batches = [
        draw_batch(trainer.prompts, i, training.prompts_per_iteration, training.group_size, training.seed, False)
        for i in range(training.iterations)
    ]
    return {str(seed): own for batch in batches for seed, own in zip(batch.seeds, batch.noise_seeds, strict=True)}


def rows(folder: Path, name: str = "run") -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def assert_same(folder: Path, other: Path) -> None:
    """The metrics, and every weight of the LoRA, to 1e-6."""
    mine, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(("seconds", "engine"))} for row in rows(path)]
        for path in (folder, other)
    )
    assert len(mine) == len(theirs) == 2
    for row, expected in zip(mine, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)
    made, expected = (load_file(path / "run/lora/pytorch_lora_weights.safetensors") for path in (folder, other))
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=1e-6)
    assert max(float(value.abs().max()) for name, value in expected.items() if "lora_B" in name) > 1e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, int]]]:
    """Runs without a server: their folders, and the seeds of their noise."""
    runs = {}
    for method in METHODS:
        folder = tmp_path_factory.mktemp(method)
        trainer = Trainer(configured(folder, method), progress=False)
        trainer.train()
        runs[method] = folder, noise(trainer)
    return runs


@pytest.mark.parametrize("method", METHODS)
def test_a_run_by_a_server_has_the_numbers_of_one_without(served: Any, alone: Any, method: str, tmp_path: Path) -> None:
    folder, seeds = alone[method]
    served.be(noise=seeds)
    Trainer(configured(tmp_path, method, **{"rollout.engine": engine(served.url)}), progress=False).train()
    assert_same(tmp_path, folder)
    for row in rows(tmp_path):
        assert row["engine/own_noise"] == 1 and row["engine/16_bits"] == row["engine/failed"] == 0
        assert row["engine/velocity"] < 1e-4 and row["engine/bytes"] > 1000


@pytest.mark.slow
def test_a_server_killed_in_the_middle_and_requests_that_fail_change_nothing(
    served: Any, alone: Any, tmp_path: Path
) -> None:
    folder, seeds = alone["flow_grpo"]
    # gone in the first iteration, then started again; of the later requests every fifth fails
    served.be(noise=seeds, die=6)

    def restart() -> None:
        served.process.join()
        assert served.process.exitcode == 9
        served.start(noise=seeds, fail_every=5)

    nurse = threading.Thread(target=restart)
    nurse.start()
    trainer = Trainer(configured(tmp_path, "flow_grpo", **{"rollout.engine": engine(served.url)}), progress=False)
    trainer.train()
    nurse.join()
    assert_same(tmp_path, folder)
    assert rows(tmp_path)[0]["engine/lost"] >= 1 and rows(tmp_path)[1]["engine/failed"] >= 1


@pytest.mark.parametrize(
    ("name", "reward", "changes"),
    [
        ("flux2_klein_reference", {"name": "jpeg_size"}, {}),
        ("wan", {"name": "per_frame", "reward": {"name": "jpeg_size"}, "frames": 2}, {"model.lora": None}),
    ],
    ids=["edits", "videos by a network that is trained whole"],
)
def test_other_families_have_the_numbers_of_runs_without_a_server(
    served: Any, tmp_path: Path, name: str, reward: Any, changes: dict[str, Any]
) -> None:
    tiny = PIPELINES[name]
    build(name).save_pretrained(tmp_path / "model")
    Image.effect_noise((24, 16), 80).convert("RGB").save(tmp_path / "first.png")
    record = {"prompt": "a red circle"} | ({"image": str(tmp_path / "first.png")} if tiny.images else {})
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record) + "\n")
    small = changes | {f"rollout.{key}": value for key, value in tiny.call.items()}
    small |= {"model.path": str(tmp_path / "model"), "model.encode": tiny.encode, "rewards": [reward]}
    small |= {"training.prompts_per_iteration": 1, "training.group_size": 2}
    small |= {"data.prompts": str(tmp_path / "prompts.jsonl"), "data.where": {}}
    plain = Trainer(configured(tmp_path, "flow_grpo", name="plain", **small), progress=False)
    plain.train()
    served.be(noise=noise(plain), model=str(tmp_path / "model"), encode=tiny.encode)
    small["rollout.engine"] = engine(served.url)
    run = Trainer(configured(tmp_path, "flow_grpo", **small), progress=False)
    run.train()
    for row, expected in zip(rows(tmp_path), rows(tmp_path, "plain"), strict=True):
        assert row["engine/own_noise"] == 1 and row["reward/mean"] == pytest.approx(expected["reward/mean"], rel=1e-6)
    # other ones in the second iteration
    assert len({path.name[-12:] for path in (run.folder / "engine").glob("weights-*")}) == 2
    for key, value in plain.learner.parameters.items():
        torch.testing.assert_close(run.learner.parameters[key], value, rtol=0, atol=1e-6)


def test_samples_of_a_server_that_dies_are_drawn_by_another(
    served: Any, other: Any, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seeds = alone["flow_grpo"]
    monkeypatch.setattr("flowalign.training.engines.servers.PAUSE", 1e6)
    served.be(noise=seeds)
    # in the middle of the first batch, for ever
    other.be(noise=seeds, die=3)
    by_two = {"rollout.engine": engine(other.url, served.url)}
    Trainer(configured(tmp_path, "flow_grpo", **by_two), progress=False).train()
    assert other.process.exitcode == 9
    assert_same(tmp_path, folder)
    first, second = rows(tmp_path)
    # one that was lost is asked last
    assert first["engine/lost"] >= 1 and second["engine/lost"] == 0


def test_samples_that_are_drawn_ahead_are_of_earlier_weights(served: Any, tmp_path: Path) -> None:
    ahead = {"rollout.engine": engine(served.url, staleness=1), "training.old_log_prob": "sampled"}
    run = Trainer(configured(tmp_path, "flow_grpo", **ahead, **{"training.iterations": 3}), progress=False)
    drawn, weights = [], []
    result = run.engine.result

    def remembered(part: Any) -> Any:
        drawn.append(result(part))
        weights.append({name: value.detach().clone() for name, value in run.learner.parameters.items()})
        return drawn[-1]

    run.engine.result = remembered
    run.train()
    assert [generated.batch.iteration for generated in drawn] == [0, 1, 2]
    row = torch.zeros(1, dtype=torch.long)

    def error(generated: Any, made_by: dict[str, torch.Tensor]) -> float:
        """Of the velocity that the server sent, from that of these weights."""
        with torch.no_grad():
            for name, value in run.learner.parameters.items():
                value.copy_(made_by[name])
            sent = generated.rollout.trajectory.velocity[row, row]
            return float((run.policy.velocity(generated.rollout, row, row) - sent).abs().max())

    assert error(drawn[1], weights[0]) < 1e-5 < error(drawn[1], weights[1])
    assert error(drawn[2], weights[1]) < 1e-5 < min(error(drawn[2], weights[0]), error(drawn[2], weights[2]))


@pytest.mark.slow
def test_two_learners_share_a_server(served: Any, alone: Any, tmp_path: Path) -> None:
    served.be(noise=alone["flow_grpo"][1])
    folders = []
    for name, changes in (("plain", {}), ("shared", {"rollout.engine": engine(served.url)})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(settings(folder, **SMALL | changes)))
        (folder / "launch.yaml").write_text("{}")
        folders.append(folder)
    together(2, *folders)
    assert_same(folders[1], folders[0])


@pytest.fixture(scope="module")
def trainer(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A run before its first iteration, with guidance."""
    folder = tmp_path_factory.mktemp("refused")
    changes = {"rollout.guidance": 2.0, "rollout.engine": engine(running.url, retries=1, patience=0.5)}
    trainer = Trainer(configured(folder, "flow_grpo", **changes), progress=False)
    yield trainer
    trainer.engine.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"ignore": "guidance_scale"}, "velocity: .* guidance 1 sampled, and the file says 2"),
        ({"ignore": "prompt"}, "velocity: up to .*: neither guidance nor a prompt"),
        ({"ignore": "rollout_noise_level"}, "step noise|mean|standard deviation|log-probability"),
        ({"ignore": "rollout_sde_step_indices"}, r"steps \[0, 1, 2, 3\] have a log-probability, and \[1, 2\]"),
        ({"ignore": "seed"}, "start noises: 8 are drawn, and 1 of them are distinct"),
        ({"ignore": "rollout_return_dit_trajectory"}, "it has no dit_trajectory: the engine ignores"),
        ({"size": 16}, r"latents is \[5, 4, \d+, \d+\], not \[5, 4"),
        ({"fail_every": 1}, "gave 2 times status 500"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_was_not_asked_for_ends_the_run_before_its_first_update(
    served: Any, trainer: Trainer, fault: dict[str, Any], message: str
) -> None:
    served.be(**fault)
    with pytest.raises(FlowalignError, match=message) as raised:
        trainer.experience()
    assert "\n" not in str(raised.value)


def test_a_server_with_another_model_ends_the_run(served: Any, trainer: Trainer) -> None:
    weights = next(p for name, p in trainer.policy.network.named_parameters() if "lora" not in name)
    with torch.no_grad():
        weights.mul_(1.5)
    told = "velocity: .*; other weights, or another encoding of prompts; sglang pads .* to 256 tokens, .*length is 0"
    try:
        with pytest.raises(FlowalignError, match=told) as raised:
            trainer.experience()
    finally:
        with torch.no_grad():
            weights.div_(1.5)
    assert "\n" not in str(raised.value)


def test_new_weights_that_a_server_ignores_end_the_run(served: Any, trainer: Trainer) -> None:
    served.be(ignore="lora")
    trainer.engine._greet(served.url)
    weights = trainer.learner.parameters
    with torch.no_grad():
        for parameter in weights.values():
            parameter.add_(0.01)
    with pytest.raises(FlowalignError, match="ignores new weights: its checksum is that of earlier ones"):
        trainer.experience()


def test_a_file_of_its_samples_is_sound(served: Any, trainer: Trainer, tmp_path: Path) -> None:
    weights = trainer.engine.publish(5, trainer.learner.parameters, {})
    [part] = trainer.engine.generate([trainer.groups.draw(1).batch], weights)
    rollout, batch, _ = part.result()
    write(tmp_path / "file", describe(rollout, batch, trainer.config.rollout))
    file = read(tmp_path / "file")
    # those of stochastic steps were sent with four samples alone
    assert file.velocity is None and file.about.generator == "cpu"
    assert verify(trainer.policy, file, trainer.config).findings == []


def test_the_tests_server_answers_as_sglang_does(served: Any, trainer: Trainer) -> None:
    """Names, shapes and formats are compared with the fixtures that sglang's own classes wrote."""
    from tests.flowalign.training.engines.test_rollout_api import fixture, structure

    part = trainer.engine.generate(
        [trainer.groups.draw(0).batch[[0]]], trainer.engine.publish(9, trainer.learner.parameters, {})
    )
    _, body, about = fixture("sde")
    request = json.loads(part[0].asked[0].content)
    assert request.keys() <= set(about["fields"]["RolloutRequest"])
    answer = msgpack.unpackb(httpx2.post(f"{served.url}/rollout/generate", json=request).content)[0]
    assert sorted(answer) == about["fields"]["RolloutResponse"]
    assert structure(answer) == structure(msgpack.unpackb(body)[0])


@pytest.mark.parametrize(
    ("recipe_name", "overrides", "message"),
    [
        ("flow_grpo", [SERVER % "", "rollout.sigmas=null"], "rollout.share_start_noise: sglang draws"),
        ("nft", [SERVER % ""], "rollout.sigmas: sglang walks the schedule of the model's scheduler"),
        ("nft", [SERVER % "", "rollout.sigmas=null"], "rollout.order: sglang's steps are Euler's"),
        (
            "nft",
            [SERVER % "", "rollout.sigmas=null", "rollout.order=1", "rollout.kernel=dance_sde"],
            "has no 'dance_sde'",
        ),
        ("tempflow_grpo", [SERVER % ""], "'tempflow_grpo' asks more of sampling"),
        ("branch_grpo", [SERVER % ""], "'branch_grpo' asks more of sampling"),
        ("nft", ["rollout.engine={name: sglang, url: localhost:30000}"], "'localhost:30000' is no address"),
        ("nft", ["rollout.engine=sglang"], "rollout.engine.url: this key is required"),
        ("nft", ["rollout.engine=vllm"], "'vllm' samples no pictures"),
        ("nft", [SERVER % "staleness: 1"], "'nft' has no ratios to earlier weights"),
        ("nft", [*SOUND, "rollout.workers={count: 1}"], "samples already; one of the two works"),
        ("nft", [SERVER % "colour: red"], "unknown key 'colour'"),
        ("nft", [*SOUND, "model.lora.alpha=1.5"], "model.lora.alpha: sglang takes whole numbers"),
    ],
)
def test_what_sglang_cannot_do_is_refused_before_a_model_loads(
    recipe_name: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(recipe(f"tiny_sd3/{recipe_name}"), overrides).check(1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sd15", "sglang has no rollouts for StableDiffusionPipeline; for StableDiffusion3"),
        ("wan22_14b", "the weights of one network, and this WanPipeline has two"),
        ("wan22_14b_i2v", "the weights of one network, and this WanImageToVideoPipeline has two"),
    ],
)
def test_a_pipeline_without_rollouts_is_refused_before_its_weights_are_read(
    name: str, message: str, tmp_path: Path
) -> None:
    pipeline = build(name)
    index = {"_class_name": type(pipeline).__name__, **pipeline.config}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    changes = [*SOUND, f"model.path={tmp_path}", "model.encode={}", "rollout.height=null", "rollout.width=null"]
    with pytest.raises(ConfigError, match=message) as raised:
        load(recipe("tiny_sd3/nft"), changes).check(1)
    assert "\n" not in str(raised.value)


def test_an_address_with_something_else_behind_it_is_refused(served: Any, trainer: Trainer, tmp_path: Path) -> None:
    parts = trainer.algorithm, trainer.sampler, trainer.processes, tmp_path

    def begin(**more: Any) -> SGLang:
        return SGLang(SGLang.Settings(**{"url": served.url, "timeout": 5, **more}), *parts)

    with pytest.raises(ConfigError, match="no server answers: http://127.0.0.1:1: .*refused"):
        begin(url="http://127.0.0.1:1")
    with pytest.raises(FlowalignError, match="/nowhere/health answers with status 404"):
        begin(url=f"{served.url}/nowhere")
    served.be(pipeline="QwenImagePipeline")
    with pytest.raises(
        ConfigError, match="serves a QwenImagePipeline .'tiny_sd3'., and model.path 'tiny_sd3' is a Stab"
    ):
        begin()


def test_servers_of_one_gpu_sleep_during_updates(served: Any, tmp_path: Path) -> None:
    changes = {"rollout.engine": engine(served.url, share_gpu=True, retries=0)}
    run = Trainer(configured(tmp_path, "flow_grpo", **changes), progress=False)
    asked = run.engine.generate([run.groups.draw(0).batch], run.engine.publish(0, run.learner.parameters, {}))[0]
    asked.result()
    with pytest.raises(FlowalignError, match="gave 1 times status 500: .*the engine sleeps"):
        run.engine._submit(asked.weights, asked.asked[0]).result()
    # and wake before they sample
    run.experience()
    run.engine.close()
