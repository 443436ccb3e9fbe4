"""Training on examples, for rewards, judges and language models, and the folder of the result."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from flowalign.config.sections import Optimizer
from flowalign.errors import FlowalignError
from flowalign.runs.files import sync
from flowalign.settings import parse
from flowalign.training.optimization import Optimization

LOWER = "a lower --learning-rate helps"


def fit(
    parameters: dict[str, nn.Parameter],
    losses: Callable[[Tensor], Tensor],
    rows: Tensor,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.0,
    size: Callable[[Tensor], Any] = len,
    progress: bool = True,
) -> list[float]:
    """Lower the losses of examples by AdamW, with a rate that falls linearly to 0; return each batch's mean loss.

    Args:
        losses: gives the losses of a batch of rows; their sum divided by the batch's `size` is the mean.

    Raises:
        ConfigError: the learning rate is not above 0.
        FlowalignError: losses or weights became infinite or NaN.
    """
    batches = [batch for _ in range(epochs) for batch in rows[torch.randperm(len(rows))].split(batch_size)]
    values = {"learning_rate": learning_rate, "schedule": "linear", "weight_decay": weight_decay}
    device = next(iter(parameters.values())).device
    optimization, means = Optimization([parameters], parse(Optimizer, values), len(batches), device), []
    bar = tqdm(batches, desc="training", disable=not progress)
    for i, batch in enumerate(bar):
        optimization.set_learning_rate(i)
        total = float(size(batch))
        sums = optimization.backward(lambda chunk: (losses(chunk), {}), batch, total, len(batch))
        optimization.step()
        means.append(sums["loss"].item() / total)
        bar.set_postfix(loss=f"{means[-1]:.3f}")
    finite = all(bool(parameter.isfinite().all()) for parameter in parameters.values())
    if not finite or not math.isfinite(means[-1]):
        raise FlowalignError(f"the training ended with weights or losses that are not finite; {LOWER}")
    return means


@contextmanager
def new_folder(output: Path, name: str, report: dict[str, Any]) -> Iterator[Path]:
    """Context with a folder to write into; it gets the report as `name`, and appears when it is whole."""
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    (partial / name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sync(partial)
    os.replace(partial, output)
