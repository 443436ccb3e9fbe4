"""Commands that make prompts, and that measure a model's rewards for them before it is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.data import Prompts
    from flowalign.data.audit import Audit, SimilarPair

SHOWN = 5
"""Prompts of each kind that are printed; the JSON file has all."""
prompts = typer.Typer(help="Write prompts to train on, and audit a list.", no_args_is_help=True)


@prompts.callback()
def commands() -> None:
    """Write prompts to train on, and audit a list."""


@prompts.command()
def geneval(
    count: Annotated[int, typer.Option(min=1, help="Prompts to train on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write.")],
    heldout: Annotated[
        int, typer.Option(min=0, help="Prompts for other contents, written to NAME_heldout.jsonl in the same folder.")
    ] = 0,
    shares: Annotated[
        str,
        typer.Option(
            help="Weights of single_object, two_object, counting, colors, position, color_attr; Flow-GRPO: 0:1:5:1:7:3."
        ),
    ] = "1:1:1:1:1:1",
    avoid: Annotated[
        Path | None,
        typer.Option(help="A file of prompts to avoid: GenEval's evaluation_metadata.jsonl, or one like it."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same prompts.")] = 0,
) -> None:
    """Make prompts like GenEval's, which the reward `detection` scores."""
    from flowalign.data import Prompts
    from flowalign.data.geneval import TASKS, content_of, generate, parse_shares

    check_output(output, "--output")
    try:
        avoided = [content_of(record) for record in Prompts.read(str(avoid)).metadata] if avoid else []
    except (KeyError, IndexError) as error:
        raise ConfigError(f"{avoid}: not GenEval's metadata, which have 'tag' and 'include'") from error
    train, test = generate(count, heldout, seed, parse_shares(shares), avoided)
    for path, records in ((output, train), (output.with_name(f"{output.stem}_heldout{output.suffix}"), test)):
        if records:
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
            distinct = len({content_of(record) for record in records})
            kinds = ", ".join(f"{task} {sum(r['tag'] == task for r in records)}" for task in TASKS)
            print(f"{path}: {len(records)} prompts, {distinct} distinct: {kinds}")


@prompts.command()
def sums(
    count: Annotated[int, typer.Option(min=1, help="Expressions to write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write.")],
    terms: Annotated[int, typer.Option(min=2, max=50, help="Numbers in an expression.")] = 2,
    digits: Annotated[int, typer.Option(min=1, max=12, help="Largest number of digits of one.")] = 2,
    operators: Annotated[str, typer.Option(help="Operators to draw from, of + - and *.")] = "+-",
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same prompts.")] = 0,
) -> None:
    """Make arithmetic expressions with their exact values, of any length (RandomCalculation)."""
    from flowalign.data.procedural import SIGNS
    from flowalign.data.procedural import sums as made

    check_output(output, "--output")
    if not operators or set(operators) - SIGNS.keys():
        raise ConfigError(f"--operators: {operators!r} is not of {' '.join(SIGNS)}")
    _write_made(output, lambda: made(count, terms, digits, operators, seed))


@prompts.command()
def formulas(
    count: Annotated[int, typer.Option(min=1, help="Formulas to write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write.")],
    variables: Annotated[int, typer.Option(min=3, max=12, help="Variables of a formula.")] = 4,
    clauses: Annotated[int, typer.Option(min=1, max=200, help="Clauses of three literals each.")] = 12,
    kind: Annotated[str, typer.Option(help="What is asked: satisfiable, assignment or count.")] = "satisfiable",
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same prompts.")] = 0,
) -> None:
    """Make questions about logical formulas (SATQuest), which exact_match and the reward `assignment` check."""
    from flowalign.data.procedural import KINDS
    from flowalign.data.procedural import formulas as made

    check_output(output, "--output")
    if kind not in KINDS:
        raise ConfigError(f"--kind: {kind!r} is not of {', '.join(KINDS)}")
    _write_made(output, lambda: made(count, variables, clauses, kind, seed))


@prompts.command()
def segments(
    documents: Annotated[str, typer.Argument(help="A file or data set of documents, one a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write.")],
    column: Annotated[str, typer.Option(help="Column of the documents.")] = "text",
    sentences: Annotated[int, typer.Option(min=1, help="Sentences of an answer.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Fewest sentences of a prompt.")] = 4,
) -> None:
    """Cut documents into prompts and what comes next, for the template text_continuation (RLPT)."""
    from flowalign.data.files import records
    from flowalign.data.segments import segments as cut

    check_output(output, "--output")

    def made() -> list[dict[str, Any]]:
        lines = [line for _, text, _ in records(documents, column) for line in cut(text, sentences, context)]
        if not lines:
            raise ConfigError(
                f"{documents}: no document has {context + sentences} sentences; a smaller --context works"
            )
        return lines

    _write_made(output, made)


