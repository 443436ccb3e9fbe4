"""Commands about rewards: serve one to other processes, check one before training on it, train one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flowalign.app.cli.modules import find_beside
from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError

if TYPE_CHECKING:
    from flowalign.data import Prompts
    from flowalign.reward_training.judge import JudgeScorer
    from flowalign.reward_training.scorer import ClipScorer
    from flowalign.reward_training.video import VideoScorer


def reward_server(
    config: Annotated[Path, typer.Argument(help="YAML with `rewards`, and `server` for host, port and so on.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on; default loopback only.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
) -> None:
    """Serve rewards over HTTP, for the reward 'remote' of training runs elsewhere."""
    from flowalign.app.cli.reward_file import read
    from flowalign.config.rewards import build_reward
    from rewards.connections import loopback
    from rewards.http import token_in
    from rewards.server import serve
    from rewards.vision import allow_tf32

    find_beside(config)
    settings = read(config)
    server = settings.server
    host, port = host or server.host or "127.0.0.1", port or server.port
    token = None
    if server.token_variable is not None:
        try:
            token = token_in(server.token_variable)
        except ValueError as error:
            raise ConfigError(f"server.token_variable: {error}") from error
    if token is None and not loopback(host):
        raise ConfigError(f"{host} is open to the network without a token; set server.token_variable")
    allow_tf32(server.tf32)
    reward = build_reward(settings.rewards)
    print(f"serving '{reward.name}' on http://{host}:{port}", flush=True)
    try:
        serve(reward, host, port, server.merge, server.queue, token, server.memory, server.timeout)
    except ValueError as error:
        raise ConfigError(f"server: {error}") from error


def reward_check(
    config: Annotated[Path, typer.Argument(help="YAML with `rewards`, or a training configuration.")],
    size: Annotated[int, typer.Option(min=32, help="Pixels of a side of the test pictures.")] = 256,
) -> None:
    """Try hostile samples and verdicts on each reward of a configuration; exit code 1 if one is rewarded."""
    from flowalign.app.cli.reward_file import read
    from flowalign.config.rewards import build_reward
    from rewards.check import check_reward

    console = Console()
    failed = False
    find_beside(config)
    for named in read(config).rewards:
        reward = build_reward([named.model_copy(update={"weight": 1.0})])
        table = Table(title=reward.name, title_justify="left")
        for column in ("check", "", "what was found"):
            table.add_column(column)
        template = getattr(getattr(reward, "reward", reward), "template", None)
        for check in check_reward(reward, template, size):
            failed |= not check.passed
            table.add_row(check.name, "passed" if check.passed else "FAILED", check.detail)
        console.print(table)
    if failed:
        raise typer.Exit(1)


def train_reward(
    preferences: Annotated[
        str,
        typer.Argument(help="JSON lines, as `flowalign gallery RUN --export FILE` writes; with --noisy prompts."),
    ],
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the trained model; must not exist.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="CLIP, or VLM with --template, of transformers: folder, hub name or a shipped one; default PickScore. "
            "Of texts any language model or reward model. "
            "'video_reward', or a folder with one, learns votes on videos."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Train a VLM as a judge asked with this template, e.g. reward_dance_pair."),
    ] = None,
    processor: Annotated[
        str | None, typer.Option(help="Folder or hub name of its tokenizer and picture settings, if elsewhere.")
    ] = None,
    heldout: Annotated[
        str | None, typer.Option(help="Held-out preferences to test on; default those of a tenth of the prompts.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the preferences; default 3, with --noisy 1 a noise level.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help="AdamW's first learning rate; it falls linearly to 0. Default 3e-6, with --noisy 5e-7.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs per update; with --noisy samples per update.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the pairs.")] = 0,
    min_pairs: Annotated[
        int | None, typer.Option(min=1, help="Fewest preferences to train on; default 100. Fewer make a model worse.")
    ] = None,
    texts: Annotated[
        bool,
        typer.Option("--texts", help="The preferences are between texts, as TRL's lines are; exported votes say so."),
    ] = False,
    loss: Annotated[
        str,
        typer.Option(
            help="Of texts: bradley_terry, centred, margin, scaled, soft, regression, helpsteer or general; see "
            "docs/text-reward-models.md."
        ),
    ] = "bradley_terry",
    reference: Annotated[
        str | None, typer.Option(help="Of texts: key of a reference text that the model compares with (POLAR).")
    ] = None,
    noisy: Annotated[
        str | None,
        typer.Option(help="Train the CLIP on the pictures that this generator's noisy states predict, for ttsnap."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps of that generator.")] = None,
    per_prompt: Annotated[int, typer.Option(min=2, help="That generator's samples per prompt.")] = 8,
) -> None:
    """Train a reward on votes to prefer the chosen one of each pair: a CLIP, a VLM as a judge, VideoReward, or of
    texts any language model with a head of a number."""
    from flowalign.app.cli.text_rewards import RATE, are_texts, read_texts, train_on_texts
    from flowalign.data import Preferences, Prompts, shipped
    from flowalign.reward_training.judge import JudgeScorer
    from flowalign.reward_training.scorer import ClipScorer, split
    from flowalign.reward_training.scorer import train_reward as fit
    from flowalign.reward_training.video import VideoScorer, files_of
    from rewards.clip import PICK_SCORE, PICK_SCORE_PROCESSOR
    from rewards.shapes.clip import TINY_CLIP, TinyCLIP
    from rewards.video_reward import VideoReward

    if noisy is not None and template is not None:
        raise ConfigError("--template asks a judge, and --noisy trains a CLIP; leave one of them out")
    if output.exists():
        raise ConfigError(f"{output} is there already; --out names a new folder")
    kind = Preferences if noisy is None else Prompts
    read = read_texts if texts else kind.read
    examples: Any = read(preferences)
    tested: Any = None if heldout is None else read(heldout)
    if noisy is None and are_texts(examples):
        examples.check_enough(min_pairs, "--min-pairs")
        report, use = train_on_texts(
            examples,
            tested,
            output,
            model=model,
            template=template,
            loss=loss,
            reference=reference,
            epochs=epochs or 3,
            learning_rate=learning_rate or RATE,
            batch_size=batch_size,
            seed=seed,
        )
        _say(report)
        print(use)
        return
    if loss != "bradley_terry" or reference is not None:
        raise ConfigError("--loss and --reference are of reward models of texts, and these preferences are not")
    if noisy is None:
        examples, tested = (None if votes is None else votes.of_pictures() for votes in (examples, tested))
        examples.check_enough(min_pairs, "--min-pairs")
    train, test = split(examples, 0.1, seed) if tested is None else (examples, tested)
    model = model or PICK_SCORE
    processor = PICK_SCORE_PROCESSOR if model == PICK_SCORE and processor is None else processor
    path = str(TINY_CLIP if model == TinyCLIP.name else shipped(model))
    if noisy is not None:
        settings = {
            "epochs": epochs or 1,
            "learning_rate": learning_rate or 5e-7,
            "batch_size": batch_size,
            "seed": seed,
        }
        _train_noisy(ClipScorer(path, processor), noisy, train, test, output, steps, per_prompt, settings)
        return
    scorer: ClipScorer | JudgeScorer | VideoScorer
    if model == VideoReward.name or files_of(Path(model)):
        scorer = VideoScorer(files_of(Path(model)), processor)
    else:
        scorer = ClipScorer(path, processor) if template is None else JudgeScorer(path, template)
    report = fit(scorer, train, test, output, epochs or 3, learning_rate or 3e-6, batch_size, seed)
    _say(report)
    _say_use(scorer, output, template, processor)


def _say_use(
    scorer: "ClipScorer | JudgeScorer | VideoScorer", output: Path, template: str | None, processor: str | None
) -> None:
    """Print the trained reward as a recipe names it."""
    from flowalign.reward_training.judge import JudgeScorer
    from flowalign.reward_training.video import VideoScorer, files_of

    if isinstance(scorer, JudgeScorer):
        name = "vlm_pairwise" if scorer.template.pairwise else "vlm_judge"
        print(f"{{name: {name}, template: {template}, judge: {{model: {output}}}}}")
    elif isinstance(scorer, VideoScorer):
        saved = files_of(output) | ({} if processor is None else {"base": processor})
        print(f"rewards: [{{name: video_reward, {', '.join(f'{key}: {value}' for key, value in saved.items())}}}]")
    else:
        print(f"rewards: [{{name: pick_score, model: {output}, processor: null}}]")


def _say(report: dict[str, Any]) -> None:
    """Print how well the held-out pairs are told apart."""
    from flowalign.evaluation.statistics import share_interval

    low, high = share_interval(report["heldout_accuracy_after"], report["heldout_pairs"])
    print(
        f"{report['pairs']} pairs; on {report['heldout_pairs']} held-out ones the chosen one scores higher in "
        f"{report['heldout_accuracy_before']:.1%} before and {report['heldout_accuracy_after']:.1%} after "
        f"(95% interval {low:.0%} to {high:.0%})"
    )
    if low <= 0.5:
        print(
            f"{report['heldout_pairs']} held-out pairs do not tell this reward from a coin; what helps: more of them "
            "(--heldout), or more votes to learn from"
        )


def _train_noisy(
    scorer: "ClipScorer",
    generator: str,
    train: "Prompts",
    test: "Prompts",
    output: Path,
    steps: int | None,
    per_prompt: int,
    settings: dict[str, Any],
) -> None:
    from flowalign.app.cli.sampling import given as options
    from flowalign.app.loading import load_for_sampling
    from flowalign.reward_training.noisy import train_noisy_reward

    policy, sampling = load_for_sampling(generator, None, "float32")
    sampled: Any = sampling.model_copy(update=options(steps=steps))
    print(sampled.shown())
    report = train_noisy_reward(scorer, policy, train, test, sampled, output, per_prompt, **settings)  # type: ignore[arg-type]
    for level in report["levels"]:
        print(
            f"noise {level['sigma']:.3f}: {level['before']:.1%} of a prompt's pairs in the order of the finished ones "
            f"before, {level['after']:.1%} after"
        )
    print(f"flowalign search {generator} ... --method ttsnap --set ttsnap.noisy={output}")
