"""`flowalign export`: trained weights as files for other programs, with a model card."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flowalign.app.cli.modules import opened
from flowalign.app.cli.results import in_plain_diffusers
from flowalign.app.cli.sampling import TRUST
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_folder

if TYPE_CHECKING:
    from flowalign.config import BaseConfig

WHOLE = """\
```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(".")
```"""
OTHERS = {
    "kohya": "`{file}` has the names of kohya's sd-scripts, which web UIs and ComfyUI read too: put it into their "
    "folder of LoRAs.",
    "comfyui": "`{file}` is for ComfyUI: put it into `models/loras`.",
}


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write the whole pipeline with the LoRA merged in.")] = False,
    kind: Annotated[
        Literal["diffusers", "kohya", "comfyui"], typer.Option("--format", help="Naming of the LoRA's layers.")
    ] = "diffusers",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A new folder for the files; default one in RUN/export, which is replaced."),
    ] = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(help="For the card: a file of `flowalign eval` or `bench`, --json; repeat for several."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="Upload the folder to the hub, with your own token there.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the hub's repository a private one.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
) -> None:
    """Write a run's LoRA for other programs, or the model with it merged in, with a model card; upload it."""
    from flowalign.app.export import check_format
    from flowalign.app.export import push as upload
    from flowalign.config import load

    if merge and kind != "diffusers":
        raise ConfigError("--merge writes a whole pipeline as diffusers has it; leave --format out")
    with opened(run, trust):
        config: BaseConfig = load(run / "config.yaml")
        check_format(config, kind)
        if out is not None and out.exists():
            raise ConfigError(f"--out: {out} is there already; name a new folder")
        folder = out or run / "export" / ("merged" if merge else kind)
        check_output(folder, "--out", folder=True)
        write_folder(folder, partial(_write, run, config, merge, kind, figures or []))
    for path in sorted(folder.iterdir()):
        print(path)
    if push is not None:
        print(upload(folder, push, private))


def _write(
    run: Path,
    config: "BaseConfig",
    merge: bool,
    kind: Literal["diffusers", "kohya", "comfyui"],
    figures: list[Path],
    folder: Path,
) -> None:
    """Fill a folder with the weights and the card."""
    from flowalign.app.export import copy_weights, write_lora
    from flowalign.app.model_card import write_card
    from flowalign.config import Config

    tags = ["lora"]
    if merge:
        _merge(run, config, folder)
        use, tags = WHOLE, []
    elif isinstance(config, Config) and (run / "lora").is_dir():
        files = write_lora(run, config, kind, folder)
        names = "`, `".join(file.name for file in files)
        if kind == "diffusers":
            use = "\n".join(["```python", *in_plain_diffusers(config.model.path, ".", files[0].name), "```"])
        else:
            use = OTHERS[kind].format(file=names)
    else:
        source = next((path for path in (run / "lora", run / "model") if path.is_dir()), None)
        if source is None:
            raise ConfigError(f"{run} has exported no weights yet; it does so at its end")
        copy_weights(source, folder)
        use, tags = f"The weights that were trained, over `{config.model.path}`.", tags if source.name == "lora" else []
    write_card(run, config, folder, use, tags, figures)


def _merge(run: Path, config: "BaseConfig", folder: Path) -> None:
    from flowalign.app.export import write_merged
    from flowalign.app.loading import load_for_sampling
    from flowalign.policies.diffusion import DiffusersPolicy

    if config.model.kind != "pictures":
        raise ConfigError("--merge: of pictures' models; peft's merge_and_unload merges a language model's LoRA")
    policy: Any = load_for_sampling(str(run), None, config.model.dtype)[0]
    assert isinstance(policy, DiffusersPolicy)
    write_merged(policy, folder)
