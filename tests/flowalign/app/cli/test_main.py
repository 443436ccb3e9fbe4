"""The command line: what it prints, and that people's mistakes end in one line and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from diffusers import DiffusionPipeline

import flowalign
from flowalign import registry
from flowalign.app.cli.main import app, main
from flowalign.app.cli.modules import find_beside
from flowalign.app.cli.sampling import OPTIONS
from flowalign.config import load, recipe
from flowalign.policies.diffusion import DiffusersPolicy

RECIPE = str(recipe("tiny_sd3/flow_grpo"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is an error."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(DiffusersPolicy, "from_pretrained", load)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert left.value.code == 2 and len(lines) == 1 and captured.out == ""
    assert lines[0].startswith("flowalign: ")
    return lines[0]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nowhere.yaml"], "no configuration at nowhere.yaml"),
        (["nowhere/tiny_sd3/demo.yaml"], "the recipe that comes with flowalign is called tiny_sd3/demo"),
        ([RECIPE, "training.group_sise=4"], "did you mean 'group_size'"),
        ([RECIPE, "training.iterations=many"], "training.iterations"),
        ([RECIPE, "algorithm.name=flow_grop"], "did you mean 'flow_grpo'"),
        ([RECIPE, "rewards=[{name: shaps}]"], "did you mean 'shapes'"),
        ([RECIPE, "rewards=[{name: shapes, strict_wait: 1}]"], "did you mean 'strict_weight'"),
        ([RECIPE, "data.prompts=nowhere.txt"], "no prompts at 'nowhere.txt'"),
        ([RECIPE, "rollout.plan.size=9"], "rollout.plan"),
    ],
)
def test_bad_input_is_one_line_before_any_model_loads(
    no_model: None, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    assert hint in refused(capsys, "train", *arguments)


def test_groups_that_cannot_be_split_over_the_processes(
    no_model: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "3 groups cannot be split over 2 processes" in refused(
        capsys, "train", RECIPE, "training.prompts_per_iteration=3"
    )


def test_an_empty_prompts_file(no_model: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    line = refused(capsys, "train", RECIPE, f"data.prompts={tmp_path}/empty.txt", "data.where={}")
    assert "empty.txt: no prompt is left" in line


def test_a_run_that_exists_is_not_written_over(
    no_model: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints" / "checkpoint-000001").mkdir(parents=True)
    assert "--resume" in refused(capsys, "train", RECIPE, f"output={tmp_path}", "name=run")


@pytest.mark.parametrize("arguments", [["train", RECIPE, "model.path=nowhere"], ["sample", "nowhere", "a red circle"]])
def test_a_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    if arguments[0] == "train":
        arguments = [*arguments, f"output={tmp_path}"]
    assert "no pipeline at 'nowhere'" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("rollout.num_frames=9", "rollout.num_frames: StableDiffusion3Pipeline has no num_frames"),
        ("model.encode={max_sequence_lenght: 3}", "did you mean 'max_sequence_length'"),
        ("model.attention=flesh", "attention backend 'flesh' cannot be used here; did you mean 'flash'"),
        ("rewards=[{name: exact_match}]", "'exact_match' scores texts, and this model makes pictures"),
        ("trackers=[tensorbord]", "trackers: there is no 'tensorbord'; did you mean 'tensorboard'"),
        ("trackers=[clearml]", "trackers: 'clearml' is not installed"),
    ],
)
def test_what_the_pipeline_or_the_rewards_do_not_take_is_known_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, hint: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", load)
    assert hint in refused(capsys, "train", RECIPE, f"output={tmp_path}", override)


def test_sizes_that_the_pipeline_cannot_make_are_known_before_anything_is_sampled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def sample(*_: object, **__: object) -> None:
        raise AssertionError("something was sampled")

    monkeypatch.setattr(DiffusersPolicy, "sample", sample)
    with pytest.raises(SystemExit):
        main(["train", RECIPE, f"output={tmp_path}", "rollout.height=33", "evaluation.height=32"])
    assert "flowalign: rollout: StableDiffusion3Pipeline cannot make height 33; 32 or" in capsys.readouterr().err


def test_a_folder_or_recipe_that_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for folder in (str(tmp_path), RECIPE):
        assert f"no configuration at {Path(folder) / 'config.yaml'}" in refused(capsys, "eval", folder)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "reward", ["{name: strange.reward}", "{name: gate, passes: {name: strange.reward}, then: {name: shapes}}"]
)
def test_a_runs_configuration_imports_nothing_of_others_without_trust(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    (tmp_path / "strange.py").write_text("open('imported', 'w').close()\ndef reward(samples, prompts): return []\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(f"extends: {RECIPE}\nrewards: [{reward}]\n")
    line = refused(capsys, "eval", str(tmp_path))
    assert "config.yaml names the code 'strange." in line and "--trust" in line
    assert not (tmp_path / "imported").exists()


def test_list_shows_everything_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "list").splitlines()
    assert [line[:-1] for line in lines if not line.startswith(" ")] == list(registry.TABLES)
    names = [line.split()[0] for line in lines if line.startswith(" ")]
    assert names == [name for table in registry.TABLES for name in registry.names(table)]
    assert all(len(line.split()) > 2 for line in lines if line.startswith(" "))


def test_list_shows_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert "flow_grpo" in printed(capsys, "list", "algorithms")
    assert "did you mean 'kernels'" in refused(capsys, "list", "kernel")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version").strip() == f"flowalign {flowalign.__version__}"


def test_samples_are_those_of_plain_diffusers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = printed(
        capsys, *["sample", "tiny_sd3", "a red circle", "two blue squares", "--count", "2"],
        *["--steps", "2", "--seed", "5", "--output", str(tmp_path)],
    )  # fmt: skip
    # the same seeds for every prompt
    names = ["00000-seed5.png", "00001-seed6.png", "00002-seed5.png", "00003-seed6.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert out.count("a red circle") == 2 and out.startswith("sampled with steps 2, guidance 1.0\n")
    first = (tmp_path / names[0]).read_bytes()
    printed(capsys, "sample", "tiny_sd3", "a green square", "--steps", "2", "--seed", "5", "--output", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "00004-seed5.png"]
    assert (tmp_path / names[0]).read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["sample", "tiny_sd3", "a red circle", "--output", "{file}"], "--output: {file} is a file"),
        (["difficulty", RECIPE, "{file}/rates.jsonl"], "OUTPUT: {file} is a file, and a folder is wanted there"),
        (["train", RECIPE, "output={file}", "name=run"], "output: {file} is a file"),
        (["demo", "--json", "."], "--json: . is a folder; give the name of a file"),
        (["prompts", "geneval", "--count", "3", "--output", "{file}/p.jsonl"], "--output: {file} is a file"),
        (["gallery", "{run}", "-o", "{run}", "--export", "out.jsonl"], "votes.sqlite is no file of votes"),
        (["sample", "tiny_sd3", "a red circle", "--seed", str(2**63)], ""),
    ],
)
def test_results_that_cannot_be_written_are_known_before_the_work(
    no_model: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], hint: str
) -> None:
    places = {"file": str(tmp_path / "file"), "run": str(tmp_path / "run")}
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "votes.sqlite").write_text("no votes, no database at all")
    arguments = [argument.format(**places) for argument in arguments]
    if hint:
        assert hint.format(**places) in refused(capsys, *arguments)
        return
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_a_disk_that_fails_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text("rewards: [{name: shapes}]\n")
    long = "x" * 5000
    for arguments in (["eval", long], ["train", long], ["gallery", long], ["reward-check", long]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        [line] = capsys.readouterr().err.strip().splitlines()
        assert left.value.code in (1, 2) and line.startswith("flowalign: ") and "too long" in line


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flowalign", "train", str(tmp_path / "nowhere.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().splitlines() == [f"flowalign: no configuration at {tmp_path / 'nowhere.yaml'}"]


def test_files_in_the_current_folder_do_not_hide_flowalign_and_can_be_named(tmp_path: Path) -> None:
    """As `python -m` and `accelerate launch -m` put the current folder first."""
    (tmp_path / "rewards.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "mine.py").write_text("def bright(samples, prompts):\n    return [0.5] * len(samples)\n")
    (tmp_path / "check.yaml").write_text("rewards: [{name: mine.bright}]\n")
    root = str(Path(__file__).parents[4])

    def run(folder: Path, *arguments: str, path: str = root) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "flowalign", *arguments]
        return subprocess.run(
            line, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
        )

    (tmp_path / "elsewhere").mkdir()
    done = run(tmp_path, "reward-check", "check.yaml")
    assert "bright" in done.stdout and "Traceback" not in done.stderr
    hidden = run(tmp_path / "elsewhere", "list", path=f"{tmp_path}{os.pathsep}{root}")
    assert hidden.returncode == 2
    assert f"{tmp_path / 'rewards.py'} hides flowalign's own package 'rewards'" in hidden.stderr


def test_a_module_beside_the_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("def bright(samples, prompts):\n    return [0.5] * len(samples)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    find_beside(tmp_path / "my.yaml")
    assert registry.resolve("rewards", "beside_it.bright")([1], ["x"]) == [0.5]


def test_init_writes_a_configuration_that_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "to_start.py").write_text("def bright(samples, prompts):\n    return [0.5] * len(samples)\n")
    (tmp_path / "own.txt").write_text("a red circle\ntwo blue squares\n")
    words = ["init", "--model", "tiny_sd3", "--reward", "to_start.bright", "--reward", "shapes", "--prompts", "own.txt"]
    told = printed(capsys, *words)
    assert "flowalign train train.yaml --dry-run" in told and "no held-out prompts" in told
    made = load(tmp_path / "train.yaml")
    assert [entry.name for entry in made.rewards] == ["to_start.bright", "shapes"]
    assert made.data.prompts == "own.txt" and made.evaluation.prompts is None
    assert made.model.encode == {"max_sequence_length": 0} and made.model.dtype == "float32"
    for wrong, hint in ((words, "train.yaml exists"), ([*words, "--output", "b.yaml", "--algorithm", "gpo"], "gpo")):
        with pytest.raises(SystemExit):
            main(wrong)
        assert hint in capsys.readouterr().err
    assert not (tmp_path / "b.yaml").exists()
    (tmp_path / "own_heldout.txt").write_text("three green triangles\n")
    for prompts, heldout in (("own.txt", "own_heldout.txt"), ("shapes_train", "shapes_heldout")):
        printed(capsys, *words[:-1], prompts, "--output", f"{heldout}.yaml")
        assert load(tmp_path / f"{heldout}.yaml").evaluation.prompts == heldout


def test_what_a_command_writes_is_named_by_o_everywhere() -> None:
    for command in typer.main.get_command(app).commands.values():
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        assert "-o" in options or not options & {"--out", "--output"}, command.name


def test_commands_that_sample_have_the_same_options() -> None:
    commands = typer.main.get_command(app).commands
    for name in ("sample", "search", "eval", "bench", "pairs"):
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert options >= {f"--{key.replace('_', '-')}" for key in OPTIONS}
