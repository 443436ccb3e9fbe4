"""Texts by vLLM's OpenAI-compatible server (read from the wheel of 0.32.0, and run against it).

Adapters by `/v1/load_lora_adapter`, which the server offers with VLLM_ALLOW_RUNTIME_LORA_UPDATING. Whole weights by
its worker's `reload_weights` over `/collective_rpc`, which it offers with VLLM_SERVER_DEV_MODE. Both let whoever
reaches the port change the server: it belongs on a trusted network.
"""

import json
from dataclasses import asdict
from typing import Any

from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.language.decoding import Decoding
from flowalign.training.engines.completions import Wanted
from flowalign.training.engines.text_settings import TextSettings
from flowalign.training.engines.texts import PublishedTexts, TextServers

HOTTEST = 2.0
"""Largest temperature that vLLM takes; below COLDEST it samples by COLDEST."""
COLDEST = 0.01


class VLLMSettings(TextSettings):
    """Settings of vLLM servers."""

    def check_decoding(self, decoding: Decoding, name: str) -> None:
        if not COLDEST <= decoding.temperature <= HOTTEST:
            raise ConfigError(f"rollout.temperature: {name} takes {COLDEST} to {HOTTEST:g}")
        if decoding.min_p > 0 and decoding.top_p < 1:
            raise ConfigError(
                f"rollout.min_p: {name} takes it before top_p and flowalign after it, so that the two keep other "
                "tokens; one of them works"
            )


def request(model: str, wanted: Wanted, seed: int, decoding: Decoding) -> dict[str, Any]:
    """The request of a text; all is said that a model's generation_config may say otherwise."""
    return {
        "model": model,
        "prompt": wanted.prompt,
        "max_tokens": wanted.length,
        # vLLM has the same names
        **asdict(decoding),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "stop_token_ids": list(wanted.ends),
        # no end but these
        "ignore_eos": True,
        # the drawn token's
        "logprobs": 0,
        "return_token_ids": True,
    }


class VLLM(TextServers):
    """vLLM servers (`vllm serve`)."""

    Settings = VLLMSettings
    start = "vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora --max-lora-rank RANK"
    raw = "vllm serve ... --logprobs-mode processed_logprobs gives those that count"
    seeds = "vLLM draws by a request's seed since 0.8"

    def body(self, model: str, published: PublishedTexts, wanted: Wanted, seed: int) -> dict[str, Any]:
        return request(published.name if self.policy.lora else model, wanted, seed, self.decoding)

    def check_weights(self, answer: dict[str, Any], published: PublishedTexts) -> None:
        if self.policy.lora and answer.get("model") != published.name:
            raise ValueError(f"it is of '{answer.get('model')}', and the adapter '{published.name}' was asked for")

    def load_adapter(self, url: str, published: PublishedTexts) -> None:
        status, said = self.servers.tell(
            url, "/v1/load_lora_adapter", {"lora_name": published.name, "lora_path": str(published.folder)}
        )
        if status == 404 and "Not Found" in said:
            raise FlowalignError(
                f"rollout.engine: {url} takes no adapters while it runs; VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
                f"{self.start} does"
            )
        # another process may have been first
        if status != 200 and "already been loaded" not in said:
            raise FlowalignError(f"rollout.engine: {url} refuses the adapter {published.folder}: {said}")

    def drop_adapter(self, url: str, published: PublishedTexts) -> None:
        self.servers.tell(url, "/v1/unload_lora_adapter", {"lora_name": published.name})

    def load_model(self, url: str, published: PublishedTexts) -> None:
        calls: list[tuple[str, Any]] = [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(published.folder)}}),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": published.name}),
        ]
        for path, values in calls:
            status, said = self.servers.tell(url, path, values)
            if status != 200:
                raise FlowalignError(
                    f"rollout.engine: {url}{path} does not take whole weights ({said}); VLLM_SERVER_DEV_MODE=1 vllm "
                    "serve ... of 0.30 or later does, and model.lora: {...} goes without"
                )

    def version(self, url: str) -> str:
        status, said = self.servers.tell(url, "/weight_info")
        if status != 200:
            raise FlowalignError(
                f"rollout.engine: {url}/weight_info tells no version of whole weights ({said}); VLLM_SERVER_DEV_MODE=1 "
                "vllm serve ... does, and model.lora: {...} goes without"
            )
        try:
            return str(json.loads(said)["weight_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise FlowalignError(f"rollout.engine: {url}/weight_info names no weights: {said[:200]}") from error
