"""Embeddings on disk: the same bits, no text encoder for prompts that are known, and files that are whole."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.embeddings import EmbeddingStore
from tests.flowalign.small_run import small_run

PROMPTS = ["a red circle", "two blue squares", "a red circle"]
TINY = ASSETS / "tiny_sd3"
SHORT = {"max_sequence_length": 0}


def start(folder: Path, dtype: str = "float32") -> DiffusersPolicy:
    return DiffusersPolicy.from_pretrained(TINY, dtype, embeddings=folder, encode_options=SHORT)


def latents(policy: DiffusersPolicy, *more: str) -> torch.Tensor:
    prompts = [*PROMPTS, *more]
    made = policy.sample(prompts, range(len(prompts)), steps=2, guidance=3.0, negative_prompt="three green circles")
    return made.trajectory.final


def encoders(policy: DiffusersPolicy) -> list[bool]:
    """Which of the text encoders are there."""
    return [getattr(policy.pipeline, name) is not None for name in ("text_encoder", "text_encoder_2")]


def files(folder: Path) -> int:
    assert not list(folder.rglob(".partial*"))
    return len(list(folder.rglob("*.safetensors")))


def test_a_second_start_has_the_same_bits_without_text_encoders(tmp_path: Path) -> None:
    plain = latents(DiffusersPolicy.from_pretrained(TINY, encode_options=SHORT))
    first = start(tmp_path)
    assert torch.equal(latents(first), plain) and encoders(first) == [True, True]
    assert files(tmp_path) == 3
    second = start(tmp_path)
    assert torch.equal(latents(second), plain) and encoders(second) == [False, False]
    assert torch.equal(second.prompt_vectors(PROMPTS), first.prompt_vectors(PROMPTS))
    # a prompt that is new brings them
    made = latents(second, "a yellow triangle")
    assert torch.equal(made[:3], latents(first, "a yellow triangle")[:3]) and encoders(second) == [True, True]
    assert files(tmp_path) == 4


def test_other_encoders_and_settings_have_files_of_their_own(tmp_path: Path) -> None:
    latents(start(tmp_path))
    other = start(tmp_path, "bfloat16")
    latents(other)
    assert files(tmp_path) == 6 and encoders(other) == [True, True]
    one = EmbeddingStore(tmp_path, TINY, {"encode": SHORT})
    one.write("a", False, {"x": torch.ones(2)})
    for store, negative in (
        (EmbeddingStore(tmp_path, TINY, {"encode": {}}), False),
        (EmbeddingStore(tmp_path, TINY / "model_index.json", {"encode": SHORT}), False),
        (one, True),
    ):
        assert store.read("a", negative) is None
    assert one.read("b", False) is None
    assert torch.equal(one.read("a", False)["x"], torch.ones(2))


def _write(folder: Path, count: int) -> None:
    store = EmbeddingStore(folder, TINY, {})
    for number in range(count):
        store.write(f"prompt {number % 3}", False, {"x": torch.full((2000,), float(number % 3))})


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_processes_that_write_the_same_never_show_half_a_file(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path, 60)) for _ in range(3)]
    for process in processes:
        process.start()
    store, seen = EmbeddingStore(tmp_path, TINY, {}), 0
    while seen < 20 or any(process.is_alive() for process in processes):
        for number in range(3):
            made = store.read(f"prompt {number}", False)
            if made is not None:
                seen += 1
                assert torch.equal(made["x"], torch.full((2000,), float(number)))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert files(tmp_path) == 3


def test_a_run_whose_prompts_are_known_loads_no_text_encoder(tmp_path: Path) -> None:
    own = [f"model.embeddings={tmp_path / 'kept'}", "training.prompts_per_iteration=2", "training.group_size=2"]
    weights = []
    for name in ("one", "two"):
        run = small_run("tiny_sd3/nft", tmp_path / name, *own)
        run.iterate()
        weights.append([value.clone() for value in run.policy.trainable().values()])
        assert encoders(run.policy) == [name == "one"] * 2
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_embeddings_that_change_are_not_kept(tmp_path: Path) -> None:
    own = [f"model.embeddings={tmp_path}", "model.text_lora={rank: 2}"]
    with pytest.raises(ConfigError, match="model.embeddings: with text_lora they change in every update; null works"):
        load(recipe("tiny_sd3/flow_grpo"), own).check(1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="model.embeddings: .*file is a file, and a folder is wanted there"):
        load(recipe("tiny_sd3/nft"), [f"model.embeddings={tmp_path / 'file'}"]).check(1)
