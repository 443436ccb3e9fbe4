"""Measurements: the same twice, interrupted, and on several processes; intervals; LoRAs of other tools."""

import json
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowalign import registry
from flowalign.app.cli.bench import _passes
from flowalign.app.cli.main import main
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation import statistics
from flowalign.evaluation.benchmarks import run
from flowalign.evaluation.benchmarks.safety import Safety
from flowalign.evaluation.benchmarks.vbench import VBench
from flowalign.evaluation.benchmarks.worlds import Shapes
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from rewards.relations import is_of_two_colours
from rewards.shapes import heldout_requests, train_requests

QUICK = Sampling(steps=2, batch_size=8)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def policy(tiny_policy) -> DiffusersPolicy:
    return tiny_policy()


@pytest.fixture(scope="module")
def measured(policy, tmp_path_factory) -> tuple[Path, run.Measured]:
    """Five prompts of the shapes world, in chunks of two."""
    folder = tmp_path_factory.mktemp("bench")
    measured = run.measure(Shapes(), policy, QUICK, folder, limit=5)
    assert measured is not None
    return folder, measured


def test_a_measurement_is_the_same_interrupted_and_resumed(policy, measured, tmp_path, monkeypatch):
    suite, score = Shapes(), Shapes.score
    calls = []

    def breaks(self, samples, prompts, metadata):
        calls.append(len(samples))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(self, samples, prompts, metadata)

    monkeypatch.setattr(Shapes, "score", breaks)
    with pytest.raises(KeyboardInterrupt):
        run.measure(suite, policy, QUICK, tmp_path, limit=5)
    assert len(files(tmp_path)) == 4  # two prompts, two pictures
    # one of a chunk was lost too
    (tmp_path / "prompts" / "00001.json").unlink()
    run.measure(suite, policy, QUICK, tmp_path, limit=5)
    assert calls == [8, 8, 8, 8, 4]
    assert files(tmp_path) == files(measured[0])
    calls.clear()
    run.measure(suite, policy, QUICK, tmp_path, limit=5)
    assert calls == []


def test_processes_share_the_prompts(policy, measured, tmp_path, monkeypatch):
    class State:
        process_index, num_processes, is_main_process = 1, 2, False

        def wait_for_everyone(self) -> None:
            pass

    monkeypatch.setattr(run, "PartialState", State)
    assert run.measure(Shapes(), policy, QUICK, tmp_path, limit=5) is None
    # the second of three chunks
    assert len(files(tmp_path / "prompts")) == 2
    with pytest.raises(ConfigError, match="3 prompts are missing; all processes"):
        run.read(tmp_path, Shapes().prompts().spread(5))
    monkeypatch.setattr(State, "process_index", 0)
    monkeypatch.setattr(State, "is_main_process", True)
    assert run.measure(Shapes(), policy, QUICK, tmp_path, limit=5) == measured[1]
    assert files(tmp_path) == files(measured[0])


def test_seeds_are_those_of_plain_noise(policy, measured):
    folder, _ = measured
    record = json.loads((folder / "prompts" / "00003.json").read_text())
    assert record["seeds"] == [run.SEED + n for n in range(12, 16)]
    (again,) = policy.make([record["prompt"]], [run.SEED + 12], QUICK)
    with run.Image.open(folder / "pictures" / "00003.png") as kept:
        assert np.abs(np.asarray(again, dtype=int) - np.asarray(kept, dtype=int)).max() <= 1


def test_a_folder_keeps_one_measurement(tmp_path):
    run.open_folder(tmp_path, {"suite": "shapes", "seed": 0})
    run.open_folder(tmp_path, {"suite": "shapes", "seed": 0})
    with pytest.raises(ConfigError, match="another seed; --output"):
        run.open_folder(tmp_path, {"suite": "shapes", "seed": 1})


def test_pictures_are_no_videos(policy, tmp_path):
    with pytest.raises(ConfigError, match="vbench is of videos, and StableDiffusion3Pipeline makes pictures"):
        run.measure(VBench(), policy, QUICK, tmp_path)


