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
  path: {model}            # a folder, a hub name, or a model that comes with flowalign
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
    heldout: Annotated[str | None, typer.Option(help="Prompts to evaluate on.")] = None,
    algorithm: Annotated[str, typer.Option(help="See flowalign list algorithms.")] = "flow_grpo",
    guidance: Annotated[float, typer.Option(min=1, callback=finite, help="Classifier-free guidance scale.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    output: Annotated[Path, typer.Option(help="The file to write; must not exist.")] = Path("train.yaml"),
) -> None:
    """Write a commented configuration for your model, reward and prompts."""
    from flowalign.config import load

    if output.exists():
        raise ConfigError(f"{output} exists; --output writes elsewhere")
    text = TEMPLATE.format(
        file=output,
        model=model,
        dtype=dtype,
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
    print(f"{output}: flowalign train {output} --dry-run tries it, flowalign train {output} trains")
