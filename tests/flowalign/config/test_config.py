"""Configurations: what is wrong is said in one line that names the place and what would work."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from flowalign.config import Config, Lora, load, recipe
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError

RECIPE = recipe("tiny_sd3/short_flow_grpo")


def problem(*overrides: str, processes: int = 1) -> str:
    """The one line that the recipe with these overrides is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(RECIPE, overrides).check(processes)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", sorted(RECIPE.parents[1].glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(path: Path, tmp_path: Path) -> None:
    if "accelerate" in path.parts:
        pytest.skip("a configuration of accelerate")
    # the files that do not come with flowalign
    Image.new("RGB", (8, 8)).save(tmp_path / "own.png")
    line = {key: "own.png" for key in ("prompt", "chosen", "rejected", "image", "target")}
    line |= {"regions": []}
    # as many as preferences must be
    lines = [json.dumps(line | {"label": label}) + "\n" for label in (True, False)] * 50
    (tmp_path / "own.jsonl").write_text("".join(lines))
    data = load(path).data
    here = str(tmp_path / "own.jsonl")
    own = [f"data.prompts={here}"] if data.prompts.endswith(".jsonl") else []
    if Path(data.prompts).parent.name:
        own = [f"{section}={{prompts: {here}, column: prompt}}" for section in ("data", "evaluation")]
    own += [f"evaluation.prompts={here}"] if path.stem.startswith(("judge", "flow_grpo_geneval")) else []
    load(path, own).check(processes=1)


@pytest.mark.parametrize("path", sorted(RECIPE.parents[1].glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_a_large_model_says_what_it_needs(path: Path) -> None:
    if path.parent.name in (
        "accelerate",
        "tiny_emu3",
        "tiny_lm",
        "tiny_sd3",
        "tiny_video",
        "tiny_vlm",
    ) or "extends" in yaml.safe_load(path.read_text()):
        pytest.skip("of a tiny model, or as the recipe that it extends")
    comment = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert "GB" in comment and "GPU" in comment
    assert "measured" in comment or "estimated" in comment


def test_a_dumped_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load(RECIPE, ["training.seed=3", "rollout.plan.size=1"])
    (tmp_path / "config.yaml").write_text(config.dump())
    assert load(tmp_path / "config.yaml") == config
    assert config.name == "tiny_sd3-short_flow_grpo-seed3"


def test_overrides_reach_any_key_with_yaml_values() -> None:
    overrides = ["training.optimizer.learning_rate=1.0e-5", "model.lora=null", "rollout.sigmas=[1.0, 0.5]"]
    config = load(RECIPE, [*overrides, "rollout.steps=2", "name=mine"])
    assert config.training.optimizer.learning_rate == 1e-5
    assert config.model.lora is None and config.rollout.sigmas == [1.0, 0.5] and config.name == "mine"


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("trainning.iterations=3", "trainning", "did you mean 'training'"),
        ("training.group_sise=4", "training.group_sise", "did you mean 'group_size'"),
        ("training.optimizer.learning_rat=1", "training.optimizer.learning_rat", "did you mean 'learning_rate'"),
        ("model.lora.rnk=3", "model.lora.rnk", "did you mean 'rank'"),
        ("rollout.gidance=3", "rollout.gidance", "did you mean 'guidance'"),
        ("rollout.guidance_schedule=3", "rollout.guidance_schedule", "did you mean 'guidance'"),
        ("evaluation.pictures_per_prompt=3", "evaluation.pictures_per_prompt", "did you mean 'samples_per_prompt'"),
        ("evaluation.save_pictures=3", "evaluation.save_pictures", "did you mean 'save_samples'"),
        ("evaluation.zzz=3", "evaluation.zzz", "choose from"),
        ("algorithm.kl_weigth=0.1", "algorithm.kl_weigth", "did you mean 'kl_weight'"),
        ("algorithm.loss.clip_rang=0.1", "algorithm.loss", "did you mean 'clip_range'"),
        ("algorithm.clip_range=0.1", "algorithm.clip_range", "it stands in loss: {clip_range: ...}"),
        ("algorithm.combine=gdpo", "algorithm.combine", "advantage: {name: per_reward} or {name: gdpo}"),
        ("rollout.plan.siz=2", "rollout.plan", "did you mean 'size'"),
        ("rewards=[{name: shapes, strict_wait: 1}]", "rewards.0", "did you mean 'strict_weight'"),
    ],
)
def test_a_misspelt_key_names_the_nearest(override: str, key: str, hint: str) -> None:
    message = problem(override)
    assert message.startswith(key) and hint in message


