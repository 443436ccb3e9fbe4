"""Make the tiny masked language model that ships with flowalign: 675,000 weights that know some sums.

    python scripts/build_tiny_masked_lm.py        # five minutes of a CPU core

The sums and their parts are those of build_tiny_lm.py. A ModernBERT, the bidirectional network with rotary positions of
transformers, learns to open masks: of an answer's LENGTH positions 1 to LENGTH are masked, each number as often, and
the loss is the mean over them (LLaDA's, arXiv 2502.09992, in its form of a fixed number). An answer is filled up with
its end token. Teaching ends when sampling by rates answers TARGET of the held-out sums, so that there is something to
learn; that is well before STEPS, along which the rate goes up and down. It writes
flowalign/data/assets/tiny_masked_lm.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import json

import torch
from build_tiny_lm import ASSETS, sums
from build_tiny_lm import tokenizer as plain_tokenizer
from torch.nn.functional import cross_entropy
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from flowalign.policies.language.masked import MaskedPolicy

TARGET = 0.4
LENGTH, DENOISING = 5, 5
STEPS, BATCH, RATE, EVERY = 6000, 256, 1.5e-3, 50


def tokenizer() -> PreTrainedTokenizerFast:
    """That of tiny_lm, with one more token for masks."""
    tokens = plain_tokenizer()
    tokens.add_special_tokens({"mask_token": "<mask>"})
    return tokens


def network(tokens: PreTrainedTokenizerFast) -> ModernBertForMaskedLM:
    """Random weights, 675,000, every layer of which sees the whole text."""
    config = ModernBertConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=32,
        global_attn_every_n_layers=1,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        cls_token_id=tokens.bos_token_id,
        sep_token_id=tokens.eos_token_id,
        sparse_prediction=False,
    )
    return ModernBertForMaskedLM(config)


def main() -> None:
    torch.manual_seed(0)
    parts, tokens = sums(), tokenizer()
    model = network(tokens)
    policy = MaskedPolicy(model, tokens, steps=DENOISING)
    model.requires_grad_(True)
    prompts, mask = policy.encode([prompt for prompt, _, _ in parts["taught"]], LENGTH)
    answers = [tokens(answer, add_special_tokens=False).input_ids for _, answer, _ in parts["taught"]]
    clean = torch.tensor([row + [tokens.eos_token_id] * (LENGTH - len(row)) for row in answers])
    attention = torch.cat([mask, torch.ones_like(clean, dtype=torch.bool)], 1)
    position = (attention.cumsum(1) - 1).clamp(min=0)
    asked, right = [prompt for prompt, _, _ in parts["heldout"]], [answer for _, answer, _ in parts["heldout"]]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.05)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(clean), (BATCH,))
        count = torch.randint(1, LENGTH + 1, (BATCH, 1))
        masked = torch.rand(BATCH, LENGTH).argsort(1) < count
        ids = torch.cat([prompts[rows], clean[rows].masked_fill(masked, tokens.mask_token_id)], 1)
        logits = model(ids, attention_mask=attention[rows].long(), position_ids=position[rows]).logits[:, -LENGTH:]
        losses = cross_entropy(logits.flatten(0, 1), clean[rows].flatten(), reduction="none").view_as(masked)
        loss = (losses * masked / count).sum(1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            texts = policy.decode(policy.sample(asked, range(len(asked)), max_new_tokens=LENGTH, batch_size=1000))
            share = sum(text == answer for text, answer in zip(texts, right, strict=True)) / len(right)
            print(f"step {step}: loss {loss.item():.3f}, right answers {share:.3f}", flush=True)
            if share >= TARGET:
                break
    folder = ASSETS / "tiny_masked_lm"
    model.half().save_pretrained(folder)
    tokens.save_pretrained(folder)
    quality = {"parameters": model.num_parameters(), "steps": step, "exact_match": share}
    (folder / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")


if __name__ == "__main__":
    main()
