"""Weights as they lie in folders and on the hub."""

from pathlib import Path

import pytest
import torch

from rewards.vision import load_repository, weights_file


def write(folder: Path, value: float) -> Path:
    """A repository with weights in two files, and a trainer's arguments, which are an object of any class."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"value": 1}')
    torch.save({"first": torch.tensor(value)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"second": torch.tensor(2.0)}, folder / "pytorch_model-00002-of-00002.bin")
    torch.save(Path("anything"), folder / "training_args.bin")
    return folder


def test_only_weights_are_read(tmp_path: Path) -> None:
    config, tensors = load_repository(str(write(tmp_path / "model", 1.0)))
    assert config == {"value": 1} and tensors == {"first": torch.tensor(1.0), "second": torch.tensor(2.0)}


def test_a_revision_of_a_hub_name_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"main": "a" * 40, "tried": "b" * 40}
    place = tmp_path / "models--somebody--model"
    for value, (name, commit) in enumerate(commits.items()):
        write(place / "snapshots" / commit, float(value))
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for source, value in (("somebody/model", 0.0), ("somebody/model@tried", 1.0)):
        assert load_repository(source)[1]["first"] == value
    file = "pytorch_model-00001-of-00002.bin"
    assert weights_file(f"somebody/model@tried/{file}") == place / "snapshots" / commits["tried"] / file
