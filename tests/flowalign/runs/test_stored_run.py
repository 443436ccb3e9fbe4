"""A run's folder of format 1, which stays as it is: every later flowalign reads it and goes on with it.

`flowalign train tiny_sd3/flow_grpo` wrote it, with one iteration of two prompts and a LoRA of rank 1, and peft 0.21.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowalign.app.cli.main import main
from flowalign.config import load
from flowalign.errors import FlowalignError
from flowalign.runs.checkpoint import _sum_of, check_weights, seal
from flowalign.training import Trainer

WEIGHTS = "pytorch_lora_weights.safetensors"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if Version(peft.__version__) < Version("0.21"):
        pytest.skip("the stored LoRA names settings that this peft does not know")
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(Path(__file__).with_name("stored_run"), "runs/stored_run"))


def ends(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_stored_run_is_small() -> None:
    files = [path for path in Path(__file__).with_name("stored_run").rglob("*") if path.is_file()]
    assert len(files) > 20 and sum(path.stat().st_size for path in files) < 200_000


def test_the_stored_run_is_read_and_goes_on(run: Path) -> None:
    assert ends("gallery", run) == 0 and ends("export", run) == 0
    assert ends("eval", run, "--pictures", "1", "--json", "made.json") == 0
    assert json.loads(Path("made.json").read_text())["samples"] == 2
    assert load_file(run / "export" / "diffusers" / WEIGHTS).keys() == load_file(run / "lora" / WEIGHTS).keys()
    trainer = Trainer(load(run / "config.yaml", ["training.iterations=2"]), resume=True, progress=False)
    assert trainer.iteration == 1 and trainer.train().metrics[-1]["iteration"] == 1
    newest = trainer.checkpoints.newest()
    assert json.loads((newest / "state.json").read_text())["format"] == 1
    with safe_open(newest / WEIGHTS, "pt") as file:
        # settings that only a later peft knows
        assert "null" not in file.metadata()["lora_adapter_metadata"]
    assert json.loads((run / "lora" / "checksums.json").read_text())["format"] == 1


@pytest.mark.parametrize("way", ["nan", "bit", "half", "cut", "missing"])
def test_damaged_weights_are_neither_sampled_nor_exported(
    run: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    file = run / "lora" / WEIGHTS
    tensors, raw = load_file(file), bytearray(file.read_bytes())
    if way == "nan":
        save_file({name: torch.full_like(value, torch.nan) for name, value in tensors.items()}, file)
        (run / "lora" / "checksums.json").unlink()
    elif way == "half":
        save_file(dict(list(tensors.items())[::2]), file)
    elif way == "bit":
        raw[-100] ^= 1
        file.write_bytes(raw)
    elif way == "cut":
        file.write_bytes(raw[:-100])
        (run / "lora" / "checksums.json").unlink()
    else:
        file.unlink()
    hint = {"nan": "is not finite", "cut": "cannot be read as weights", "missing": "cannot be read as weights"}
    for words in (["sample", run, "a circle"], ["export", run]):
        assert ends(*words) == 1 and hint.get(way, "is not as it was written") in last_line(capsys)
    assert not (run / "export" / "diffusers").exists()


def test_weights_of_the_same_numbers_are_the_same_file(tmp_path: Path) -> None:
    """Sets of names and metadata come in another order in every process."""
    code = (
        "import json, sys, torch\nfrom pathlib import Path\nfrom safetensors.torch import save_file\n"
        "from flowalign.runs.checkpoint import seal\nfolder = Path(sys.argv[1])\nfolder.mkdir()\n"
        "names = {'r': 2, 'targets': list({'to_q', 'to_k', 'to_v', 'to_out'})}\n"
        "more = {name: name for name in 'abcdefgh'} | {'lora_adapter_metadata': json.dumps(names, indent=2)}\n"
        "save_file({'b': torch.ones(3), 'a': torch.zeros(2)}, folder / 'x.safetensors', more)\n"
        "(folder / 'adapter_config.json').write_text(json.dumps(names))\nseal(folder)\n"
    )
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code, tmp_path / seed], env={"PYTHONHASHSEED": seed, **PATHS})
        assert done.returncode == 0
    for name in ("x.safetensors", "adapter_config.json", "checksums.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert load_file(tmp_path / "1" / "x.safetensors")["b"].tolist() == [1, 1, 1]
    check_weights(tmp_path / "1")


PATHS = {"PYTHONPATH": ":".join(filter(None, sys.path))}


def test_checksums_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "private").write_text("mine")
    seal(tmp_path / "lora")
    sums = {"../private": "0"}
    (tmp_path / "lora" / "checksums.json").write_text(json.dumps({"files": sums, "all": _sum_of(sums)}))
    with pytest.raises(FlowalignError, match="leads out of the folder"):
        check_weights(tmp_path / "lora")


@pytest.mark.parametrize("way", ["old", "later", "shape", "latin", "scores"])
def test_old_and_odd_files_give_one_line_each(run: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    folder = run / "checkpoints" / "checkpoint-000001"
    state = json.loads((folder / "state.json").read_text())
    resume = ["train", run / "config.yaml", "--resume", "training.iterations=2"]
    if way == "latin":
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(b'{"iteration": 1, "note": "\xe9"}\n')
        assert ends(*resume) == 1 and "metrics.jsonl is not UTF-8 text" in last_line(capsys)
        return
    if way == "scores":
        (run / "scores" / "iteration-000001.jsonl").write_text('{"prompt": 3}\n')
        assert ends("export", run) == 2 and "is no file of scores" in last_line(capsys)
        return
    if way == "old":
        del state["groups"]
    elif way == "later":
        state["format"] = 2
    else:
        tensors = load_file(folder / "trainable.safetensors")
        save_file({name: value[:1] for name, value in tensors.items()}, folder / "trainable.safetensors")
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    hints = {"old": "does not fit this run", "later": "has format 2, and this", "shape": "does not fit this run"}
    assert ends(*resume) == 1 and hints[way] in last_line(capsys)
