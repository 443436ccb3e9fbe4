"""Sampling by vLLM in the place of the model's own `generate`: optional (extra `vllm`), and never run here.

Written against vLLM's documented interface (0.11 and later) and how TRL uses it; the tests check the request, the
weights that are handed over and how an answer becomes a rollout, with vLLM itself replaced.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout, right_padded
from rewards.hub import split_revision


def require_vllm() -> None:
    """Raise ConfigError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: vllm is not installed; pip install 'flowalign[vllm]', or engine: transformers works"
        )


class VLLMEngine:
    """A vLLM engine in this process with the policy's weights, on the policy's GPU.

    Its numbers differ from a forward pass, so that `algorithm.off_policy` must weigh its tokens.

    Args:
        policy: whose texts it writes.
        path: folder or hub name that the policy was loaded from.
        memory: share of the GPU's memory that it may take.
    """

    def __init__(self, policy: LanguagePolicy, path: str, memory: float) -> None:
        require_vllm()
        # in this process, so that weights are handed over without a copy through another
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        self.policy, self.parameters = policy, vllm.SamplingParams
        name, revision = split_revision(path)
        self.model: Any = vllm.LLM(
            model=name,
            revision=revision,
            dtype=str(policy.dtype).removeprefix("torch."),
            gpu_memory_utilization=memory,
            # of the distribution that was drawn from, its temperature included
            logprobs_mode="processed_logprobs",
        )

    def sample(
        self, prompts: Sequence[str], seeds: Sequence[int], *, max_new_tokens: int, batch_size: int, **decoding: Any
    ) -> TextRollout:
        """See `LanguagePolicy.sample`; with the policy's current weights; entropies are 0, vLLM does not tell them.

        Args:
            batch_size: not used, vLLM makes its own batches.
            decoding: fields of `Decoding`.
        """
        rule = Decoding(**decoding)
        hand_over(self.policy.network, self.model)
        ids, mask = self.policy.encode(prompts, max_new_tokens)
        answers = self.model.generate(
            [{"prompt_token_ids": row[is_token].tolist()} for row, is_token in zip(ids, mask, strict=True)],
            [self.parameters(**request(seed, max_new_tokens, rule, self.policy.ends)) for seed in seeds],
            use_tqdm=False,
        )
        self.policy.forwards += len(prompts)
        return as_rollout(self.policy, list(prompts), ids, mask, answers, rule)


def request(seed: int, length: int, decoding: Decoding, ends: Sequence[int]) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams for one text."""
    return {
        "n": 1,
        # vLLM takes 64 bits with a sign
        "seed": seed % 2**63,
        "max_tokens": length,
        # vLLM has the same names
        **asdict(decoding),
        "stop_token_ids": list(ends),
        # the drawn token's own
        "logprobs": 0,
        "detokenize": False,
    }


def as_rollout(
    policy: LanguagePolicy,
    prompts: list[str],
    ids: Tensor,
    prompt_mask: Tensor,
    answers: Sequence[Any],
    decoding: Decoding,
) -> TextRollout:
    """A rollout of vLLM's request outputs, in the order of the prompts; a text's end token belongs to it."""
    rows = [list(answer.outputs[0].token_ids) for answer in answers]
    chances = [
        [step[token].logprob for step, token in zip(answer.outputs[0].logprobs, row, strict=True)]
        for answer, row in zip(answers, rows, strict=True)
    ]
    padding, device = policy.tokenizer.pad_token_id, policy.device
    completion = right_padded(rows, padding, device)
    mask = right_padded([[True] * len(row) for row in rows], False, device)
    log_prob = right_padded(chances, 0.0, device)
    ended = torch.tensor([row[-1] in policy.ends for row in rows], device=device)
    return TextRollout(
        prompts=prompts,
        prompt_ids=ids,
        prompt_mask=prompt_mask,
        completion_ids=completion,
        mask=mask,
        log_prob=log_prob,
        entropy=torch.zeros_like(log_prob),
        ended=ended,
        decoding=decoding,
        padding=padding,
    )


def hand_over(network: nn.Module, engine: Any) -> None:
    """Give the engine the network's current weights, and let it forget what it cached of others."""
    engine.apply_model(lambda model: model.load_weights(merged_weights(network)))
    engine.reset_prefix_cache()


@torch.no_grad()
def merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the network as a checkpoint has them, LoRA adapters added to what they adapt.

    The network itself is not touched: merging and unmerging would leave rounding errors in it.
    """
    adapted = {name: layer for name, layer in network.named_modules() if isinstance(layer, LoraLayer)}
    for name, weight in network.state_dict().items():
        if "lora_" in name:
            continue
        module, _, kind = name.replace(".base_layer", "").rpartition(".")
        if module in adapted and kind == "weight":
            layer: Any = adapted[module]
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        yield f"{module}.{kind}", weight
