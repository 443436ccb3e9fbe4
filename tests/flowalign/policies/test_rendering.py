"""The prompt enhancer: a text earns what its picture earns, and the generator stays as it is."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.app.gallery.runs import read_run
from flowalign.config import load, recipe
from flowalign.config.rewards import build_rewards
from flowalign.data import ASSETS, Prompts
from flowalign.data.batches import draw_batch
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.rendering import Rendered, renderer
from flowalign.training import Trainer
from rewards import RewardError, WeightedSum, score
from rewards.shapes import heldout_requests, parse, train_requests
from rewards.shapes.reward import ShapesReward
from rewards.text.shape import SoftLength

SAMPLING = {"steps": 5, "sigmas": [1.0, 0.8, 0.6, 0.4, 0.2], "guidance": 3.0}
TEXTS = ["a red circle", "two blue squares", "a red circle", "a red circle"]
LOOSE = ["scarlet disc", "a pair of navy blocks", "scarlet disc", "disc in ruby"]
METADATA: list[dict[str, Any]] = [
    {"means": means, "seed": seed} for means, seed in zip([*TEXTS[:2], "a red circle", "a green square"], [5, 6, 7, 5])
]


def reward(**settings: Any) -> Rendered:
    return Rendered("tiny_sd3", ShapesReward(), "means", encode={"max_sequence_length": 0}, **SAMPLING, **settings)


def checksum(module: torch.nn.Module) -> str:
    content = hashlib.sha256()
    for tensor in module.state_dict().values():
        content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def generator_checksums(generator: Any) -> dict[str, str]:
    parts = generator.pipeline.components
    return {name: checksum(part) for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def test_a_text_earns_what_plain_diffusers_makes_of_it_judged_by_what_was_meant(tiny_policy: Any) -> None:
    pipeline = tiny_policy().pipeline
    judged = reward()
    made = [
        pipeline(
            text,
            num_inference_steps=5,
            sigmas=SAMPLING["sigmas"],
            guidance_scale=3.0,
            max_sequence_length=0,
            generator=torch.Generator().manual_seed(record["seed"]),
        ).images[0]
        for text, record in zip(TEXTS, METADATA, strict=True)
    ]
    rendered = judged.render(TEXTS, METADATA)
    for one, other in zip(rendered, made, strict=True):
        difference = np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int))
        assert difference.max() <= 1  # a batch rounds differently
    scores = score(judged, TEXTS, LOOSE, METADATA)  # type: ignore[arg-type]
    expected = ShapesReward()(rendered, [str(record["means"]) for record in METADATA], METADATA)
    assert torch.equal(scores.value, expected.value) and set(scores.parts) == set(expected.parts)
    # the last picture is the first one, and was asked to be something else
    assert rendered[0] is rendered[3] and scores.value[3] < 1


def test_texts_that_are_alike_are_rendered_once() -> None:
    judged = reward()
    judged.render(["a red circle"] * 4, [{"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1}])
    # two pictures, five steps, with and without the prompt
    assert judged.generator.forwards == 2 * 5 * 2


def test_the_prompt_in_a_text_that_reasons() -> None:
    judged = reward(pattern=r"<answer>\s*(.*?)\s*</answer>")
    assert judged.prompt("<think><answer>one</answer></think>\n<answer> a red\ncircle </answer>") == "a red\ncircle"
    assert judged.prompt("a red circle") == ""
    assert reward().prompt(" a red circle\n") == "a red circle"


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(RewardError, match="'scarlet disc' has no 'means'"):
        score(reward(), TEXTS[:1], LOOSE[:1], [{"seed": 1}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'soft_length' does not score pictures"):
        Rendered("tiny_sd3", SoftLength(1, 2))


def test_it_is_found_in_a_weighted_sum() -> None:
    one = reward()
    assert renderer(WeightedSum([SoftLength(1, 2), one], [1.0, 1.0])) is one
    assert renderer(SoftLength(1, 2)) is None


def small(folder: Path) -> Trainer:
    overrides = ["training.iterations=1", "training.prompts_per_iteration=2", "training.group_size=4", "name=run"]
    overrides += ["training.previews=2", "training.optimizer.warmup_updates=0", f"output={folder}"]
    overrides += ["evaluation.limit=6", "evaluation.save_samples=3"]
    return Trainer(load(recipe("tiny_lm/prompt_enhancer"), overrides), progress=False)


def test_training_changes_the_rewriter_and_not_the_generator(tmp_path: Path) -> None:
    trainer = small(tmp_path)
    generator = trainer.scorer.reward.generator
    before, rewriter = generator_checksums(generator), checksum(trainer.policy.network)
    assert len(before) == 4
    trainer.train()
    assert generator_checksums(generator) == before
    assert checksum(trainer.policy.network) != rewriter

    run = read_run(tmp_path / "run", "run")
    assert not run.notes and [moment.iteration for moment in run.moments] == [0, 1]
    for moment in run.moments:
        assert len(moment.samples) == 3
        for sample in moment.samples:
            (line,) = [
                record
                for record in map(json.loads, (sample.path.parent / "samples.jsonl").read_text().splitlines())
                if record["picture"] == sample.path.name
            ]
            assert sample.rewritten == line["rewritten"] != line["prompt"]
            # the picture is the one that was scored
            verdict = ShapesReward()([Image.open(sample.path)], [line["metadata"]["means"]], [{}])
            assert verdict.value.item() == pytest.approx(sample.scores["reward"], abs=1e-6)
    for moment in run.previews:
        assert len(moment.groups) == 2
        for group in moment.groups:
            rewritten = {member["rewritten"]: member["reward"] for member in group["members"]}
            assert all(member["reward"] == rewritten[member["rewritten"]] for member in group["members"])


def test_members_of_a_group_differ_by_their_texts_alone(tmp_path: Path) -> None:
    trainer = small(tmp_path)
    batch = draw_batch(trainer.prompts, 3, 2, 4, 0, share_start_noise=True)
    seeds = [record["seed"] for record in trainer.scorer.metadata(batch, range(8))]
    assert seeds[:4] == [seeds[0]] * 4 and seeds[4:] == [seeds[4]] * 4 and seeds[0] != seeds[4]


def test_the_recipes_reward_is_the_generators_at_the_recipe() -> None:
    (built,) = build_rewards(load(recipe("tiny_lm/prompt_enhancer")).rewards)
    assert isinstance(built, Rendered) and not built.generator.trainable()


def test_the_shipped_rewriter_is_small_and_knows_some_of_the_generators_words() -> None:
    folder = ASSETS / "tiny_rewriter"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 2e6
    policy = LanguagePolicy.from_pretrained(folder)
    prompts = Prompts.read("loose_heldout")
    made = policy.decode(policy.sample(prompts.texts, list(range(300)), max_new_tokens=10, batch_size=300))
    right = sum(text == record["means"] for text, record in zip(made, prompts.metadata, strict=True)) / 300
    stored = json.loads((folder / "quality.json").read_text())["in_the_generators_words"]
    # a standard error of 0.025
    assert right == pytest.approx(stored, abs=0.1)


def test_what_is_held_out_is_never_trained_on() -> None:
    heldout, train = Prompts.read("loose_heldout"), Prompts.read("loose_train")
    assert not set(heldout.texts) & set(train.texts) and len(set(train.texts)) == len(train)
    for prompts, allowed in ((heldout, heldout_requests()), (train, train_requests())):
        assert {parse(record["means"]) for record in prompts.metadata} <= set(allowed)
        assert all(parse(record["means"]).category == record["category"] for record in prompts.metadata)
