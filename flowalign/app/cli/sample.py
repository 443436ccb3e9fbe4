"""`flowalign sample`: pictures, videos or texts from a model or from a trained run."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from flowalign.app.cli import sampling as options
from flowalign.app.cli.modules import opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output


@options.with_sampling
def sample(
    requested: dict[str, Any],
    model: options.Model,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    lora: options.Lora = None,
    image: options.Images = None,
    mask: options.Mask = None,
    seed: options.Seed = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path("samples"),
    dtype: options.Dtype = "float32",
    trust: options.Trust = False,
) -> None:
    """Sample pictures, or texts of a language model's run, from a model or from a trained run."""
    from flowalign.app.loading import load_for_sampling
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.policies.language.policy import LanguagePolicy
    from flowalign.runs.samples import save_picture

    source = options.pictures(image, mask)
    options.check_prompts(prompts, requested.get("negative_prompt"))
    check_output(output, "--output", folder=True)
    with opened(model, trust):
        policy, sampling = load_for_sampling(model, lora, dtype)
    texts = [prompt for prompt in prompts for _ in range(count)]
    # the same for every prompt, so that they can be compared
    seeds = [seed + number for _ in prompts for number in range(count)]
    if isinstance(policy, LanguagePolicy):
        if requested or source:
            raise ConfigError(f"{options.of_pictures([*requested, *source])}, and this run trained a language model")
        for prompt, completion in zip(texts, policy.make(texts, seeds, sampling), strict=True):
            print(f"{prompt!r} -> {completion!r}")
        return
    assert isinstance(policy, DiffusersPolicy)
    options.check_pictures(policy, source)
    options.check_frames(policy, requested.get("num_frames"))
    settings = sampling.asked(requested)
    print(settings.shown())
    output.mkdir(parents=True, exist_ok=True)
    first = next_number(output)
    for i, picture in enumerate(policy.make(texts, seeds, settings, [source] * len(texts))):
        path = save_picture(picture, output / f"{first + i:05d}-seed{seeds[i]}", "png")
        print(f"{path}  {texts[i]}")


def next_number(folder: Path) -> int:
    """The number after the last sample in a folder, whose samples are not overwritten."""
    matches = [re.match(r"(\d+)-seed", path.name) for path in folder.iterdir()]
    return max((int(match[1]) + 1 for match in matches if match), default=0)
