"""`flowalign sample`: pictures, videos or texts from a model, or from what a run trained."""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from flowalign.errors import ConfigError
from flowalign.runs.files import check_output

TRUST = "Run the code of others that the run's configuration names, such as a reward of your own."


def sample(
    model: Annotated[str, typer.Argument(help="A run's folder, or a model: folder, hub name, 'tiny_sd3'.")],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    lora: Annotated[Path | None, typer.Option(help="Folder of LoRA weights to put on the model.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture to edit, to fill or to begin a video with; several in turn.")
    ] = None,
    mask: Annotated[Path | None, typer.Option(help="White where the picture is to be filled.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=1, help="Classifier-free guidance scale.")] = None,
    guidance_2: Annotated[float | None, typer.Option(min=1, help="That scale for Wan 2.2's second network.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What guidance leads away from.")] = None,
    height: Annotated[int | None, typer.Option(min=8, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Of a video.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of each prompt's first picture.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures a prompt.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("samples"),
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
) -> None:
    """Sample pictures, or a text run's texts, from a model or from what a run trained."""
    from flowalign.cli.launch import load_for_sampling
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.policies.language.policy import LanguagePolicy
    from flowalign.registry import only_ours
    from flowalign.runs.samples import save_picture

    source = pictures(image, mask)
    check_output(output, "--output", folder=True)
    with contextlib.nullcontext() if trust else only_ours(Path(model, "config.yaml")):
        policy, sampling = load_for_sampling(model, lora, dtype)
    asked = {"steps": steps, "guidance": guidance, "guidance_2": guidance_2, "negative_prompt": negative_prompt}
    asked |= {"height": height, "width": width, "num_frames": num_frames}
    asked = {name: value for name, value in asked.items() if value is not None}
    texts = [prompt for prompt in prompts for _ in range(count)]
    # the same for every prompt, so that they can be compared
    seeds = [seed + number for _ in prompts for number in range(count)]
    if isinstance(policy, LanguagePolicy):
        if asked or source:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in [*asked, *source])
            raise ConfigError(f"{options}: of pictures, and this run trained a language model")
        for prompt, completion in zip(texts, policy.make(texts, seeds, sampling), strict=True):
            print(f"{prompt!r} -> {completion!r}")
        return
    assert isinstance(policy, DiffusersPolicy)
    if source and not policy.family.images[1]:
        raise ConfigError(f"--image: {type(policy.pipeline).__name__} makes samples from prompts alone")
    # levels of another number of steps do not fit
    asked |= {"sigmas": None} if steps is not None else {}
    wanted = sampling.model_copy(update=asked)
    print(wanted.shown())
    output.mkdir(parents=True, exist_ok=True)
    first = next_number(output)
    for i, picture in enumerate(policy.make(texts, seeds, wanted, [source] * len(texts))):
        path = save_picture(picture, output / f"{first + i:05d}-seed{seeds[i]}", "png")
        print(f"{path}  {texts[i]}")


def next_number(folder: Path) -> int:
    """The number after the samples that a folder holds, which stay."""
    found = [re.match(r"(\d+)-seed", path.name) for path in folder.iterdir()]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def pictures(images: list[Path] | None, mask: Path | None) -> dict[str, Any]:
    """The files that samples are made from, as a line of a prompt file names them."""
    from flowalign.data import Prompts

    if mask is not None and not images:
        raise ConfigError("--mask says where a picture is to be filled; --image FILE names the picture")
    files = {"image": list(map(str, images or [])), "mask": mask and str(mask)}
    record = {name: value for name, value in files.items() if value}
    Prompts.check(record, Path(), "sample")
    return record