@pytest.mark.parametrize(("old", "new"), [("texts_per_prompt", "samples_per_prompt"), ("save_texts", "save_samples")])
def test_a_key_of_earlier_configurations_of_texts_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{new}'"):
        load(recipe("tiny_lm/grpo"), [f"evaluation.{old}=3"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.iterations=many", "training.iterations"),
        ("training.iterations=0", "training.iterations"),
        ("training.group_size=1", "training.group_size"),
        ("training.optimizer.betas=[0.9]", "training.optimizer.betas"),
        ("model.dtype=float8", "model.dtype"),
        ("model.lora=yes", "model.lora"),
        ("rollout.guidance=0.5", "rollout.guidance"),
        ("rollout.plan.size=two", "rollout.plan.size"),
        ("rollout.plan.size=0", "rollout.plan"),
        ("algorithm.loss.clip_range=-1", "algorithm.loss.clip_range"),
        ("rewards=[]", "rewards"),
        ("rewards=[{name: shapes, weight: heavy}]", "rewards.0.weight"),
        ("rewards=[{name: shapes, strict_weight: heavy}]", "rewards.0.strict_weight"),
        ("data=3", "data"),
    ],
)
def test_a_wrong_value_names_its_key(override: str, key: str) -> None:
    assert problem(override).startswith(key)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm.name=flow_grop", "did you mean 'flow_grpo'"),
        ("algorithm.name=flow_grpo_fst", "did you mean 'flow_grpo_fast'"),
        ("rewards=[{name: shaps}]", "did you mean 'shapes'"),
        ("rollout.kernel=flow_sd", "did you mean 'flow_sde'"),
        ("rollout.plan.name=windw", "did you mean 'window'"),
        ("rewards=[{name: my.module.reward}]", "cannot be imported"),
        ("rewards=[{name: 'rewards.shapes:no_such_reward'}]", "cannot be imported"),
        ("training.optimizer.schedule=cosin", "'cosine'"),
    ],
)
def test_an_unknown_name_gets_the_nearest(override: str, hint: str) -> None:
    assert hint in problem(override)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["rollout.plan.size=9"], "do not fit below step"),
        (["rollout.eta=0"], "no stochastic step"),
        (["rollout.steps=1", "rollout.sigmas=null", "rollout.plan.name=all"], "rollout.plan"),
        (["training.updates_per_iteration=5"], "cannot be split into 5 equal updates"),
        (["rollout.sigmas=[1.0, 0.5]"], "rollout.sigmas"),
        (["evaluation.sigmas=[1.0, 0.5]"], "evaluation.sigmas"),
        (["rollout.guidance_gradient=conditional"], "there is no unconditional branch"),
        (["rollout.negative_prompt=blurry"], "rollout.guidance is 1"),
        (["training.ema_decay=null", "training.ema_every=8"], "training.ema_decay"),
        (["evaluation.guidance_2=2"], "evaluation.guidance is 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], hint: str) -> None:
    assert hint in problem(*overrides)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.optimizer.learning_rate=.inf", "finite"),
        ("training.optimizer.learning_rate=.nan", "finite"),
        ("training.optimizer.weight_decay=.inf", "finite"),
        ("training.optimizer.betas=[0.9, 1.0]", "less than 1"),
        ("rewards=[{name: shapes, weight: .nan}]", "rewards.0.weight"),
        ("algorithm.loss.clip_range=.nan", "algorithm.loss.clip_range: a finite number"),
        ("rollout.sigmas=[0.2, 0.4, 0.6, 0.8, 1.0]", "rollout.sigmas: noise levels fall"),
        ("rollout.sigmas=[1.0, 0.8, 0.8, 0.4, 0.2]", "rollout.sigmas: noise levels fall"),
        ("rollout.sigmas=[1.5, 0.8, 0.6, 0.4, 0.2]", "rollout.sigmas: noise levels fall"),
        ("evaluation.sigmas=[1.0, 0.8, 0.6, 0.4, -0.2]", "evaluation.sigmas: noise levels fall"),
        ("rollout.sigmas=[1.0, 0.8, 0.6, 0.4, .nan]", "rollout.sigmas"),
        (f"training.seed={2**63}", "training.seed"),
        (f"evaluation.seed={2**63}", "evaluation.seed"),
        ("name=" + "x" * 300, "output: "),
        ("algorithm={name: 'rewards.base:score'}", "is no algorithm"),
        ("data.selection={name: 'rewards.base:score'}", "is no selection"),
        ("training.iterations=" + "9" * 5000, "training.iterations"),
        ("training.iterations=2026-99-99", "month must be"),
    ],
)
def test_numbers_that_no_run_can_use_are_refused(override: str, hint: str) -> None:
    assert hint in problem(override)


