"""`flowalign init`: a commented configuration to start from."""

from pathlib import Path
from typing import Annotated

import typer

from flowalign.app.cli.modules import find_beside
from flowalign.app.cli.numbers import finite
from flowalign.errors import ConfigError

TEMPLATE = """\
# Made by `flowalign init`. Train with: flowalign train {file}
# Every key: flowalign config. Recipes with published settings: flowalign recipes.
model:
  path: {model}            # a folder, a hub name, or a model that comes with flowalign{encode}
  dtype: {dtype}           # of the frozen weights and the forward pass; what is trained stays float32
  lora: {{rank: 32}}       # null trains every weight
data:
  prompts: {prompts}       # a text file, JSON lines, parquet, or a data set of the hub
rewards:                   # a weighted sum; flowalign list rewards
{rewards}
algorithm:
  name: {algorithm}        # flowalign list algorithms
rollout:
  steps: 10                # denoising steps in training; evaluation may take more
  guidance: {guidance}     # 1 samples without classifier-free guidance
  # height: 512
  # width: 512
  batch_size: 16           # samples a network call, each process
evaluation:
  prompts: {heldout}       # held out from training; null: no evaluation
  every: 20
training:
  iterations: 200
  prompts_per_iteration: 8 # groups, over all processes
  group_size: 8            # samples a prompt
  micro_batch_size: 4      # (sample, step) pairs a network call of an update
  checkpoint_every: 20
"""


def init(
    model: Annotated[str, typer.Option(help="Folder, hub name, or a model that comes with flowalign.")],
    reward: Annotated[
        list[str], typer.Option(help="Name or dotted path, such as my_file.my_function; several add up.")
    ],
    prompts: Annotated[str, typer.Option(help="File of prompts, or a data set of the hub.")],
    heldout: Annotated[
        str | None,
        typer.Option(help="Prompts to evaluate on.", show_default="x_heldout.jsonl for x.jsonl, if it is there"),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="See flowalign list algorithms.")] = "flow_grpo",
    guidance: Annotated[float, typer.Option(min=1, callback=finite, help="Classifier-free guidance scale.")] = 1.0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="bfloat16; float32 for models that come along"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; must not exist.")] = Path(
        "train.yaml"
    ),
) -> None:
    """Write a commented configuration for your model, reward and prompts."""
    from flowalign.app.loading import ENCODE
    from flowalign.config import load

    if output.exists():
        raise ConfigError(f"{output} exists; --output writes elsewhere")
    heldout = heldout or held_out_of(prompts)
    text = TEMPLATE.format(
        file=output,
        model=model,
        encode="\n  encode: {max_sequence_length: 0}    # as it was trained" if model in ENCODE else "",
        # tiny models train on CPUs, which are slow in 16 bits
        dtype=dtype or ("float32" if model in ENCODE else "bfloat16"),
        prompts=prompts,
        rewards="\n".join(f"  - {{name: {name}, weight: 1.0}}" for name in reward),
        algorithm=algorithm,
        guidance=guidance,
        heldout=heldout or "null",
    )
    output.write_text(text, encoding="utf-8")
    find_beside(output)
    try:
        load(output).check(processes=1)
    except ConfigError:
        output.unlink()
        raise
    if heldout is None:
        print(f"no held-out prompts: nothing will say whether the model got better; {output}, evaluation.prompts")
    print(f"{output}: flowalign train {output} --dry-run tries it, flowalign train {output} trains")


def held_out_of(prompts: str) -> str | None:
    """The held-out list that goes with a list of prompts, by its name: 'x_heldout' for 'x' and for 'x_train'."""
    from flowalign.data.files import located

    if not Path(prompts).name:
        return None
    beside = Path(prompts).with_stem(Path(prompts).stem.removesuffix("_train") + "_heldout")
    return str(beside) if located(str(beside)).is_file() else None