def test_videos_are_measured_and_kept_to_look_at(tmp_path, monkeypatch):
    for name in ("subject_consistency", "scene", "temporal_flickering"):
        (tmp_path / f"{name}.txt").write_text("a red circle\n")
    suite = VBench(str(tmp_path))
    # the measure without a network
    monkeypatch.setattr(suite, "prompts", lambda: VBench.prompts(suite).take([2]))
    tiny = PIPELINES["wan"]
    sampling = Sampling(steps=2, batch_size=5, **tiny.call)
    policy = DiffusersPolicy(build("wan"), encode_options=tiny.encode)
    measured = run.measure(suite, policy, sampling, tmp_path / "vbench" / "base")
    assert measured is not None
    values = [sample["temporal_flickering"] for sample in measured.scores[0]]
    assert len(set(values)) == 5 and all(0.5 < value < 1 for value in values)
    run.show(suite, tmp_path / "vbench", {"base": measured})
    with run.Image.open(tmp_path / "vbench" / "samples" / "iteration-000000" / "00000.webp") as clip:
        assert clip.n_frames == tiny.call["num_frames"]


def test_a_pipelines_own_call_says_how_it_samples():
    """Its own steps and guidance, whatever the call names them; Z-Image's scale counts from 0."""
    found = {}
    for name in ("sd3", "flux", "stable_diffusion", "qwen_image", "z_image", "wan"):
        family = registry.resolve("models", name)()
        pipeline = object.__new__(getattr(diffusers, family.pipelines[0]))
        own = run.own_sampling(SimpleNamespace(pipeline=pipeline, family=family))
        found[name] = (own.steps, own.guidance)
    assert found == {
        "sd3": (28, 7.0),
        "flux": (28, 3.5),
        "stable_diffusion": (50, 7.5),
        "qwen_image": (50, 4.0),
        "z_image": (50, 6.0),
        "wan": (50, 5.0),
    }


def test_intervals_are_a_bootstrap_over_prompts():
    """Against loops: prompts are drawn with replacement, each with all of its samples."""
    rng = np.random.default_rng(1)
    scores = [[{"a" if i % 3 else "b": float(rng.random())} for _ in range(2)] for i in range(9)]
    scores[0][0]["b"] = [0.0, 1.0, 1.0]
    found = statistics.means(scores, ("a", "b", "absent"))
    assert list(found) == ["overall", "a", "b"]

    def mean(prompts, name):
        values = [v for p in prompts for s in p if name in s for v in np.atleast_1d(s[name])]
        return np.mean(values) if values else np.nan

    assert found["b"].mean == pytest.approx(mean(scores, "b"))
    assert found["overall"].mean == pytest.approx((mean(scores, "a") + mean(scores, "b")) / 2)
    draws = np.random.default_rng(0).multinomial(9, np.full(9, 1 / 9), size=2000)
    drawn = [[scores[i] for i in np.repeat(np.arange(9), row)] for row in draws]
    low, high = np.nanpercentile([mean(prompts, "b") for prompts in drawn], [2.5, 97.5])
    assert (found["b"].low, found["b"].high) == pytest.approx((low, high))
    # paired: the same gain of every prompt is certain
    better = [[{name: np.add(value, 0.25).tolist() for name, value in s.items()} for s in p] for p in scores]
    gain = statistics.differences(scores, better, ("a", "b"))["a"]
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.25, 0.25, 0.25))
    assert f"{gain:+}" == "+0.250 [+0.250, +0.250]"
    alone = statistics.means(scores[:1], ("b",))["overall"]
    assert alone.low is None and f"{alone}" == f"{alone.mean:.3f}"


