"""Processor time of drawing texts of many lengths, with and without continuous batching.

A Llama of random weights draws 256 texts, which end by chance: their lengths vary, as those of a model that reasons.
Both ways take turns, and the texts must be the same.

    python scripts/benchmark_continuous.py
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flowalign.data import ASSETS
from flowalign.policies.language.policy import LanguagePolicy

SIZES = (16, 64)
"""Texts of a network call."""
TURNS = 3


def policy() -> LanguagePolicy:
    """Six layers of width 256, with the tokens of the shipped model."""
    shipped = LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shipped.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=512,
        pad_token_id=shipped.tokenizer.pad_token_id,
        eos_token_id=shipped.ends[0],
    )
    return LanguagePolicy(LlamaForCausalLM(config), shipped.tokenizer)


def main() -> None:
    torch.set_num_threads(1)
    model = policy()
    prompts = [f"{a}+{b}=" for a in range(10, 26) for b in range(20, 36)]
    print("| texts of a call | without | with | saved |")
    print("| ---: | ---: | ---: | ---: |")
    for size in SIZES:
        spent: dict[bool, list[float]] = {False: [], True: []}
        drawn = {}
        for _ in range(TURNS):
            for on in (False, True):
                begin = time.process_time()
                drawn[on] = model.sample(
                    prompts, list(range(256)), max_new_tokens=128, batch_size=size, continuous_batching=on
                )
                spent[on].append(time.process_time() - begin)
        assert torch.equal(drawn[True].completion_ids, drawn[False].completion_ids)
        without, refilled = (sorted(spent[on])[TURNS // 2] for on in (False, True))
        print(f"| {size} | {without:.2f} s | {refilled:.2f} s | {1 - refilled / without:.0%} |")
    lengths = drawn[True].mask.sum(1)
    again, _ = model.log_probs(drawn[True], torch.arange(256))
    print(f"\nlengths {lengths.min()} to {lengths.max()}, mean {lengths.float().mean():.1f}")
    print(f"largest difference of a replay: {(again - drawn[True].log_prob).abs().max():.1e}")


if __name__ == "__main__":
    main()