def _write_made(output: Path, make: Callable[[], list[dict[str, Any]]]) -> None:
    """Write prompts that a program makes."""
    try:
        records = make()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    write_atomically(output, "".join(json.dumps(record) + "\n" for record in records))
    print(f"{output}: {len(records)} prompts, such as {records[0]['prompt'][:80]!r}")


@prompts.command()
def audit(
    file: Annotated[str, typer.Argument(help="A file of prompts, a data set or a shipped list.")],
    against: Annotated[
        str | None, typer.Option(help="A file, a list or a suite of `bench` that the prompts should not hold.")
    ] = None,
    column: Annotated[str, typer.Option(help="Column of the prompts, in both.")] = "prompt",
    by: Annotated[str, typer.Option(help="Key of the metadata that has the category.")] = "category",
    near: Annotated[
        float, typer.Option(min=0.01, max=1, callback=finite, help="Share of common words of near duplicates.")
    ] = 0.8,
    words: Annotated[
        Path | None, typer.Option(help="File of unsafe words, one a line; default a short list that is shipped.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model whose encoders' limits the lengths must keep.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
) -> None:
    """Look for duplicates, leakage, unsafe words, categories and lengths in a list of prompts."""
    from dataclasses import asdict

    from flowalign.data import Prompts
    from flowalign.data.audit import UNSAFE_WORDS, token_counters
    from flowalign.data.audit import audit as audited

    if json_path is not None:
        check_output(json_path, "--json")
    if words is not None and not words.is_file():
        raise ConfigError(f"--words: no file at {words}")
    listed = (words or UNSAFE_WORDS).read_text(encoding="utf-8").splitlines()
    prompts = Prompts.read(file, column=column)
    other = None if against is None else _other_list(against, column)
    encoders = None if model is None else token_counters(model)
    result = audited(prompts, other, [word for word in listed if word.strip()], near, by, encoders)
    _show(result, against)
    if json_path is not None:
        write_atomically(json_path, json.dumps(asdict(result), indent=1) + "\n")


@prompts.command()
def decontaminate(
    file: Annotated[str, typer.Argument(help="A file of prompts, a data set or a shipped list.")],
    against: Annotated[
        list[str],
        typer.Option(help="A benchmark: a file, a list or a suite of `bench`; give the option once for each."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write: the prompts that are left.")],
    column: Annotated[str, typer.Option(help="Column of the prompts, in all.")] = "prompt",
    size: Annotated[int, typer.Option(min=1, help="Words in a row that are a match.")] = 8,
    share: Annotated[
        float, typer.Option(min=0, max=1, callback=finite, help="Share of a benchmark's prompt that may match.")
    ] = 0.5,
) -> None:
    """Leave out prompts with more than half of a benchmark's prompt in them, by runs of eight words (Tulu 3)."""
    from flowalign.data import Prompts
    from flowalign.data.audit import contaminated

    check_output(output, "--output")
    listed, bad = Prompts.read(file, column=column), set()
    for name in against:
        benchmark = _other_list(name, column)
        found = contaminated(listed.texts, benchmark.texts, size, share)
        bad |= {one.row for one in found}
        known = len({one.benchmark for one in found}) / len(benchmark)
        print(f"{name}: {len(found)} of {len(listed)} prompts, with {known:.1%} of the benchmark")
        for one in found[:SHOWN]:
            print(f"  {listed.texts[one.row]!r} has {one.share:.0%} of {benchmark.texts[one.benchmark]!r}")
    left = [i for i in range(len(listed)) if i not in bad]
    if not left:
        raise ConfigError("no prompt is left: all of them have most of a benchmark's prompt in them")
    lines = [json.dumps({column: listed.texts[i], **listed.metadata[i]}) for i in left]
    write_atomically(output, "\n".join(lines) + "\n")
    print(f"{len(left)} prompts are left: {output}")


def _other_list(against: str, column: str) -> "Prompts":
    """The prompts of a suite, if it has that name, else those of a file or list."""
    from flowalign import registry
    from flowalign.data import Prompts

    if against in registry.names("suites"):
        suite_prompts: Prompts = registry.build("suites", against, {}, "--against").prompts()
        return suite_prompts
    return Prompts.read(against, column=column)


def _show(result: "Audit", against: str | None) -> None:
    """Print an audit: a line a check, with the first prompts of each."""
    print(f"{result.prompts} prompts")
    _listed("duplicates", [f"{text!r}, {count} times" for text, count in result.duplicates])
    _listed("near duplicates", [_words(pair) for pair in result.near])
    if against is not None:
        _listed(f"in {against} too, or nearly", [_words(pair) for pair in result.leaked])
        _listed(f"categories of {against} that are missing", result.missing)
    _listed("unsafe words", [f"{word} in {text!r}" for text, word in result.unsafe])
    counts = ", ".join(f"{name} {count}" for name, count in result.categories.items())
    print(f"categories: {counts or 'none given'}")
    for length in result.lengths:
        longest = f"the longest prompt has {length.longest} of {length.limit} tokens"
        _listed(f"over the limit of {length.encoder} ({longest})", [repr(text) for text in length.over])


def _words(pair: "SimilarPair") -> str:
    return f"{pair.first!r} and {pair.second!r} ({pair.similarity:.2f})"


def _listed(title: str, lines: list[str]) -> None:
    print(f"{title}: {len(lines) or 'none'}")
    for line in lines[:SHOWN]:
        print(f"  {line}")


def difficulty(
    config: Annotated[Path, typer.Argument(help="YAML configuration of the training that the prompts are for.")],
    output: Annotated[Path, typer.Argument(help="JSON lines to write: the prompts with their success rates.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first sample.")] = 0,
) -> None:
    """Measure the mean reward of every prompt before training, for `data.difficulty` to choose by."""
    import torch

    from flowalign.config import load
    from flowalign.config.rewards import build_reward
    from flowalign.data import Prompts
    from flowalign.evaluation.scores import evaluate
    from flowalign.policies.base import best_device
    from flowalign.training.building import build_policy

    check_output(output, "OUTPUT")
    settings = load(config, overrides or [])
    policy = build_policy(settings, best_device())
    prompts = Prompts.of(settings.data)
    result = evaluate(policy, build_reward(settings.rewards), prompts, settings.rollout, samples, seed)
    rates = torch.tensor(result.value).view(-1, samples).mean(1).tolist()
    rated = zip(prompts.texts, prompts.metadata, rates, strict=True)
    lines = [json.dumps({settings.data.column: text, **record, "success_rate": rate}) for text, record, rate in rated]
    write_atomically(output, "\n".join(lines) + "\n")
    middling = sum(0 < rate < 1 for rate in rates)
    print(f"{len(rates)} prompts, mean {sum(rates) / len(rates):.3f}, {middling} between 0 and 1: {output}")


def reference_scores(
    config: Annotated[Path, typer.Argument(help="YAML configuration of the training that the prompts are for.")],
    output: Annotated[Path, typer.Argument(help="JSON lines to write: the prompts with their reference scores.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first sample.")] = 0,
) -> None:
    """Score samples of the start model, for the rewards `bounded_centred`, `calibrated` and `log_sigmoid`."""
    from flowalign.config import load
    from flowalign.config.rewards import referenced
    from flowalign.data import Prompts
    from flowalign.evaluation.scores import evaluate
    from flowalign.policies.base import best_device
    from flowalign.training.building import build_policy
    from rewards import WeightedSum
    from rewards.references import KEY

    check_output(output, "OUTPUT")
    settings = load(config, overrides or [])
    reward = WeightedSum(referenced(settings.rewards))
    policy = build_policy(settings, best_device())
    prompts = Prompts.of(settings.data)
    result = evaluate(policy, reward, prompts, settings.rollout, samples, seed)
    lines = []
    for i, (text, record) in enumerate(zip(prompts.texts, prompts.metadata, strict=True)):
        rows = slice(i * samples, (i + 1) * samples)
        scores = {label: result.parts[label][rows] for label in reward.labels}
        lines.append(json.dumps({settings.data.column: text, **record, KEY: scores}))
    write_atomically(output, "\n".join(lines) + "\n")
    means = (f"{label} {sum(result.parts[label]) / len(result.value):.3f}" for label in reward.labels)
    print(f"{len(lines)} prompts, {samples} reference scores each, means: {', '.join(means)}: {output}")
