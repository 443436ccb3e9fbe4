"""What the scripts that make tiny language models share: the network, and teaching it answers."""

from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def language_model(words: int, context: int, end: int) -> LlamaForCausalLM:
    """Half a million random weights. Token 0 is padding, 1 the beginning.

    Args:
        words: in the vocabulary.
        context: the most tokens of a text.
        end: the token that ends a text.
    """
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=end,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def teach(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    steps: int,
    batch: int,
    rate: float,
    measure: Callable[[], float],
    target: float,
) -> tuple[int, float]:
    """AdamW steps on random rows until `measure`, asked every 50 steps, reaches the target.

    Args:
        ids: [N, T] tokens, padded with 0.
        labels: [N, T] the tokens to learn, -100 elsewhere.

    Returns:
        The number of steps, and what was measured last.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    for step in range(1, steps + 1):
        rows = torch.randint(len(ids), (batch,))
        loss = model(ids[rows], attention_mask=(ids[rows] != 0).long(), labels=labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            share = measure()
            print(f"step {step}: loss {loss.item():.3f}, right answers {share:.3f}", flush=True)
            if share >= target:
                break
    return step, share


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, asked: Sequence[str], answers: Sequence[str], length: int
) -> float:
    """Share of prompts to which a sample of at most `length` tokens at temperature 1 is the answer."""
    inputs = tokens(list(asked), padding=True, return_tensors="pt")
    made = model.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=length, do_sample=True, top_k=0
    )
    texts = tokens.batch_decode(made[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)
