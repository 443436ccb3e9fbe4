"""`flowalign compare`: several runs on one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowalign.app.cli.evaluate import Json, Pictures, Trust, labels_of, sampled_again, show
from flowalign.app.cli.modules import opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output

if TYPE_CHECKING:
    from flowalign.evaluation.scores import Evaluated


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Folders of runs; the others are compared with the first."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the page.")] = Path("compared"),
    again: Annotated[
        bool, typer.Option("--again", help="Sample and score anew, by the first run's prompts and rewards.")
    ] = False,
    any_sampling: Annotated[
        bool,
        typer.Option("--any-sampling", help="Compare also samples of other steps, guidance, size or versions."),
    ] = False,
    pictures: Pictures = None,
    json_path: Json = None,
    trust: Trust = False,
) -> None:
    """Write one page that compares runs: scores with their significance, settings, curves, samples side by side."""
    from flowalign.app.gallery.comparison import build_comparison, verdicts
    from flowalign.evaluation.comparison import Comparison
    from flowalign.runs.samples import save_samples

    if len(runs) < 2:
        raise ConfigError("compare takes two runs or more; flowalign gallery looks at one")
    if pictures is not None and not again:
        raise ConfigError("--pictures is how many to sample a prompt, which --again asks for")
    check_output(out, "--out", folder=True)
    if json_path is not None:
        check_output(json_path, "--json")
    names = labels_of(runs)
    for run in runs:
        with opened(run, trust, ()):
            pass
    if again:
        results = dict(zip(names, sampled_again(runs, pictures, trust, any_sampling), strict=True))
        moments = [(out / "samples" / str(number), 0) for number in range(len(runs))]
        for (folder, _), result in zip(moments, results.values(), strict=True):
            save_samples(folder, 0, result.lines())
    else:
        saved = [result_of(run) for run in runs]
        results = {name: result for name, (result, _) in zip(names, saved, strict=True)}
        moments = [(run, iteration) for run, (_, iteration) in zip(runs, saved, strict=True)]
        check_alike(dict(zip(names, runs, strict=True)), results, any_sampling)
    comparison = Comparison(results)
    show(comparison, json_path, {})
    print(*verdicts(comparison), sep="\n")
    print(f"page: {build_comparison(runs, comparison, moments, out).resolve()}")


def result_of(run: Path) -> "tuple[Evaluated, int]":
    """The scores of a run's result, and their iteration."""
    from flowalign.config import load
    from flowalign.evaluation.scores import Evaluated, scores_of
    from flowalign.training.evaluator import ended_at

    iteration = ended_at(run, load(run / "config.yaml").evaluation.watch)
    file = scores_of(run, iteration)
    if not file.is_file():
        raise ConfigError(
            f"{run} was not evaluated (evaluation.prompts); --again samples its prompts, or another run's"
        )
    return Evaluated.read(file), iteration


def check_alike(runs: dict[str, Path], results: "dict[str, Evaluated]", any_sampling: bool = False) -> None:
    """Refuse scores that are not of the same samples, made in the same way, by the same rewards."""
    from flowalign.config import load
    from flowalign.evaluation.card import SAMPLING, check_same_protocol
    from flowalign.evaluation.scores import card_of
    from flowalign.training.evaluator import ended_at

    iterations = {name: ended_at(run, load(run / "config.yaml").evaluation.watch) for name, run in runs.items()}
    cards = {name: card_of(run, iterations[name]) for name, run in runs.items()}
    check_same_protocol(cards, "--again samples and judges all alike", SAMPLING)
    (first, expected), *others = results.items()
    for name, result in others:
        # a file of scores may have lost lines since its card was written
        if (result.prompts, result.seeds) != (expected.prompts, expected.seeds):
            raise ConfigError(f"{first} and {name} have scores of other prompts or seeds; --again samples both alike")
    if not any_sampling:
        check_same_protocol(cards, "--any-sampling compares them as they are")
