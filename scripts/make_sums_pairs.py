"""Make what the tiny language model learns preferences from: pairs of a right and a wrong sum, and sums with a label.

    python scripts/make_sums_pairs.py

It writes to flowalign/data/assets/prompts, of the prompts of `sums_train`: `sums_pairs`, those that the model gets
wrong, with the right answer as 'chosen' and its own as 'rejected'; and `sums_labels`, with its own answer as
'completion' and whether it is right as 'label'.
"""

import json
from collections.abc import Sequence
from typing import Any

import flowalign as fa
from flowalign.data import ASSETS, Prompts

LINES = 2000


def write(name: str, lines: Sequence[dict[str, Any]]) -> None:
    file = ASSETS / "prompts" / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:LINES]))
    print(f"{min(len(lines), LINES)} of {len(lines)} lines: {file}")


def main() -> None:
    policy, prompts = fa.load("tiny_lm", kind="text"), Prompts.read("sums_train")
    rollout = policy.sample(prompts.texts, range(len(prompts)), max_new_tokens=5, batch_size=512)
    answers = [record["answer"] for record in prompts.metadata]
    sampled = [each for each in zip(prompts.texts, answers, policy.decode(rollout), strict=True) if each[2].strip()]
    pairs = [{"prompt": prompt, "chosen": right, "rejected": text} for prompt, right, text in sampled if text != right]
    labels = [{"prompt": prompt, "completion": text, "label": text == right} for prompt, right, text in sampled]
    write("sums_pairs", pairs)
    write("sums_labels", labels)


if __name__ == "__main__":
    main()
