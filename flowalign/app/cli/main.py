"""The command line: `flowalign`, also `python -m flowalign` and under `accelerate launch -m flowalign`."""

import logging
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from flowalign.app.cli.bench import bench
from flowalign.app.cli.calibrate import rewards
from flowalign.app.cli.compare import compare
from flowalign.app.cli.env import env
from flowalign.app.cli.evaluate import evaluate_runs, watch
from flowalign.app.cli.export import export
from flowalign.app.cli.fetch import fetch
from flowalign.app.cli.forecast import forecast
from flowalign.app.cli.gallery import gallery
from flowalign.app.cli.init import init
from flowalign.app.cli.judges import cold_start, pair_questions, rejection_sampling
from flowalign.app.cli.modules import check_own_packages, find_beside, quiet_libraries
from flowalign.app.cli.pairs import pairs
from flowalign.app.cli.plan import plan
from flowalign.app.cli.power import power
from flowalign.app.cli.probe import probe
from flowalign.app.cli.prompts import difficulty, prompts, reference_scores
from flowalign.app.cli.reliability import judge
from flowalign.app.cli.results import Warnings, print_ending, suggest_panel
from flowalign.app.cli.rewards import reward_check, reward_server, train_reward
from flowalign.app.cli.sample import sample
from flowalign.app.cli.search import search
from flowalign.app.cli.soup import soup
from flowalign.app.cli.strength import strength
from flowalign.app.cli.text_rewards import pair_strengths
from flowalign.app.cli.verify_rollout import verify_rollout
from flowalign.errors import ConfigError, FlowalignError, hide, nearest
from flowalign.runs.files import check_output
from flowalign.runs.version import __version__

app = typer.Typer(
    help="Align diffusion and flow models with rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

TRACEBACK = "--traceback"
UNEXPECTED = 70
"""Exit code of an error in flowalign itself; EX_SOFTWARE of sysexits.h."""
LONGEST = 2000
"""Most characters of an error's line."""


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show where an error came from; it may also stand after a command.")
    ] = False,
) -> None:
    """Align diffusion and flow models with rewards."""
    if version:
        print(f"flowalign {__version__}")
        raise typer.Exit


@app.command(rich_help_panel="Train")
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Train this many times, with seeds 0, 1, ...")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the runs; default a new one in runs/.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Train for fewer or more iterations.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Teach the shipped tiny language model its sums instead.")
    ] = False,
    long: Annotated[
        bool, typer.Option("--long", help="Train for up to an hour; the page shows the curve as it goes.")
    ] = False,
    pictures: Annotated[
        int,
        typer.Option(min=2, help="Measure about this many pictures before and after; --text has none."),
    ] = 600,
) -> None:
    """Align the shipped tiny Stable Diffusion 3 in minutes on a laptop, and write its gallery."""
    from flowalign.app.cli.launch import free_processors, launch

    if json_path is not None:
        check_output(json_path, "--json")
    output = output or Path("runs") / time.strftime("demo-text-%Y%m%d-%H%M%S" if text else "demo-%Y%m%d-%H%M%S")
    # text was not tried with two, nor pictures with more
    processes = 1 if text else free_processors(most=2)
    if processes == 1:
        from flowalign.app.cli.demo import run_demo

        run_demo(seeds, json_path, output, iterations, pictures, console, text, long)
        return
    words = ["demo", "--seeds", str(seeds), "--output", str(output), "--pictures", str(pictures)]
    words += [] if json_path is None else ["--json", str(json_path)]
    words += [] if iterations is None else ["--iterations", str(iterations)]
    words += ["--long"] if long else []
    words += [TRACEBACK] if TRACEBACK in sys.argv else []
    raise typer.Exit(launch(processes, words))


