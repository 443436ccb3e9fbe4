"""Texts by SGLang's OpenAI-compatible server (read from the wheel of 0.5.23; never run here, it needs a GPU).

Its log-probabilities are those at the request's temperature, before top_p, top_k and min_p, and its seeds count with
`--enable-deterministic-inference` alone. A model's name that it does not know it answers by the model it has, so that
adapters are named by `lora_path`, which it checks.
"""

import json
from dataclasses import asdict
from typing import Any

from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.language.decoding import Decoding
from flowalign.training.engines.completions import Wanted
from flowalign.training.engines.text_settings import TextSettings
from flowalign.training.engines.texts import PublishedTexts, TextServers


class SGLangSettings(TextSettings):
    """Settings of SGLang servers."""

    def check_decoding(self, decoding: Decoding, name: str) -> None:
        if decoding != Decoding(temperature=decoding.temperature):
            raise ConfigError(
                f"rollout: {name} tells log-probabilities before top_p, top_k, min_p and repetition_penalty, which "
                "are not those of what it draws; temperature alone works"
            )


def request(model: str, adapter: str | None, wanted: Wanted, seed: int, decoding: Decoding) -> dict[str, Any]:
    """The request of a text; all is said that the server's preferences may say otherwise."""
    return {
        "model": model,
        "lora_path": adapter,
        "prompt": wanted.prompt,
        "max_tokens": wanted.length,
        **asdict(decoding),
        # all tokens
        "top_k": -1,
        "seed": seed,
        # ignore_eos would ignore these too
        "stop_token_ids": list(wanted.ends),
        "no_stop_trim": True,
        # the drawn token's
        "logprobs": 0,
        "return_token_ids": True,
    }


class SGLangTexts(TextServers):
    """SGLang servers (`python -m sglang.launch_server`)."""

    Settings = SGLangSettings
    start = "python -m sglang.launch_server --model-path MODEL --enable-lora --enable-deterministic-inference"
    raw = "without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment sglang gives those that count"
    seeds = "sglang.launch_server --enable-deterministic-inference heeds it"

    def body(self, model: str, published: PublishedTexts, wanted: Wanted, seed: int) -> dict[str, Any]:
        return request(model, published.name if self.policy.lora else None, wanted, seed, self.decoding)

    def check_weights(self, answer: dict[str, Any], published: PublishedTexts) -> None:
        version = (answer.get("metadata") or {}).get("weight_version")
        if not self.policy.lora and version != published.name:
            raise ValueError(f"it is of the weights '{version}', and '{published.name}' were asked for")

    def load_adapter(self, url: str, published: PublishedTexts) -> None:
        status, said = self.servers.tell(
            url, "/load_lora_adapter", {"lora_name": published.name, "lora_path": str(published.folder)}
        )
        if status != 200:
            raise FlowalignError(
                f"rollout.engine: {url} refuses the adapter {published.folder}: {said}; {self.start} takes some"
            )

    def drop_adapter(self, url: str, published: PublishedTexts) -> None:
        self.servers.tell(url, "/unload_lora_adapter", {"lora_name": published.name})

    def load_model(self, url: str, published: PublishedTexts) -> None:
        values = {"model_path": str(published.folder), "weight_version": published.name, "flush_cache": True}
        status, said = self.servers.tell(url, "/update_weights_from_disk", values)
        if status != 200:
            raise FlowalignError(f"rollout.engine: {url} refuses the weights {published.folder}: {said}")

    def version(self, url: str) -> str:
        status, said = self.servers.tell(url, "/model_info")
        if status != 200:
            raise FlowalignError(f"rollout.engine: {url}/model_info answers with status {status}: {said}")
        try:
            return str(json.loads(said)["weight_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise FlowalignError(f"rollout.engine: {url}/model_info names no weights: {said[:200]}") from error
