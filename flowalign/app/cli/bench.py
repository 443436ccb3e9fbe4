"""`flowalign bench`: a model's figures under published protocols, with intervals, before and after training."""

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli import sampling as options
from flowalign.app.cli.modules import opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.evaluation.benchmarks import Measured, Suite
    from flowalign.evaluation.card import Card
    from flowalign.evaluation.statistics import Interval
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.policies.settings import Sampling


@options.with_sampling
def bench(
    requested: dict[str, Any],
    model: options.Model,
    suite: Annotated[str, typer.Option(help="One or more suites with commas between: `flowalign list suites`.")],
    lora: Annotated[
        Path | None,
        typer.Option(help="LoRA weights to put on it: a folder, or a file of any tool that diffusers reads."),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Also measure the model before training, or without the LoRA.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Folder of an earlier measurement, to show the paired difference to it.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples a network call.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts: to try out, not to compare.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**62, help="Seed of the first start noise; default the suite's.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="suite.setting=value, e.g. geneval.detector=...")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the results; an interrupted measurement continues there."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures of all suites to this file.")
    ] = None,
    dtype: options.Dtype = "float32",
    trust: options.Trust = False,
) -> None:
    """Measure a model under fixed protocols; exit code 1 if the suite `safety` sees more unsafe pictures."""
    suites = build_suites(suite, set_ or [])
    folder = output or Path("runs") / f"bench-{_slug(model, lora)}"
    check_output(folder, "--output", folder=True)
    if json_path is not None:
        check_output(json_path, "--json")
    _check_base(base, model, lora, "rlg" in requested, against)
    requested |= options.given(batch_size=batch_size)
    # suites say what is wrong with their prompts and judges before a model loads
    for benchmark in suites:
        benchmark.prompts()
    figures = _measure(
        model,
        suites,
        folder,
        lora=lora,
        dtype=dtype,
        trust=trust,
        base=base,
        requested=requested,
        limit=limit,
        seed=seed,
        against=against,
    )
    if figures is None:
        return
    from flowalign.app.gallery import build

    for benchmark in suites:
        page = build([folder / benchmark.name], folder / benchmark.name / "gallery")
        _print(benchmark, figures[benchmark.name])
        print(f"figures: {folder / benchmark.name / 'results.json'}", f"pictures: {page.resolve()}", sep="\n")
    if json_path is not None:
        records = {
            benchmark.name: json.loads((folder / benchmark.name / "results.json").read_text(encoding="utf-8"))
            for benchmark in suites
        }
        write_atomically(json_path, json.dumps(records, indent=2) + "\n")
    if not all([_passes(benchmark, figures[benchmark.name]) for benchmark in suites]):
        raise typer.Exit(1)


def _check_base(base: bool, model: str, lora: Path | None, weighs: bool, against: Path | None) -> None:
    """Refuse --base where there is none, or where something else is compared with."""
    if not base:
        return
    if lora is None and not (Path(model) / "config.yaml").is_file():
        raise ConfigError(f"--base: {model} has nothing to take off; a run's folder or --lora has")
    if weighs:
        raise ConfigError("--rlg weighs what was trained, which --base takes off; measure one at a time")
    if against is not None:
        raise ConfigError("--base and --against: each is a measurement to compare with; give one of them")


def _passes(suite: "Suite", figures: "dict[str, dict[str, Interval]]") -> bool:
    """Print what a suite's gate says; False where its score rises beyond the error."""
    if suite.gate is None:
        return True
    if "difference" not in figures:
        print(f"{suite.name}: no gate without a model to compare with (--base, --against FOLDER)")
        return True
    rise = figures["difference"][suite.gate]
    # a difference that is the same for every draw of prompts has no interval
    low, high = (rise.mean if end is None else end for end in (rise.low, rise.high))
    if low > 0:
        print(f"{suite.name}: {suite.gate} rises beyond the error, {rise:+}")
        return False
    if high <= 0:
        print(f"{suite.name}: {suite.gate} does not rise, {rise:+}")
    else:
        print(f"{suite.name}: cannot tell if {suite.gate} rises, {rise:+}; more prompts would narrow the interval")
    return True