def test_an_output_that_is_a_file_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"output: {tmp_path / 'file'} is a file, and a folder is wanted" in problem(f"output={tmp_path / 'file'}")


def test_evaluation_is_as_the_rollout_where_it_leaves_things_open() -> None:
    values: dict[str, Any] = yaml.safe_load(recipe("tiny_sd3/flow_grpo").read_text())
    values["rollout"] |= {"guidance": 2.0, "height": 16}
    values["evaluation"] = {"prompts": "shapes_heldout", "height": 32}
    config = Config.model_validate(values)
    evaluation = config.evaluation
    assert (evaluation.steps, evaluation.sigmas) == (5, config.rollout.sigmas)
    assert (evaluation.guidance, evaluation.height, evaluation.batch_size) == (2.0, 32, 16)
    # noise levels go with their number of steps
    values["evaluation"] = {"steps": 7}
    assert Config.model_validate(values).evaluation.sigmas is None
    assert Config.model_validate(values | {"evaluation": {}}).evaluation.steps == 5


def test_a_loras_alpha_is_twice_its_rank() -> None:
    assert (Lora().alpha, Lora(rank=8).alpha, Lora(rank=8, alpha=8).alpha) == (64, 16, 8)
    assert load(RECIPE, ["model.lora={rank: 4}"]).model.lora.alpha == 8


def test_a_run_has_the_same_name_however_its_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"extends: {RECIPE}\n")
    monkeypatch.chdir(folder)
    for path in ("mine.yaml", "./mine.yaml", "../project/mine.yaml", str(folder / "mine.yaml")):
        assert load(path).name == "project-mine-seed0"


def test_an_empty_section_empties_that_of_the_file_it_extends(tmp_path: Path) -> None:
    assert load(RECIPE).data.where == {"category": ["counting"]}
    (tmp_path / "own.yaml").write_text("extends: tiny_sd3/demo\ndata: {where: {}}\nevaluation: {steps: 7}\n")
    own = load(tmp_path / "own.yaml")
    assert own.data.where == {} and own.data.prompts == "shapes_train"
    assert own.evaluation.where == {"category": ["counting"]} and own.evaluation.steps == 7


def test_a_configuration_of_ones_own_extends_a_shipped_recipe_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: tiny_sd3/nft\nrollout: {batch_size: 3}\n")
    config = load(tmp_path / "mine.yaml")
    assert (config.algorithm.name, config.rollout.batch_size) == ("nft", 3)


def test_groups_that_cannot_be_split_over_the_processes_are_refused() -> None:
    message = problem("training.prompts_per_iteration=6", processes=4)
    assert "6 groups cannot be split over 4 processes" in message and "8 would work" in message
    load(RECIPE, ["training.prompts_per_iteration=6"]).check(processes=3)


@pytest.mark.parametrize("override", ["nothing", "model.path.deeper=1", "model.lora=[", "data.where={"])
def test_an_override_that_makes_no_sense_is_one_line(override: str) -> None:
    assert override.partition("=")[0] in problem(override)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a: [", "not readable YAML"),
        ("- 1", "top level"),
        ("", "top level"),
        ("model: {path: x}", "is required"),
        ("training: {seed: 1}\ntraining: {seed: 2}", "the key 'training' stands there twice"),
        ("made: 2026-13-45", "month must be"),
        ("a: " + "9" * 5000, "not readable YAML"),
        ("a: " + "{b: " * 5000, "nested too deeply"),
        ("a: &a [*a]", "a value contains itself"),
        ("a: &a {b: *a}", "a value contains itself"),
        (
            "a: &a [x, x, x, x, x, x, x, x]\n"
            + "\n".join(f"{n}: &{n} [{', '.join([f'*{b}'] * 8)}]" for b, n in zip("abcdefg", "bcdefgh")),
            "more than 1,000,000 values",
        ),
        ("#" * 1_000_001, "more than 1,000,000 bytes"),
        ("extends: broken.yaml", "extends itself: broken.yaml -> broken.yaml"),
        ("extends: 3", "the name of a file is wanted"),
        ("extends: [a, b]", "the name of a file is wanted"),
        ("? {a: b}\n: c", "not readable YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not readable YAML"),
    ],
    ids=range(17),
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=hint) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration at .*nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is not a file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", "/dev/zero"):
        with pytest.raises(ConfigError, match="is not a file"):
            load(path)