@app.command(rich_help_panel="Train")
def train(
    config: Annotated[Path, typer.Argument(help="YAML configuration, e.g. configs/tiny_sd3/flow_grpo.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. training.iterations=20")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="One rollout and one update on random weights: time and memory.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Dry-run the model at its own size, from its configuration files.")
    ] = False,
) -> None:
    """Train a model by a configuration; with `accelerate launch` on many devices."""
    from flowalign.config import load
    from flowalign.config.loader import world_size

    if full and not dry_run:
        raise ConfigError("--full says how large a dry run is; --dry-run --full tries the model out, without it trains")
    if resume and dry_run:
        raise ConfigError("--dry-run starts no run, and --resume goes on with one; one of the two works")
    find_beside(config)
    settings = load(config, overrides or [])
    if dry_run:
        from flowalign.planning.dry_run import dry_run as try_out

        quiet_libraries()
        report = try_out(settings, full)
        if report is not None:
            print("\n".join(report.lines()))
        return
    settings.check(world_size())
    from flowalign.training import Trainer

    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    trainer = Trainer(settings, resume=resume)
    main_process = trainer.accelerator.is_main_process
    if main_process and not trainer.resumed:
        suggest_panel(settings)
    trainer.train()
    if main_process:
        print_ending(trainer, warnings.messages)


app.command(rich_help_panel="Train")(init)
app.command(rich_help_panel="Prepare")(fetch)
app.command(rich_help_panel="Train")(plan)
app.command(rich_help_panel="Train")(probe)
app.command(rich_help_panel="Look")(sample)
app.command("eval", rich_help_panel="Measure")(evaluate_runs)
app.command(rich_help_panel="Measure")(watch)
app.command(rich_help_panel="Measure")(verify_rollout)
app.command(rich_help_panel="Look")(compare)
app.command(rich_help_panel="Measure")(bench)
app.command(rich_help_panel="Measure")(strength)
app.command(rich_help_panel="Measure")(soup)
app.command(rich_help_panel="Measure")(power)
app.command(rich_help_panel="Measure")(forecast)
app.command(rich_help_panel="Look")(search)
app.command(rich_help_panel="Look")(export)


@app.command(rich_help_panel="Train")
def league(
    configs: Annotated[list[Path], typer.Argument(help="Two or more YAML configurations.")],
    budget: Annotated[str, typer.Option(help="Budget of every run: seconds=60, forwards=100000 or reward_calls=5000.")],
    seeds: Annotated[int, typer.Option(min=1, help="Train each this many times.")] = 3,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the league; an interrupted one continues.",
            show_default="runs/league, runs/league-WORLD",
        ),
    ] = None,
    panel: Annotated[str | None, typer.Option(help="A further reward for the table, which no run trains on.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Pictures per held-out prompt.")] = 20,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value for all of them.")] = None,
    world: Annotated[
        str,
        typer.Option(
            help="shapes: as configured; relations or spelling: prompts, reward and model of that world for all."
        ),
    ] = "shapes",
    first_seed: Annotated[int, typer.Option(min=0, help="First seed; tune on other seeds than those you report.")] = 0,
    any_sampling: Annotated[
        bool, typer.Option("--any-sampling", help="Take recipes that sample held-out prompts in different ways.")
    ] = False,
) -> None:
    """Train configurations under one budget and print a table of them."""
    from flowalign.training.league import LeagueBudget, run_league

    for config in configs:
        find_beside(config)
    output = output or Path("runs/league" if world == "shapes" else f"runs/league-{world}")
    table = run_league(
        configs,
        seeds,
        LeagueBudget.parse(budget),
        output,
        panel=panel,
        overrides=set_ or [],
        pictures=pictures,
        world=world,
        first_seed=first_seed,
        any_sampling=any_sampling,
    )
    print(f"table: {table}")


@app.command("config", rich_help_panel="Reference")
def show_config(
    section: Annotated[str | None, typer.Argument(help="A section or key, e.g. rollout; default all.")] = None,
    text: Annotated[bool, typer.Option("--text", help="The keys of language models.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema, for editors.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md.")] = False,
) -> None:
    """Show the keys of a configuration with their types, defaults and meanings."""
    import json

    from flowalign.config import reference

    if schema:
        print(json.dumps(reference.schema(), indent=1))
    elif markdown:
        print(reference.markdown(), end="")
    else:
        for key in reference.table(section, text):
            print(f"{key.path}: {key.shown_default}    # {key.kind}{'; ' if key.meaning else ''}{key.meaning}")