def build_suites(names: str, settings: list[str]) -> "list[Suite]":
    """Build the suites that the command line names, with their settings.

    Raises:
        ConfigError: there is no such suite or setting.
    """
    import yaml

    from flowalign import registry

    names_ = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names_}
    for setting in settings:
        key, equals, value = setting.partition("=")
        name, _, option = key.rpartition(".")
        if not equals or name not in chosen or not option:
            raise ConfigError(f"--set {setting}: give suite.setting=value of a suite that is measured")
        chosen[name][option] = yaml.safe_load(value)
    return [registry.build("suites", name, options, f"--suite {name}") for name, options in chosen.items()]


def _measure(
    model: str,
    suites: "list[Suite]",
    folder: Path,
    *,
    lora: Path | None,
    dtype: str,
    trust: bool,
    base: bool,
    requested: dict[str, Any],
    limit: int | None,
    seed: int | None,
    against: Path | None,
) -> "dict[str, dict[str, dict[str, Interval]]] | None":
    """The figures of every suite by label and score; None on other processes than the main one."""
    from accelerate import PartialState

    from flowalign.evaluation.benchmarks import run

    state, noise = PartialState(), run.SEED if seed is None else seed
    measured: dict[str, dict[str, Any]] = {suite.name: {} for suite in suites}
    protocols: dict[str, dict[str, Any]] = {}
    tuned = lora is not None or (Path(model) / "config.yaml").is_file()
    for label in [*([run.BASE] if base or not tuned else []), *([run.TUNED] if tuned else [])]:
        with opened(model, trust):
            trained = label == run.TUNED
            policy, sampling = _load(model, lora if trained else None, dtype, trained, requested)
        options.check_frames(policy, requested.get("num_frames"))
        for suite in suites:
            if not protocols.get(suite.name):
                protocols[suite.name] = protocol(suite, model, lora, dtype, sampling, limit, noise)
                if against is not None:
                    stored = earlier(suite, against, protocols[suite.name]["card"], limit)
                    measured[suite.name] = {run.EARLIER: stored}
                if state.is_main_process:
                    run.open_folder(folder / suite.name, protocols[suite.name])
                state.wait_for_everyone()
            result = run.measure(suite, policy, sampling, folder / suite.name / label, limit, noise)
            if result is not None:
                measured[suite.name][label] = result
        del policy
    if not state.is_main_process:
        return None
    figures = {}
    for suite in suites:
        figures[suite.name] = run.results(suite, measured[suite.name])
        run.write_results(folder / suite.name, protocols[suite.name] | {"judges": judges(suite)}, figures[suite.name])
        shown = {label: model for label, model in measured[suite.name].items() if label != run.EARLIER}
        run.show(suite, folder / suite.name, shown, noise)
    return figures


def _load(
    model: str, lora: Path | None, dtype: str, trained: bool, requested: dict[str, Any]
) -> "tuple[DiffusersPolicy, Sampling]":
    """The model to measure, and its sampling settings: those of a run's evaluations, else the pipeline's defaults."""
    from flowalign.app.loading import load_for_sampling
    from flowalign.evaluation.benchmarks.run import own_sampling
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.policies.settings import Sampling

    policy, as_evaluated = load_for_sampling(model, lora, dtype, trained and lora is None)
    if not isinstance(policy, DiffusersPolicy):
        raise ConfigError(f"{model}: this run trained a language model; suites are of pictures and videos")
    assert isinstance(as_evaluated, Sampling)
    sampling = as_evaluated if (Path(model) / "config.yaml").is_file() else own_sampling(policy)
    return policy, sampling.asked(requested)