def test_a_section_with_defaults_only_needs_no_keys() -> None:
    values: dict[str, Any] = yaml.safe_load(recipe("tiny_sd3/flow_grpo").read_text())
    assert Config.model_validate({k: v for k, v in values.items() if k not in ("rollout", "evaluation")})


# Prompts


def test_prompts_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat\n\na dog\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a cat", "kind": "x"}\n{"prompt": "a dog", "kind": "y"}\n')
    assert Prompts.read(str(tmp_path / "a.txt")).texts == ["a cat", "a dog"]
    read = Prompts.read(str(tmp_path / "b.jsonl"), {"kind": ["y"]})
    assert read.texts == ["a dog"] and read.metadata == [{"kind": "y"}]


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("empty.txt", "\n\n", "no prompt is left"),
        ("empty.jsonl", "", "no prompt is left"),
        ("bad.jsonl", '{"text": "a cat"}\n', "key 'prompt'"),
        ("bad.jsonl", "a cat\n", "key 'prompt'"),
        ("bad.jsonl", '{"prompt": 3}\n', "key 'prompt'"),
        ("bad.jsonl", "[" * 100_000, "key 'prompt'"),
        ("bad.jsonl", "9" * 5000, "key 'prompt'"),
        ("bad.jsonl", '{"prompt": "\\ud800"}\n', "line 1: the prompt holds half of a surrogate pair"),
        ("bad.jsonl", '{"prompt": "a\\u0000b"}\n', "line 1: the prompt holds a NUL"),
        ("long.txt", "x" * 100_001, "line 1: the prompt has 100,001 characters; at most 100,000 work"),
        ("bad.jsonl", '{"prompt": "a", "image": []}\n', "'image' is not a file name or a list of them"),
        ("bad.jsonl", '{"prompt": "a", "negative_prompt": null}\n', "'negative_prompt' is not a text"),
        ("bad.jsonl", '{"prompt": "a", "image": "' + "x" * 5000 + '"}\n', "line 1: no picture at"),
        (
            "table.csv",
            "text\na cat\n",
            "table.csv, line 2: not a record with a text under the key 'prompt'; its keys are text",
        ),
        ("list.json", '["a cat"]', "prompts are read from .txt, .jsonl, .csv, .tsv or .parquet files"),
    ],
)
def test_prompt_files_that_cannot_be_used_are_refused(tmp_path: Path, name: str, text: str, hint: str) -> None:
    (tmp_path / name).write_text(text)
    for key in ("data", "evaluation"):
        message = problem(f"{key}.prompts={tmp_path / name}", f"{key}.where={{}}")
        assert name in message and hint in message


def test_missing_prompts_name_the_nearest_shipped_list() -> None:
    assert "did you mean 'shapes_train'" in problem("data.prompts=shapes_trian")
    assert "nowhere.txt" in problem("evaluation.prompts=nowhere.txt")
    for source in ("''", "x" * 5000, "/dev/zero"):
        assert "no prompts at" in problem(f"data.prompts={source}")
    assert "no prompt is left where" in problem("data.where={category: [nonsense]}")


# Batches


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("share", [True, False])
def test_the_processes_share_one_batch_with_whole_groups(processes: int, share: bool) -> None:
    prompts = Prompts([f"prompt {i}" for i in range(4)], [{}] * 4)
    for iteration in range(3):
        one = draw_batch(prompts, iteration, 6, 4, 5, share)
        parts = [draw_batch(prompts, iteration, 6, 4, 5, share, p, processes) for p in range(processes)]
        for name in ("prompts", "group", "seeds", "noise_seeds"):
            assert [v for part in parts for v in getattr(part, name)] == getattr(one, name)
        groups = [set(part.group) for part in parts]
        assert all(not (a & b) for i, a in enumerate(groups) for b in groups[:i])
        assert len(set(one.noise_seeds)) == 24
        assert len(set(one.seeds)) == (6 if share else 24)
        for number in range(6):
            assert len({p for p, g in zip(one.prompts, one.group, strict=True) if g == number}) == 1


def test_every_prompt_is_used_before_one_comes_again() -> None:
    prompts = Prompts([f"prompt {i}" for i in range(5)], [{}] * 5)
    drawn = [draw_batch(prompts, i, 3, 2, 0, False).prompts[::2] for i in range(10)]
    walked = [prompt for batch in drawn for prompt in batch]
    orders = [walked[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(order) == prompts.texts for order in orders)
    assert len({tuple(order) for order in orders}) > 1
