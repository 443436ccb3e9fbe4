"""Make the tiny language model that ships with flowalign: half a million weights that know half of their sums.

    python scripts/build_tiny_lm.py        # minutes on a CPU

It writes the model and its tokenizer to flowalign/data/assets/tiny_lm, and the sums to flowalign/data/assets/prompts:
`sums_train` to be learned by reinforcement, `sums_heldout` to measure on. Sums of the three parts (those taught here,
the two lists) are disjoint. Teaching ends when the model samples the right answer to half of the held-out sums.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import json
import random
from functools import partial
from pathlib import Path

import torch
from tiny_language import accuracy, language_model, teach
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ASSETS = Path(__file__).parents[1] / "flowalign" / "data" / "assets"
ALPHABET = "0123456789+-="
SPECIAL = ["<pad>", "<s>", "</s>"]
TARGET = 0.5
STEPS, BATCH, RATE = 20_000, 256, 1e-3
HELDOUT, TRAIN = 1000, 8000


def sums(seed: int = 0) -> dict[str, list[tuple[str, str, str]]]:
    """(prompt, answer, category) of all a + b and a - b below 100, in three disjoint parts."""
    everything = [(f"{a}+{b}=", str(a + b), "addition") for a in range(100) for b in range(100)]
    everything += [(f"{a}-{b}=", str(a - b), "subtraction") for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(everything)
    return {
        "heldout": everything[:HELDOUT],
        "train": everything[HELDOUT : HELDOUT + TRAIN],
        "taught": everything[HELDOUT + TRAIN :],
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character; prompts begin with <s>."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def untaught(tokens: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return language_model(len(tokens), 32, tokens.eos_token_id)


def main() -> None:
    torch.manual_seed(0)
    parts, tokens = sums(), tokenizer()
    model = untaught(tokens)
    examples = [[*tokens(prompt + answer).input_ids, tokens.eos_token_id] for prompt, answer, _ in parts["taught"]]
    width = max(map(len, examples))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in examples])
    # the answer and its end are learned, not the prompt
    answer = (ids == tokens.convert_tokens_to_ids("=")).cumsum(1).bool() & (ids != 0)
    answer[:, 1:] = answer[:, :-1].clone() & (ids[:, 1:] != 0)
    labels = ids.masked_fill(~answer, -100)
    asked, answers = [prompt for prompt, _, _ in parts["heldout"]], [answer for _, answer, _ in parts["heldout"]]
    measure = partial(accuracy, model, tokens, asked, answers, 5)
    step, share = teach(model, ids, labels, STEPS, BATCH, RATE, measure, TARGET)
    folder = ASSETS / "tiny_lm"
    model.half().save_pretrained(folder)
    tokens.save_pretrained(folder)
    for name in ("train", "heldout"):
        lines = [json.dumps({"prompt": p, "answer": a, "category": c}) for p, a, c in parts[name]]
        (ASSETS / "prompts" / f"sums_{name}.jsonl").write_text("\n".join(lines) + "\n")
    quality = {
        "parameters": model.num_parameters(),
        "steps": step,
        "exact_match": share,
        "taught": len(parts["taught"]),
    }
    (folder / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")


if __name__ == "__main__":
    main()