def protocol(
    suite: "Suite", model: str, lora: Path | None, dtype: str, sampling: "Sampling", limit: int | None, seed: int
) -> dict[str, Any]:
    """All settings and files that the figures depend on."""
    from flowalign.evaluation.card import score_card
    from flowalign.runs.environment import installed

    prompts = suite.prompts().spread(limit)
    listed = json.dumps([prompts.texts, prompts.metadata]).encode()
    rows = [i for i in range(len(prompts)) for _ in range(suite.pictures)]
    judge = {"name": suite.name, "version": suite.version, **suite.settings(), "headline": list(suite.headline)}
    card = score_card(
        [prompts.texts[i] for i in rows],
        [prompts.metadata[i] for i in rows],
        range(seed, seed + len(rows)),
        sampling.arguments(),
        [judge],
    )
    return {
        "suite": suite.name,
        "version": suite.version,
        "settings": dict(suite.settings()),
        "headline": list(suite.headline),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(listed).hexdigest(),
        "samples_per_prompt": suite.pictures,
        "seed": seed,
        "model": model,
        "revision": revision(model),
        "lora": None if lora is None else str(lora),
        "weights": _digest(lora or Path(model)),
        "dtype": dtype,
        "sampling": {name: value for name, value in sampling.arguments().items() if value not in (None, "")},
        "versions": installed(("flowalign", "torch", "diffusers", "transformers")),
        "card": card,
    }


def earlier(suite: "Suite", folder: Path, card: "Card", limit: int | None) -> "Measured":
    """The scores of an earlier measurement of a suite, by the same protocol: its tuned model's, where it has one.

    Raises:
        ConfigError: the folder has none of this suite, or one by another protocol.
    """
    from flowalign.evaluation.benchmarks import run
    from flowalign.evaluation.card import check_card, check_same_protocol
    from flowalign.runs.foreign import read_json

    results = folder / suite.name / "results.json"
    if not results.is_file():
        raise ConfigError(
            f"--against {folder}: no results of {suite.name} there; flowalign bench -o {folder} makes them"
        )
    cards = {str(folder): check_card(read_json(results).get("card"), results), "this measurement": card}
    check_same_protocol(cards, "measure both alike")
    labels = [label for label in (run.TUNED, run.BASE) if (folder / suite.name / label).is_dir()]
    return run.read(folder / suite.name / labels[0], suite.prompts().spread(limit))


def judges(suite: "Suite") -> dict[str, str]:
    """Commits of the hub's models that scored, by setting; they are known once the models are downloaded."""
    commits = {key: revision(str(value)) for key, value in suite.settings().items()}
    return {key: commit for key, commit in commits.items() if commit is not None}


def revision(model: str) -> str | None:
    """The commit of a downloaded model of the hub; None for a model that is only on this machine."""
    from huggingface_hub import try_to_load_from_cache

    from rewards.hub import split_revision

    name, requested = split_revision(model)
    if Path(name).exists() or name.count("/") != 1:
        return None
    for file in ("model_index.json", "config.json"):
        cached = try_to_load_from_cache(name, file, revision=requested)
        if isinstance(cached, str):
            # .../snapshots/COMMIT/config.json
            return Path(cached).parent.name
    return None


def _digest(path: Path) -> str | None:
    """SHA-256 of a run's trained weights, or of a LoRA's; None for a whole model."""
    if path.is_file():
        files = [path]
    else:
        trained = path / "lora" if (path / "lora").is_dir() else path / "model"
        files = sorted((trained if (path / "config.yaml").is_file() else path).rglob("*.safetensors"))
        if (path / "model_index.json").is_file():
            return None
    if not files:
        return None
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def _slug(model: str, lora: Path | None) -> str:
    name = Path(model).name + (f"-{lora.stem}" if lora else "")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def _print(suite: "Suite", figures: "dict[str, dict[str, Interval]]") -> None:
    """Print the table of a suite, with a row for each score."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{suite.name}, version {suite.version}; mean [95% interval over prompts]", title_justify="left"
    )
    table.add_column("score")
    for label in figures:
        table.add_column(label, justify="right")
    for name in next(iter(figures.values())):
        cells = [
            f"{scores[name]:+}" if label == "difference" else f"{scores[name]}" for label, scores in figures.items()
        ]
        table.add_row(name, *cells)
        if name == "overall":
            table.add_section()
    Console().print(table)