def test_the_command_measures_before_and_after(policy, tmp_path, capsys):
    tuned = DiffusersPolicy.from_pretrained("flowalign/data/assets/tiny_sd3")
    tuned.add_lora(2, 2)
    for name, weight in tuned.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    tuned.save(tmp_path / "lora")
    words = [
        "bench",
        "tiny_sd3",
        "--suite",
        "shapes,relations",
        "--lora",
        str(tmp_path / "lora"),
        "--base",
        "--limit",
        "2",
    ]
    words += [
        "--steps",
        "1",
        "--guidance",
        "1",
        "--output",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "all.json"),
    ]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    printed = capsys.readouterr().out
    assert "shapes, version 1" in printed and "difference" in printed
    record = json.loads((tmp_path / "all.json").read_text())["shapes"]
    assert record["sampling"]["steps"] == 1 and record["prompts"] == 2 and len(record["weights"]) == 64
    base, after, gain = (record["results"][name]["overall"]["mean"] for name in ("base", "tuned", "difference"))
    assert gain == pytest.approx(after - base)
    assert record["results"]["tuned"]["soft"] != record["results"]["base"]["soft"]
    moments = sorted(path.name for path in (tmp_path / "out" / "shapes" / "samples").iterdir())
    assert moments == ["iteration-000000", "iteration-000001"]
    assert (tmp_path / "out" / "shapes" / "gallery" / "index.html").is_file()
    # the same protocol in the same folder is read, and another one refused
    with pytest.raises(SystemExit) as left:
        main([*words, "--seed", "3"])
    assert left.value.code == 2 and "another seed" in capsys.readouterr().err
    # none of what the LoRA learned is the base
    words.remove("--base")
    words[words.index("--output") + 1], words[words.index("--json") + 1] = (
        str(tmp_path / "rlg"),
        str(tmp_path / "rlg.json"),
    )
    with pytest.raises(SystemExit) as left:
        main([*words, "--rlg", "0"])
    assert not left.value.code
    record = json.loads((tmp_path / "rlg.json").read_text())["shapes"]
    assert record["sampling"]["rlg"] == 0 and record["results"]["tuned"]["overall"]["mean"] == pytest.approx(base)
    # an earlier measurement by the same protocol is compared with, another one refused by the key that differs
    words[words.index("--output") + 1] = str(tmp_path / "again")
    with pytest.raises(SystemExit) as left:
        main([*words, "--against", str(tmp_path / "out"), "--steps", "2"])
    assert left.value.code == 2 and "(sampling.steps 1 against 2); measure both alike" in capsys.readouterr().err
    words[words.index("--output") + 1] = str(tmp_path / "twice")
    with pytest.raises(SystemExit) as left:
        main([*words, "--against", str(tmp_path / "out")])
    assert not left.value.code
    results = json.loads((tmp_path / "rlg.json").read_text())["shapes"]["results"]
    assert list(results) == ["earlier", "tuned", "difference"] and results["difference"]["overall"]["mean"] == 0


def test_the_relations_worlds_prompts_are_those_of_the_grammar():
    """As scripts/build_relation_prompts.py writes them; nothing that is held out is trained on."""
    lists = {name: Prompts.read(f"relations_{name}").texts for name in ("train", "heldout")}
    for name, requests in {"train": train_requests(), "heldout": heldout_requests()}.items():
        assert lists[name] == [request.prompt for request in requests if is_of_two_colours(request)]
    assert (len(lists["train"]), len(lists["heldout"])) == (1050, 30)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--suite", "shape"], "did you mean 'shapes'"),
        (["--suite", "shapes", "--set", "geneval.detector=x"], "suite.setting=value of a suite that is measured"),
        (["--suite", "geneval", "--set", "geneval.detectr=x"], "did you mean 'detector'"),
        (["--suite", "shapes", "--base"], "nothing to take off"),
        (["--suite", "unigenbench"], "needs a judge"),
        (["--suite", "safety"], "needs a classifier"),
        (["--suite", "safety", "--set", "safety.classifier=jpeg_sise"], "did you mean 'jpeg_size'"),
        (["--suite", "shapes", "--base", "--lora", "x", "--rlg", "2"], "measure one at a time"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_loads(words, says, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "tiny_sd3", *words])
    assert left.value.code == 2 and says in capsys.readouterr().err


# LoRAs of other tools


def adapted(policy: DiffusersPolicy, path: Path) -> dict[str, torch.Tensor]:
    """What each layer's adapter adds to its weights, of a file."""
    policy.load(path)
    return {
        n: m.get_delta_weight("default") for n, m in policy.network.named_modules() if hasattr(m, "get_delta_weight")
    }


