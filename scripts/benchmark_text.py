"""`benchmark.py --text`: one GRPO step of flowalign beside one of TRL's GRPOTrainer, on one model, data and seed.

Both trainers live in one process and take turns: after each of its own steps, a callback of TRL's runs one of ours.
Either makes as many texts of as many sums, scores them by the same rule and makes one update of every weight in one
batch; the learning rate is so small that the model, and so the length of its texts, stays what it was. A step's rollout
is generation alone; its update is everything after texts, rewards and advantages are there. `processor` is the whole
step's processor time, which other programs do not change much; the others are seconds of a clock.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import contextlib
import importlib.util
import statistics
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.runs.environment import installed
from flowalign.training import Trainer

GROUP = 8
RATE = 1e-7
PARTS = ("processor", "step", "rollout", "update")


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both trainers in turns and return every figure.

    Raises:
        ConfigError: TRL is not there.
    """
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("--text compares with TRL, which is not installed; pip install 'flowalign[bench]' brings it")
    if arguments.batch_size % GROUP:
        raise ConfigError(f"--batch-size: {arguments.batch_size} texts are no whole groups of {GROUP}")
    with tempfile.TemporaryDirectory() as folder:
        ours = flowalign_trainer(arguments, folder)
        seconds = in_turns(trl_trainer(arguments, folder), ours, arguments.repeats)
    medians = {name: {part: statistics.median(own[part]) for part in PARTS} for name, own in seconds.items()}
    settings = {"batch_size": arguments.batch_size, "group_size": GROUP, "repeats": arguments.repeats}
    return {
        "device": f"CPU, {torch.get_num_threads()} threads",
        "versions": installed(("flowalign", "trl", "torch", "transformers")),
        "settings": settings | {"threads": torch.get_num_threads()},
        "seconds": medians,
        "ratio": {part: medians["trl"][part] / medians["flowalign"][part] for part in PARTS},
        "turns": seconds,
    }


def flowalign_trainer(arguments: argparse.Namespace, folder: str) -> Trainer:
    overrides = [
        f"output={folder}",
        "name=flowalign",
        "evaluation.prompts=null",
        f"rollout.batch_size={arguments.batch_size}",
        f"training.iterations={arguments.repeats + 1}",
        f"training.prompts_per_iteration={arguments.batch_size // GROUP}",
        f"training.group_size={GROUP}",
        f"training.micro_batch_size={arguments.batch_size}",
        f"training.optimizer={{learning_rate: {RATE}, weight_decay: 0.0}}",
    ]
    return Trainer(load(recipe("tiny_lm/grpo"), overrides), progress=False)


def trl_trainer(arguments: argparse.Namespace, folder: str) -> Any:
    """TRL's trainer with the recipe's settings: GRPO's advantage, DAPO's mean over tokens, no KL."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

    settings = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=arguments.batch_size,
        num_generations=GROUP,
        max_steps=arguments.repeats + 1,
        max_completion_length=5,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        seed=0,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    return GRPOTrainer(
        str(ASSETS / "tiny_lm"),
        reward_funcs=exact_match,
        args=settings,
        train_dataset=Dataset.from_json(str(ASSETS / "prompts" / "sums_train.jsonl"), cache_dir=f"{folder}/data"),
        processing_class=AutoTokenizer.from_pretrained(ASSETS / "tiny_lm"),
    )


def in_turns(theirs: Any, ours: Trainer, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part of `repeats` steps of either, after one step that warms up."""
    from transformers import TrainerCallback

    seconds: dict[str, dict[str, list[float]]] = {name: {p: [] for p in PARTS} for name in ("flowalign", "trl")}
    spent: dict[str, float] = {}

    def clocked(function: Any, name: str) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **keywords)
            spent[name] = time.perf_counter() - begin
            return result

        return run

    theirs._generate = clocked(theirs._generate, "rollout")
    theirs._generate_and_score_completions = clocked(theirs._generate_and_score_completions, "experience")

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin, self.worked = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step, worked = time.perf_counter() - self.begin, time.process_time() - self.worked
            own = {"step": step, "rollout": spent["rollout"], "update": step - spent["experience"]}
            own["processor"] = worked
            begin, worked = time.perf_counter(), time.process_time()
            metrics = ours.iterate()
            step, worked = time.perf_counter() - begin, time.process_time() - worked
            mine = {"step": step, "rollout": metrics["seconds/rollout"], "update": metrics["seconds/update"]}
            mine["processor"] = worked
            # the first turn warms up
            if ours.iteration > 0:
                for name, parts in (("trl", own), ("flowalign", mine)):
                    for part, value in parts.items():
                        seconds[name][part].append(value)
            ours.iteration += 1

    theirs.add_callback(Turns())
    with contextlib.redirect_stdout(None):
        theirs.train()
    return seconds


def print_tables(figures: dict[str, Any]) -> None:
    """What was measured, for people."""
    settings, seconds = figures["settings"], figures["seconds"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"tiny_lm, {settings['batch_size']} texts in groups of {settings['group_size']}, medians of "
        f"{settings['repeats']} turns; {figures['device']}, TRL {figures['versions']['trl']}"
    )
    table = Table()
    table.add_column("")
    for column in ("TRL", "flowalign", "TRL / flowalign"):
        table.add_column(column, justify="right")
    for part in PARTS:
        theirs, ours = seconds["trl"][part], seconds["flowalign"][part]
        table.add_row(part, f"{theirs:.3f} s", f"{ours:.3f} s", f"{figures['ratio'][part]:.2f}")
    console.print(table)