@app.command("recipes", rich_help_panel="Reference")
def list_recipes() -> None:
    """Show the recipes that come with flowalign; `flowalign train NAME` takes them by name."""
    from flowalign.config.loader import recipes

    for name, line in recipes().items():
        print(f"{name:<32} {line}")


@app.command("list", rich_help_panel="Reference")
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(help="algorithms, kernels, plans, rewards, models, searches, ...; default all."),
    ] = None,
    name: Annotated[str | None, typer.Argument(help="One of them, to show it with its settings.")] = None,
) -> None:
    """List all parts by name, one line each, or show one with its settings."""
    from flowalign.registry import TABLES, described, listed, summary

    if kind is not None and kind not in TABLES:
        raise ConfigError(f"there is no list of '{kind}'; {nearest(kind, TABLES)}")
    if kind is not None and name is not None:
        print(described(kind, name))
        return
    for table in [kind] if kind else TABLES:
        if kind is None:
            print(f"{table}:")
        for name in listed(table):
            print(f"  {name:<24} {summary(table, name)}")


app.command(rich_help_panel="Prepare")(difficulty)
app.command(rich_help_panel="Prepare")(reference_scores)
app.add_typer(prompts, name="prompts", rich_help_panel="Prepare")
app.command(rich_help_panel="Reference")(env)
app.command(rich_help_panel="Votes and rewards")(pairs)
app.command(rich_help_panel="Look")(gallery)
app.add_typer(rewards, name="rewards", rich_help_panel="Votes and rewards")
app.add_typer(judge, name="judge", rich_help_panel="Votes and rewards")
app.command(rich_help_panel="Votes and rewards")(reward_server)
app.command(rich_help_panel="Votes and rewards")(reward_check)
app.command(rich_help_panel="Votes and rewards")(train_reward)
app.command(rich_help_panel="Votes and rewards")(pair_strengths)
app.command(rich_help_panel="Text")(pair_questions)
app.command(rich_help_panel="Text")(cold_start)
app.command(rich_help_panel="Text")(rejection_sampling)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: every error is one line; `--traceback`, in any place, shows where an error came from."""
    handler: Any = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    words = sys.argv[1:] if arguments is None else arguments
    arguments = [argument for argument in words if argument != TRACEBACK]
    try:
        check_own_packages()
        app(args=arguments)
    except Exception as error:
        if TRACEBACK in words:
            traceback.print_exception(error)
        _leave(*_message(error))


def _message(error: Exception) -> tuple[str, int]:
    """The message of an error for people, and the exit code."""
    if isinstance(error, FlowalignError):
        return str(error), error.exit_code
    from rewards.base import RewardError, one_line
    from rewards.pictures import PictureError

    if isinstance(error, PictureError):
        return str(error), ConfigError.exit_code
    if isinstance(error, RewardError):
        return f"{error}; the last checkpoint stays usable (--resume)", 1
    if isinstance(error, OSError) and error.errno is not None:
        file = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{file}; a run goes on from its last checkpoint (--resume)", 1
    ask = f"this is a fault of flowalign: please open an issue with what {TRACEBACK} prints (docs/troubles.md)"
    return f"{one_line(error)}; {ask}", UNEXPECTED


def _leave(message: str, code: int) -> None:
    """Print one line of a readable length, below the progress bars, and exit."""
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()
    message = re.sub(r"(\S{80})\S{100,}(\S{80})", r"\1...\2", f"{message[:100_000]}{message[100_000:][-100_000:]}")
    if len(message) > LONGEST:
        # keep the beginning, and the end, which says what helps
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    print(" ".join(hide(f"flowalign: {message}").split()), file=sys.stderr)
    sys.exit(code)
