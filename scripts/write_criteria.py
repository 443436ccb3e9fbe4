"""Criteria for the reward `weighted_criteria`, written by a model from a committee's answers (arXiv 2603.09160).

    python scripts/write_criteria.py answers.jsonl criteria.jsonl --url http://127.0.0.1:8000/v1 --model Qwen/Qwen3-32B
    python scripts/write_criteria.py answers.jsonl criteria.jsonl --model Qwen/Qwen3-8B    # in this process

A line of the first file is a prompt with its metadata, `committee`, a list of answers of other models, and `student`,
the policy's. The second has the same lines with `criteria` in the place of both. Pictures that a prompt shows, under
`image`, are shown to the model too. Prompts whose reply holds no criterion are left out, and counted.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flowalign.errors import ConfigError
from flowalign.runs.files import write_atomically
from rewards.base import source_images
from rewards.judges.base import Judge
from rewards.judges.criteria import written_criteria
from rewards.judges.local import Local
from rewards.judges.served import Served


def read(file: Path) -> list[dict[str, Any]]:
    """The prompts with their answers."""
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
        strings = isinstance(record, dict) and all(isinstance(record.get(key), str) for key in ("prompt", "student"))
        committee = record.get("committee") if strings else None
        if not isinstance(committee, list) or not committee or not all(isinstance(text, str) for text in committee):
            raise ConfigError(
                f"{file}, line {number}: needs texts 'prompt' and 'student', and 'committee', a list of texts"
            )
        records.append(record)
    return records


def write(records: list[dict[str, Any]], judge: Judge, output: Path) -> int:
    """Write the prompts that have criteria; returns their number."""
    pictures = [source_images([record])[0] if "image" in record else [] for record in records]
    columns = ([record[key] for record in records] for key in ("prompt", "committee", "student"))
    lines = []
    for record, criteria in zip(records, written_criteria(judge, *columns, pictures), strict=True):
        if criteria:
            rest = {key: value for key, value in record.items() if key not in ("committee", "student")}
            lines.append(json.dumps(rest | {"criteria": criteria}) + "\n")
    write_atomically(output, "".join(lines))
    return len(lines)


def main(
    answers: Annotated[Path, typer.Argument(exists=True)],
    output: Path,
    model: Annotated[str, typer.Option(help="Folder or hub name, or the server's name of it.")],
    url: Annotated[str | None, typer.Option(help="Server; default the model runs in this process.")] = None,
) -> None:
    judge = Local(model) if url is None else Served(url=url, model=model)
    records = read(answers)
    print(f"criteria of {write(records, judge.build('criteria'), output)} of {len(records)} prompts in {output}")


if __name__ == "__main__":
    typer.run(main)
