"""Records what the real servers of texts say and take, for tests that have none:

    python -m tests.flowalign.training.engines.record_texts vllm http://127.0.0.1:8901 ADAPTER > vllm-0.32.0.json
    python -m tests.flowalign.training.engines.record_texts sglang sglang-0.5.23-*.whl > sglang-0.5.23-texts.json

The first asks a running server of the tiny language model (docs/text.md has its command); ADAPTER is a new folder that
the server can read. The second reads names of fields and routes from the wheel's source, and runs nothing.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import torch

from flowalign.data import ASSETS
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.training.engines.completions import Wanted
from flowalign.training.engines.vllm_texts import request

PROMPTS = ["17+25=", "4-9=", "80+19=", "3+3="]
LENGTH = 6
DECODINGS = [
    Decoding(),
    Decoding(temperature=0.7, top_p=0.9),
    Decoding(temperature=1.5, top_k=3),
    Decoding(temperature=1.5, min_p=0.1),
    Decoding(temperature=1.2, repetition_penalty=1.3),
]
ADAPTER = "recorded"


def adapted() -> LanguagePolicy:
    """The tiny language model with an adapter whose weights are a formula."""
    policy = LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")
    policy.add_lora(4, 8)
    for parameter in policy.trainable().values():
        parameter.data = 0.2 * torch.arange(parameter.numel(), dtype=torch.float32).sin().view(parameter.shape)
    return policy


def wanted(policy: LanguagePolicy, prompt: str) -> Wanted:
    return Wanted(policy.begin(prompt), LENGTH, policy.ends, policy.vocabulary)


def of_vllm(url: str, folder: Path) -> dict[str, Any]:
    policy = adapted()
    policy.save(folder)
    exchanges: list[dict[str, Any]] = []

    def ask(path: str, values: Any = None) -> Any:
        client = httpx2.Client(timeout=60)
        response = client.get(url + path) if values is None else client.post(url + path, json=values)
        said: Any = response.text
        if response.headers.get("content-type", "").startswith("application/json"):
            said = response.json()
        exchanges.append({"path": path, "request": values, "status": response.status_code, "answer": said})
        return said

    version = ask("/version")["version"]
    schemas = httpx2.get(f"{url}/openapi.json").json()["components"]["schemas"]
    root = ask("/v1/models")["data"][0]["root"]
    for decoding in DECODINGS:
        for seed, prompt in enumerate(PROMPTS):
            ask("/v1/completions", request("tiny_lm", wanted(policy, prompt), seed, decoding))
    load = {"lora_name": ADAPTER, "lora_path": str(folder)}
    ask("/v1/load_lora_adapter", load)
    ask("/v1/load_lora_adapter", load)
    ask("/v1/models")
    for seed, prompt in enumerate(PROMPTS):
        ask("/v1/completions", request(ADAPTER, wanted(policy, prompt), seed, Decoding()))
    ask("/v1/unload_lora_adapter", {"lora_name": ADAPTER})
    ask("/v1/completions", request(ADAPTER, wanted(policy, PROMPTS[0]), 0, Decoding()))
    ask("/v1/load_lora_adapter", load | {"lora_path": str(folder / "none")})
    fields = {name: sorted(schemas[name]["properties"]) for name in ("CompletionRequest", "LoadLoRAAdapterRequest")}
    recorded = json.dumps({"version": version, "fields": fields, "exchanges": exchanges})
    return dict(json.loads(recorded.replace(str(folder), "ADAPTER").replace(f'"{root}"', '"MODEL"')))


def of_sglang(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as files:

        def source(name: str) -> str:
            return files.read(f"sglang/srt/{name}").decode()

        names = ("entrypoints/openai/protocol.py", "managers/io_struct.py")
        classes = {
            node.name: [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]  # type: ignore[union-attr]
            for name in names
            for node in ast.walk(ast.parse(source(name)))
            if isinstance(node, ast.ClassDef)
        }
        routes = re.findall(r'@app\.\w+\(\s*"(/[^"]*)"', source("entrypoints/http_server.py"))
    asked = "CompletionRequest CompletionResponse CompletionResponseChoice LoadLoRAAdapterReqInput".split()
    asked += "UnloadLoRAAdapterReqInput UpdateWeightFromDiskReqInput".split()
    version = wheel.name.split("-")[1]
    return {
        "version": version,
        "fields": {name: sorted(classes[name]) for name in asked},
        "routes": sorted(set(routes)),
    }


if __name__ == "__main__":
    kind, place, *rest = sys.argv[1:]
    print(json.dumps(of_vllm(place, Path(rest[0]).resolve()) if kind == "vllm" else of_sglang(Path(place))))