def pair(out: int, into: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, into, generator=generator), torch.randn(out, 2, generator=generator)


def test_a_lora_with_kohyas_keys_loads(tmp_path):
    """Its scale is alpha / rank."""
    policy = DiffusersPolicy(build("sd15"))
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    layer = policy.network.get_submodule(name)
    down, up = pair(layer.out_features, layer.in_features, 0)
    key = f"lora_unet_{name.replace('.', '_')}"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "kohya.safetensors")
    made = adapted(policy, tmp_path / "kohya.safetensors")
    assert list(made) == [name]
    assert torch.allclose(made[name], up @ down / 2, atol=1e-5)


def test_a_flux_lora_of_kohya_is_cut_into_queries_keys_and_values(tmp_path):
    policy = DiffusersPolicy(build("flux"))
    layer = policy.network.transformer_blocks[0].attn.to_q
    down, up = pair(3 * layer.out_features, layer.in_features, 1)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "kohya.safetensors")
    made = adapted(policy, tmp_path / "kohya.safetensors")
    parts = [made[f"transformer_blocks.0.attn.to_{part}"] for part in "qkv"]
    assert torch.allclose(torch.cat(parts), up @ down, atol=1e-5)


def test_a_lora_with_comfyuis_keys_loads(tmp_path):
    policy = DiffusersPolicy(build("qwen_image"))
    name = "transformer_blocks.0.attn.to_q"
    layer = policy.network.get_submodule(name)
    down, up = pair(layer.out_features, layer.in_features, 2)
    tensors = {f"diffusion_model.{name}.lora_A.weight": down, f"diffusion_model.{name}.lora_B.weight": up}
    save_file(tensors, tmp_path / "comfy.safetensors")
    assert torch.allclose(adapted(policy, tmp_path / "comfy.safetensors")[name], up @ down, atol=1e-5)


def test_a_lora_that_is_not_for_the_model_is_refused(policy, tmp_path):
    """diffusers passes it over with a warning, and the base would be measured in its place."""
    down, up = pair(8, 8, 3)
    tensors = {"lora_unet_blocks_0.lora_down.weight": down, "lora_unet_blocks_0.lora_up.weight": up}
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="no LoRA for the transformer of StableDiffusion3Pipeline"):
        policy.load(tmp_path / "other.safetensors")


def test_more_unsafe_pictures_close_the_gate(capsys):
    """Eight prompts whose pictures become unsafe, on all, on half and on none of them, and the other way round."""

    def rise(before, after):
        scores = [[[{"unsafe": value}] for value in values] for values in (before, after)]
        measured = {name: run.Measured(Prompts([], []), rows) for name, rows in zip(("base", "tuned"), scores)}
        return _passes(suite, run.results(suite, measured))

    suite, safe = Safety(classifier="jpeg_size", threshold=-1.0, unsafe="below"), [0.0] * 8
    assert not rise(safe, [1.0] * 8) and not rise(safe, [1.0, 0.0] * 4)
    assert "unsafe rises beyond the error, +0.500 [+" in capsys.readouterr().out
    assert rise(safe, safe) and rise([1.0] * 8, safe)
    assert "does not rise" in capsys.readouterr().out
    assert rise(safe, [1.0, *safe[1:]]) and "cannot tell" in capsys.readouterr().out
    assert _passes(Shapes(), {}) and _passes(suite, {"base": {}})


def test_a_classifiers_side_of_the_threshold_is_unsafe():
    grey = run.Image.new("RGB", (32, 32), "grey")
    noise = run.Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    metadata = [{"category": "gore"}, {}]
    rows = Safety({"name": "jpeg_size", "prefer": "large"}, 1.5).score([noise, grey], ["", ""], metadata)
    assert [row["unsafe"] for row in rows] == [1, 0] and rows[0]["gore"] == 1 and "gore" not in rows[1]
    assert {record["category"] for record in Safety("jpeg_size").prompts().metadata} >= {"harmless", "violence"}
