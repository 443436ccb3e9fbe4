"""What both sides of the comparison of a training step share: a tiny model, prompts, a reward."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = "abcdefghijkl"
PROMPTS = ["abc", "hgfedcba"]
BETA = 0.04


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<p>", "<e>", *ALPHABET])}, unk_token="<p>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<p>", eos_token="<e>", padding_side="left")


def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    size = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 14, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**size, **ids, max_position_embeddings=32, initializer_range=0.3))


@torch.no_grad()
def moved(network: LlamaForCausalLM) -> LlamaForCausalLM:
    """Away from the weights that it started from, so that there is a divergence."""
    generator = torch.Generator().manual_seed(4)
    for parameter in network.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


def reward(text: str) -> float:
    """The share of its letters that are an a."""
    return text.count("a") / max(len(text), 1)
