"""Names of the hub with a revision, loaded from a cache as the hub's client makes it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from flowalign.config import Weighted
from flowalign.config.rewards import build_rewards
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from rewards.hub import failure, hub, reason, split_revision


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("owner/model", "owner/model", None),
        ("owner/model@v1.0", "owner/model", "v1.0"),
        ("owner/model@refs/pr/3", "owner/model", "refs/pr/3"),
        ("a/folder/of@mine", "a/folder/of@mine", None),
        ("/a@b", "/a@b", None),
    ],
)
def test_what_follows_the_at_is_the_revision(source: str, name: str, revision: str | None) -> None:
    assert split_revision(source) == (name, revision)
    assert hub(source).get("revision") == revision


def test_a_model_that_comes_with_flowalign_is_not_asked_of_the_hub() -> None:
    assert hub("tiny_lm") == {"pretrained_model_name_or_path": str(ASSETS / "tiny_lm")}
    (made,) = build_rewards([Weighted(name="learned_prm", outcome={"name": "exact_match"}, model="tiny_lm")])
    assert made.name == "learned_prm(exact_match)"


def test_a_folder_may_have_an_at_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b@c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub("a/b@c") == {"pretrained_model_name_or_path": "a/b@c"}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, where the hub is out of reach."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def keep(cache: Path, asset: str, channels: dict[str, int]) -> None:
    """Two commits of a model, the second one by the name 'main'; of each the vocabulary or latents of another size."""
    folder = cache / f"models--me--{asset}"
    (folder / "refs").mkdir(parents=True)
    for name, commit in (("v1", "1" * 40), ("main", "2" * 40)):
        (folder / "refs" / name).write_text(commit)
        shutil.copytree(ASSETS / asset, folder / "snapshots" / commit)
    for file in channels:
        path = folder / "snapshots" / ("1" * 40) / file
        saved = json.loads(path.read_text()) | {"_told_apart": channels[file]}
        path.write_text(json.dumps(saved))


def test_a_pipeline_is_loaded_at_its_revision(cached: Path) -> None:
    keep(cached, "tiny_sd3", {"transformer/config.json": 7})
    old, new = (DiffusersPolicy.from_pretrained(name) for name in ("me/tiny_sd3@v1", "me/tiny_sd3"))
    assert old.denoiser.config["_told_apart"] == 7 and "_told_apart" not in new.denoiser.config
    assert torch.equal(old.denoiser.pos_embed.proj.weight, new.denoiser.pos_embed.proj.weight)


def test_a_language_model_is_loaded_at_its_revision(cached: Path) -> None:
    keep(cached, "tiny_lm", {"config.json": 7})
    old, new = (LanguagePolicy.from_pretrained(name) for name in ("me/tiny_lm@v1", "me/tiny_lm"))
    assert old.network.config._told_apart == 7 and not hasattr(new.network.config, "_told_apart")


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (lambda: DiffusersPolicy.from_pretrained("no/such"), "no pipeline at 'no/such': "),
        (lambda: LanguagePolicy.from_pretrained("no/such"), "no language model at 'no/such': "),
        (
            lambda: build_rewards([Weighted(name="pick_score", model="no/such")]),
            "rewards.0: the weights of 'pick_score': ",
        ),
    ],
)
def test_weights_that_are_not_here_say_what_gets_them(
    load: Callable[[], object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=named + "it is not on this machine, and the hub did not answer; .*`flowalign fetch CONFIG`"
    ):
        load()


def test_what_the_hub_refuses_is_told_apart() -> None:
    """As libraries pass it on: in an error of their own."""
    answers = {GatedRepoError: "accept its licence", RepositoryNotFoundError: "no such repository"}
    for kind, words in answers.items():
        outer = OSError("You are trying to access something")
        outer.__cause__ = kind("403", response=httpx2.Response(403, request=httpx2.Request("GET", "https://hub")))
        assert words in reason(outer)
    assert failure(OSError("a\nb")) is None and reason(OSError("a\nb")) == "a b"
