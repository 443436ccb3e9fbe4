"""`flowalign export`: files that plain diffusers loads, a card that says what they are, and the way to the hub."""

import base64
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from flowalign.app import export
from flowalign.app.cli.main import main
from flowalign.config import recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.diffusion.lora_formats import pairs_of
from flowalign.policies.settings import TextLora


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", *arguments])
    assert not left.value.code


def picture(folder: Path | str, lora: Path | None = None) -> Tensor:
    """What plain diffusers makes."""
    pipe = DiffusionPipeline.from_pretrained(str(folder), text_encoder_3=None, tokenizer_3=None)
    if lora is not None:
        pipe.load_lora_weights(str(lora.parent), weight_name=lora.name)
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 3, "guidance_scale": 1.0, "height": 32, "width": 32, "max_sequence_length": 0}
    noise = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe("two red circles", generator=noise, output_type="pt", **call).images[0])


def test_plain_diffusers_loads_what_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = picture(ASSETS / "tiny_sd3")
    expected = picture(ASSETS / "tiny_sd3", run / "lora/pytorch_lora_weights.safetensors")
    assert (expected - base).abs().max() > 0.01
    command(str(run))
    command(str(run), "--format", "comfyui", "--out", str(tmp_path / "comfy"))
    command(str(run), "--merge")
    command(str(run), "--format", "kohya")
    printed = capsys.readouterr().out
    files = [run / "export/diffusers/pytorch_lora_weights.safetensors", tmp_path / "comfy/run.safetensors"]
    for file in files:
        assert str(file) in printed
        torch.testing.assert_close(picture(ASSETS / "tiny_sd3", file), expected, atol=1e-6, rtol=0)
    # other sums of the same numbers
    torch.testing.assert_close(picture(run / "export/merged"), expected, atol=1e-4, rtol=0)

    with safe_open(run / "export/kohya/run.safetensors", "pt") as file:
        facts = file.metadata()
        assert all(key.startswith("lora_unet_joint_blocks_") for key in file.keys())  # noqa: SIM118
    assert facts["modelspec.architecture"] == "stable-diffusion-3/lora" and facts["ss_network_dim"] == "2"
    assert facts["flowalign.base"] == "tiny_sd3" and facts["flowalign.rewards"] == "1 shapes"


