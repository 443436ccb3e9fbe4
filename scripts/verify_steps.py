"""Verifications, step by step, that a verifier learns to write by `text_sft` (SPARK, arXiv 2512.03244; the abstract).

    python scripts/verify_steps.py solutions.jsonl checked.jsonl --url http://127.0.0.1:8000/v1 --model Qwen/Qwen3-8B
    flowalign train sft.yaml data.prompts=checked.jsonl

A line of the first file is {"prompt": ..., "text": ...}; no right answers are needed. Several verifications of each
solution are drawn and criticised by the same model, and one that says of every step what most say is kept. As a reward
the trained verifier is {name: text_judge, template: text_verify, judge: {model: RUN}}, beside `text_format`.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from flowalign.errors import ConfigError
from flowalign.runs.files import write_atomically
from rewards.judges.base import Judge
from rewards.judges.local import Local
from rewards.judges.served import Served
from rewards.judges.verification import verified


def read(file: Path) -> list[tuple[str, str]]:
    """The prompts and their solutions."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            prompt, text = record["prompt"], record["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: needs JSON with the texts 'prompt' and 'text'") from error
        if not isinstance(prompt, str) or not isinstance(text, str):
            raise ConfigError(f"{file}, line {number}: needs JSON with the texts 'prompt' and 'text'")
        rows.append((prompt, text))
    return rows


def write(rows: list[tuple[str, str]], judge: Judge, output: Path, samples: int, critiques: int) -> int:
    """Write the verifications that were found; returns their number."""
    prompts, texts = [prompt for prompt, _ in rows], [text for _, text in rows]
    lines = [line for line in verified(judge, prompts, texts, samples, critiques) if line is not None]
    write_atomically(output, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def main(
    solutions: Annotated[Path, typer.Argument(exists=True)],
    output: Path,
    model: Annotated[str, typer.Option(help="Folder or hub name, or the server's name of it.")],
    url: Annotated[str | None, typer.Option(help="Server; default the model runs in this process.")] = None,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    critiques: Annotated[int, typer.Option(min=0)] = 1,
) -> None:
    judge = Local(model) if url is None else Served(url=url, model=model)
    rows = read(solutions)
    count = write(rows, judge.build("verify"), output, samples, critiques)
    print(f"verifications of {count} of {len(rows)} solutions in {output}")


if __name__ == "__main__":
    typer.run(main)
