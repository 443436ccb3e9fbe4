"""A server that speaks the protocol of vLLM's or SGLang's for texts, over a real socket, and draws with our policy.

`python -m tests.flowalign.training.engines.text_server PORT MODEL [--kind sglang] [--fault FAULT]` is one in a process.

Faults: errors (every 50th text is refused with 500), raw (log-probabilities of the logits), seed (draws of its own),
greedy (the same text for all seeds), base (adapters are ignored), no_logprobs, no_ids, cut (texts end early),
ends (end tokens are ignored), prompt (it changes prompts), nan, long, garbage, huge, hang.
"""

import argparse
import json
import queue
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from flowalign.data import shipped
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import rescored


class Texts:
    """Draws texts as they are asked for, those that wait together."""

    def __init__(self, model: str, name: str, kind: str, fault: str | None) -> None:
        self.policy = LanguagePolicy.from_pretrained(shipped(model))
        self.name, self.kind, self.fault = name, kind, fault
        self.adapters: dict[str, str] = {}
        self.version = "default"
        self.asked, self.times = 0, Counter[int]()
        self.changes = threading.RLock()
        self.waiting: queue.Queue[tuple[dict[str, Any], queue.Queue[Any]]] = queue.Queue()
        threading.Thread(target=self._draw_all, daemon=True).start()

    def draw(self, request: dict[str, Any]) -> Any:
        """Tokens and log-probabilities of a request, or the error that it ended with."""
        answer: queue.Queue[Any] = queue.Queue()
        self.waiting.put((request, answer))
        return answer.get()

    def _draw_all(self) -> None:
        while True:
            taken = [self.waiting.get()]
            time.sleep(0.01)
            while not self.waiting.empty():
                taken.append(self.waiting.get())
            kinds: dict[str, list[tuple[dict[str, Any], queue.Queue[Any]]]] = {}
            for request, answer in taken:
                same = {key: value for key, value in request.items() if key not in ("prompt", "seed")}
                kinds.setdefault(json.dumps(same, sort_keys=True), []).append((request, answer))
            for group in kinds.values():
                try:
                    with self.changes:
                        texts = self._together([request for request, _ in group])
                except Exception as error:
                    texts = [error] * len(group)
                for (_, answer), text in zip(group, texts, strict=True):
                    answer.put(text)

    def _together(self, requests: list[dict[str, Any]]) -> list[Any]:
        """Texts of requests that differ in prompt and seed alone."""
        first, policy = requests[0], self.policy
        adapter = self.adapter(first)
        decoding = Decoding(
            **{key: first[key] for key in ("temperature", "top_p", "min_p", "repetition_penalty") if key in first},
            top_k=max(0, first.get("top_k", 0)),
        )
        seeds = [request["seed"] for request in requests]
        if self.fault == "seed":
            # another draw whenever one is asked for again, whichever thread comes first
            self.times.update(seeds)
            seeds = [(seed + 12345 * self.times[seed]) % 2**31 for seed in seeds]
        if self.fault == "greedy":
            seeds = [0 for _ in seeds]
        rows = [request["prompt"] for request in requests]
        ids, mask = policy.padded(rows, ["?"] * len(rows), 0)
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        with policy.adapter(self.adapters[adapter] if adapter and self.fault != "base" else None):
            made = policy.generate(["?"] * len(rows), inputs, seeds, first["max_tokens"], decoding, [])
            if self.fault == "raw":
                made = rescored(policy, made, decoding=Decoding())
        return [
            (tokens[on].tolist(), chances[on].tolist())
            for tokens, chances, on in zip(made.completion_ids, made.log_prob, made.mask, strict=True)
        ]

    def adapter(self, request: dict[str, Any]) -> str | None:
        """The adapter that a request names. Raises KeyError where there is none of this name."""
        name = request.get("lora_path") if self.kind == "sglang" else request["model"]
        if name in (None, self.name):
            return None
        if name not in self.adapters:
            raise KeyError(name)
        return str(name)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    texts: Texts

    def do_GET(self) -> None:
        texts = self.texts
        cards = [{"id": texts.name, "object": "model", "root": texts.name, "parent": None, "max_model_len": 32}]
        cards += [
            {"id": name, "object": "model", "root": path, "parent": texts.name, "max_model_len": None}
            for name, path in texts.adapters.items()
        ]
        answers: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": cards},
            "/model_info" if texts.kind == "sglang" else "/weight_info": {"weight_version": texts.version},
        }
        self.answer(*((200, answers[self.path]) if self.path in answers else (404, {"detail": "Not Found"})))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request, texts = json.loads(body), self.texts
        work = {
            "/v1/completions": self.complete,
            "/load_lora_adapter" if texts.kind == "sglang" else "/v1/load_lora_adapter": self.load,
            "/unload_lora_adapter" if texts.kind == "sglang" else "/v1/unload_lora_adapter": self.unload,
            "/update_weights_from_disk" if texts.kind == "sglang" else "/collective_rpc": self.replace,
            "/reset_prefix_cache": lambda request: (200, {"success": True}),
            "/update_weight_version": self.name_version,
        }.get(self.path)
        self.answer(*(work(request) if work else (404, {"detail": "Not Found"})))

    def load(self, request: dict[str, Any]) -> tuple[int, Any]:
        texts = self.texts
        if not (Path(request["lora_path"]) / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"Loading lora {request['lora_name']} failed: No adapter found"}}
        with texts.changes:
            texts.adapters[request["lora_name"]] = request["lora_path"]
        return 200, f"Success: LoRA adapter '{request['lora_name']}' added successfully."

    def unload(self, request: dict[str, Any]) -> tuple[int, Any]:
        with self.texts.changes:
            self.texts.adapters.pop(request["lora_name"], None)
        return 200, "Success"

    def replace(self, request: dict[str, Any]) -> tuple[int, Any]:
        texts = self.texts
        with texts.changes:
            if texts.kind == "sglang":
                texts.policy.load(request["model_path"])
                texts.version = request["weight_version"]
                return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}
            assert request["method"] == "reload_weights"
            texts.policy.load(request["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def name_version(self, request: dict[str, Any]) -> tuple[int, Any]:
        self.texts.version = request["new_version"]
        return 200, {"success": True, "new_version": request["new_version"]}

    def complete(self, request: dict[str, Any]) -> tuple[int, Any]:
        texts, fault = self.texts, self.texts.fault
        texts.asked += 1
        if fault == "errors" and texts.asked % 50 == 0:
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        if fault == "hang":
            time.sleep(60)
        drawn = texts.draw(request)
        if isinstance(drawn, KeyError):
            if texts.kind == "sglang":
                message = f"The following requested LoRA adapters are not loaded: {drawn.args[0]}"
                return 400, {"object": "error", "message": message, "code": 400}
            return 404, {"error": {"message": f"The model `{drawn.args[0]}` does not exist.", "code": 404}}
        if isinstance(drawn, Exception):
            return 400, {"error": {"message": str(drawn), "code": 400}}
        tokens, chances = drawn
        return 200, self.completion(request, tokens, chances)

    def completion(self, request: dict[str, Any], tokens: list[int], chances: list[float]) -> Any:
        texts, fault = self.texts, self.texts.fault
        ended = tokens[-1] in request["stop_token_ids"]
        prompt = request["prompt"]
        if fault == "garbage":
            return "<html>"
        if fault == "cut":
            tokens, chances, ended = tokens[:1], chances[:1], False
        if fault == "ends":
            tokens, chances, ended = [2, *tokens], [-0.1, *chances], True
            tokens, chances = tokens[: request["max_tokens"]], chances[: request["max_tokens"]]
        if fault == "long":
            tokens, chances = [4] * (request["max_tokens"] + 1), [-0.1] * (request["max_tokens"] + 1)
        if fault == "nan":
            chances = [float("nan")] * len(chances)
        names = [texts.policy.tokenizer.decode([token]) for token in tokens]
        logprobs = {
            "text_offset": list(range(len(tokens))),
            "token_logprobs": chances,
            "tokens": names,
            "top_logprobs": [{name: chance} for name, chance in zip(names, chances, strict=True)],
        }
        stopped = tokens[-1] if ended else None
        choice = {
            "index": 0,
            "text": texts.policy.tokenizer.decode(tokens, skip_special_tokens=True),
            "logprobs": None if fault == "no_logprobs" else logprobs,
            "finish_reason": "stop" if ended else "length",
            "matched_stop" if texts.kind == "sglang" else "stop_reason": stopped,
            "token_ids": None if fault == "no_ids" else tokens,
            "prompt_token_ids": prompt[1:] if fault == "prompt" else prompt,
        }
        if fault == "huge":
            choice["text"] = "x" * 200_000
        used = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        answer = {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 0,
            "model": request["model"],
            "choices": [choice],
            "usage": used | {"total_tokens": sum(used.values())},
        }
        return answer | ({"metadata": {"weight_version": texts.version}} if texts.kind == "sglang" else {})

    def answer(self, status: int, value: Any) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class TextServer(ThreadingHTTPServer):
    """One on a free port, or a given one; `url` says where."""

    daemon_threads = True
    # all of an iteration's requests come at once
    request_queue_size = 256

    def __init__(
        self,
        model: str = "tiny_lm",
        kind: str = "vllm",
        fault: str | None = None,
        port: int = 0,
        name: str = "tiny_lm",
    ) -> None:
        self.texts = Texts(model, name, kind, fault)
        super().__init__(("127.0.0.1", port), type("Bound", (Handler,), {"texts": self.texts}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def serve(model: str, kind: str, fault: str | None, port: int) -> None:
    """Serve in this process."""
    torch.set_num_threads(1)
    TextServer(model, kind, fault, port).serve_forever(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    serve(arguments.model, arguments.kind, arguments.fault, arguments.port)