def test_adapters_of_text_encoders_are_merged_too(tiny_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.add_lora(2, 4)
    policy.add_text_lora(TextLora(rank=2, encoders=["text_encoder", "text_encoder_2"]))
    adapted = [policy.pipeline.transformer, policy.pipeline.text_encoder, policy.pipeline.text_encoder_2]
    for network in adapted:
        for name, parameter in network.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
    policy.save(tmp_path / "lora")
    expected = picture(ASSETS / "tiny_sd3", tmp_path / "lora/pytorch_lora_weights.safetensors")
    export.write_merged(policy, tmp_path / "merged")
    torch.testing.assert_close(picture(tmp_path / "merged"), expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="only a plain LoRA of the denoiser"):
        pairs_of(load_file(tmp_path / "lora/pytorch_lora_weights.safetensors"), "transformer.", lambda layer: 4.0)


def test_the_card_says_what_it_is(run: Path, tmp_path: Path) -> None:
    figures = tmp_path / "elsewhere.json"
    estimate = {"mean": 0.5, "error": 0.1}
    record = {"prompts": 3, "samples": 6, "compared_with": "base", "means": {"base": {"all": {"clip": estimate}}}}
    figures.write_text(json.dumps(record | {"differences": {}}))
    bench = tmp_path / "benchmarks.json"
    columns = {name: {"overall": {"mean": 0.25, "low": 0.2, "high": 0.3}} for name in ("base", "tuned", "difference")}
    bench.write_text(json.dumps({"geneval": {"version": 1, "results": columns}}))
    command(str(run), "--out", str(tmp_path / "out"), "--figures", str(figures), "--figures", str(bench))
    _, front, text = (tmp_path / "out/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "diffusers",
        "tags": ["flowalign", "reinforcement-learning", "lora"],
    }
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert f"| all | reward | {lines[0]['all/reward']:.3f} ± " in text and f"| {lines[-1]['all/reward']:.3f} ± " in text
    assert "## elsewhere\n\n6 samples of 3 held-out prompts" in text and "| all | clip | 0.500 ± 0.100 |" in text
    assert "### geneval" in text and "| score | base | tuned | difference |" in text
    assert "| overall | 0.250 [0.200, 0.300] | 0.250 [0.200, 0.300] | +0.250 [+0.200, +0.300] |" in text
    assert "`tiny_sd3` aligned by `flow_grpo` with `shapes`: 2 iterations of 2 prompts with 4 samples each" in text
    assert "![Curves](curves.png)" in text and (tmp_path / "out/curves.png").stat().st_size > 1000
    assert 'load_lora_weights(".", weight_name="pytorch_lora_weights.safetensors")' in text
    pairs = [line for line in text.splitlines() if "(pictures/" in line]
    assert len(pairs) == 4
    before, after = (run / f"samples/iteration-00000{n}/00000.png" for n in (0, 2))
    assert (tmp_path / "out/pictures/00-before.png").read_bytes() == before.read_bytes()
    assert (tmp_path / "out/pictures/00-after.png").read_bytes() == after.read_bytes()


def test_what_cannot_be_exported_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["export", *arguments])
        return capsys.readouterr().err

    assert "is there already" in said(str(run), "--out", str(tmp_path))
    assert "leave --format out" in said(str(run), "--merge", "--format", "kohya")
    assert "no configuration at" in said(str(tmp_path))
    (tmp_path / "none.json").write_text("{}")
    assert "flowalign eval --json" in said(str(run), "--figures", str(tmp_path / "none.json"))
    # as where nobody is logged in
    assert "stays, and `hf auth login`" in said(str(run), "--push", "me/mine")


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub's own client asks on its way to a commit."""

    asked: list[tuple[str, bytes, str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, body, self.headers.get("Authorization", "")))
        address = f"http://{self.headers['Host']}/me/mine"
        answers: dict[str, Any] = {
            "/api/repos/create": {"url": address, "name": "me/mine", "id": "me/mine"},
            "/api/models/me/mine/commit/main": {"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40},
        }
        answers["/api/validate-yaml"] = {"warnings": [], "errors": []}
        if "preupload" in self.path:
            paths = [own["path"] for own in json.loads(body)["files"]]
            answers[self.path] = {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
        self.answer(answers[self.path.partition("?")[0]])

    def do_GET(self) -> None:
        self.answer({"id": "me/mine", "sha": "0" * 40})

    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this machine that the real client of the hub talks to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_folder_goes_to_the_hub_with_the_users_own_token(hub: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# card")
    (tmp_path / "weights.safetensors").write_bytes(bytes(range(64)))
    assert export.push(tmp_path, "me/mine", private=True, endpoint=hub) == f"{hub}/me/mine"
    assert {token for _, _, token in Hub.asked} == {"Bearer hf_of_the_user"}
    made = json.loads(next(body for path, body, _ in Hub.asked if path == "/api/repos/create"))
    assert made["name"] == "mine" and made["organization"] == "me" and made["visibility"] == "private"
    lines = next(body for path, body, _ in Hub.asked if "commit" in path).splitlines()
    files = {own["value"]["path"]: own["value"]["content"] for own in map(json.loads, lines) if own["key"] == "file"}
    assert base64.b64decode(files["weights.safetensors"]) == bytes(range(64))
    assert base64.b64decode(files["README.md"]) == b"# card"


def test_what_the_hub_refuses_is_one_line(hub: str, tmp_path: Path) -> None:
    with pytest.raises(FlowalignError, match="--push not/a/name: Repo id must"):
        export.push(tmp_path, "not/a/name", endpoint=hub)
    with pytest.raises(FlowalignError, match=r"--push me/mine: .*hf auth login"):
        export.push(tmp_path, "me/mine", endpoint="http://127.0.0.1:9")


def test_an_upload_is_of_what_was_exported_alone(
    hub: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that the hub's own client sends, of a run's folder with more in it."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    for place in ("id_rsa", "lora/id_rsa", "lora/modeling_own.py", "export/id_rsa", "export/diffusers/id_rsa"):
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        (run / place).write_text("private")
    Hub.asked.clear()
    command(str(run), "--push", "me/mine")
    assert f"{hub}/me/mine" in capsys.readouterr().out
    lines = next(body for path, body, _ in Hub.asked if "commit" in path).splitlines()
    sent = {own["value"]["path"] for own in map(json.loads, lines) if own["key"] == "file"}
    assert {name for name in sent if not name.startswith("pictures/")} == {
        "README.md",
        "curves.png",
        "pytorch_lora_weights.safetensors",
    }
    assert {name for name in sent if name.startswith("pictures/")} == {
        f"pictures/{number:02d}-{when}.png" for number in range(4) for when in ("before", "after")
    }


@pytest.mark.parametrize("name", ["modeling_own.py", "adapter_model.bin", "id_rsa", "deep/x.pkl"])
def test_code_and_pickles_beside_a_language_models_weights_are_not_exported(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Whose folder is exported as it is."""
    configuration = {"extends": str(recipe("tiny_lm/grpo")), "output": str(run.parent), "name": "run"}
    (run / "config.yaml").write_text(yaml.safe_dump(configuration))
    (run / "lora" / name).parent.mkdir(exist_ok=True)
    (run / "lora" / name).write_text("private")
    with pytest.raises(SystemExit) as left:
        main(["export", str(run)])
    assert left.value.code == 2 and f"lora/{name} is neither weights nor settings" in capsys.readouterr().err
    assert not (run / "export").exists() or not list((run / "export").rglob("*"))
    (run / "lora" / name).unlink()
    command(str(run))
