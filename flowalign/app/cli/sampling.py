"""Options that all commands share that sample from a model."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli.numbers import finite

if TYPE_CHECKING:
    from flowalign.policies.diffusion import DiffusersPolicy

TRUST = "Run the code of others that the run's configuration names, such as a reward of your own."

Model = Annotated[str, typer.Argument(help="A run's folder, or a model: folder, hub name, 'tiny_sd3'.")]
Lora = Annotated[Path | None, typer.Option(help="Folder of LoRA weights to put on the model.")]
Images = Annotated[
    list[Path] | None, typer.Option(help="A picture to edit, to fill or to begin a video with; repeat for several.")
]
Mask = Annotated[Path | None, typer.Option(help="Mask that is white where the picture must be filled.")]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Seed of each prompt's first picture.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Trust = Annotated[bool, typer.Option("--trust", help=TRUST)]


OPTIONS: dict[str, Any] = {
    "steps": Annotated[int | None, typer.Option(min=1, help="Denoising steps.")],
    "guidance": Annotated[float | None, typer.Option(min=1, callback=finite, help="Classifier-free guidance scale.")],
    "guidance_2": Annotated[
        float | None, typer.Option(min=1, callback=finite, help="Guidance scale of Wan 2.2's second network.")
    ],
    "negative_prompt": Annotated[str | None, typer.Option(help="Prompt that guidance leads away from.")],
    "height": Annotated[int | None, typer.Option(min=8, help="Pixels.")],
    "width": Annotated[int | None, typer.Option(min=8, help="Pixels.")],
    "num_frames": Annotated[int | None, typer.Option(min=1, help="Frames of a video.")],
    "duration": Annotated[float | None, typer.Option(min=0.01, callback=finite, help="Seconds of a sound.")],
    "rlg": Annotated[
        list[str] | None,
        typer.Option(
            help="Weight of what the LoRA learned: 0 the base, 1 the LoRA, 1.6 beyond it; or LORA=WEIGHT, repeatedly."
        ),
    ],
}
"""The options of sampling, the same for every command."""


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Add all options of sampling to a command, which gets those that are set as its first argument."""
    declared = inspect.signature(command)
    _, *others = declared.parameters.values()
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        sampling = {name: options.pop(name) for name in OPTIONS}
        command(given(**sampling | {"rlg": rlg(sampling["rlg"])}), **options)

    run.__signature__ = declared.replace(  # type: ignore[attr-defined]
        parameters=[*(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others), *shared]
    )
    run.__annotations__ = {**command.__annotations__, **OPTIONS}
    return run


def given(**options: object) -> dict[str, Any]:
    """The sampling settings that the command line sets."""
    return {name: value for name, value in options.items() if value is not None}


def of_pictures(names: Iterable[str]) -> str:
    """Message that these options are only for models of pictures."""
    return f"{', '.join('--' + name.replace('_', '-') for name in names)}: of pictures"


def check_prompts(prompts: list[str], negative_prompt: str | None) -> None:
    """Refuse texts that no model can read."""
    from flowalign.data.files import unusable
    from flowalign.errors import ConfigError

    for prompt in [*prompts, negative_prompt or ""]:
        problem = unusable(prompt)
        if problem is not None:
            raise ConfigError(f"the prompt {prompt[:60]!r} {problem}")


def rlg(texts: list[str] | None) -> float | dict[str, float] | None:
    """The weights of `--rlg`: one for the model's own LoRA, or one for each of several."""
    from flowalign.errors import ConfigError
    from flowalign.policies.base import OWN

    weights = {}
    for text in texts or []:
        path, _, weight = text.rpartition("=")
        try:
            weights[path or OWN] = value = float(weight)
            if not math.isfinite(value):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--rlg {text}: give a weight such as 1.6, or LORA=WEIGHT such as runs/a/lora=1.6"
            ) from None
    return weights.get(OWN) if weights.keys() <= {OWN} else weights


def pictures(images: list[Path] | None, mask: Path | None) -> dict[str, Any]:
    """The pictures that samples are made from, with the keys of a line in a prompt file."""
    from flowalign.data import Prompts
    from flowalign.errors import ConfigError

    if mask is not None and not images:
        raise ConfigError("--mask says where a picture is to be filled; --image FILE names the picture")
    files = {"image": list(map(str, images or [])), "mask": mask and str(mask)}
    record = {name: value for name, value in files.items() if value}
    Prompts.check(record, Path(), "sample")
    return record


def check_frames(policy: Any, num_frames: int | None) -> None:
    """Refuse a number of frames for a pipeline that makes pictures."""
    from flowalign.errors import ConfigError
    from flowalign.policies.diffusion.storage import makes_videos

    name = type(policy.pipeline).__name__
    if num_frames is not None and not makes_videos(name):
        raise ConfigError(f"--num-frames: {name} has no num_frames, as it makes pictures; leave it out")


def check_pictures(policy: "DiffusersPolicy", source: dict[str, Any]) -> None:
    """Refuse pictures for a pipeline that takes none."""
    from flowalign.errors import ConfigError

    if source and not policy.family.images[1]:
        raise ConfigError(f"--image: {type(policy.pipeline).__name__} makes samples from prompts alone")
