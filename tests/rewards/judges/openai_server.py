"""A real OpenAI-compatible server around an image-text-to-text model, for tests: `python openai_server.py MODEL PORT`.

It shares no code with rewards.judges. One sequence at a time, no padding, log-probabilities from the model's logits:
`logprobs` and `top_logprobs` of the reply, and vLLM's `prompt_logprobs` with `continue_final_message`.
"""

import asyncio
import base64
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForImageTextToText, AutoProcessor


class Server:
    def __init__(self, path: str) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(path)
        self.thread = ThreadPoolExecutor(1)
        self.calls = self.in_flight = self.most_in_flight = 0

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.calls += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self.thread, self.answer, body)
        finally:
            self.in_flight -= 1
        return JSONResponse(answer)

    async def stats(self, request: Request) -> JSONResponse:
        """Since the last time."""
        stats = {"calls": self.calls, "most_in_flight": self.most_in_flight}
        self.calls = self.most_in_flight = 0
        return JSONResponse(stats)

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    @torch.no_grad()
    def answer(self, body: dict) -> dict:
        images, messages = [], []
        for message in body["messages"]:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            kept = []
            for part in parts:
                if part["type"] == "image_url":
                    data = part["image_url"]["url"].partition("base64,")[2]
                    images.append(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
                    kept.append({"type": "image"})
                else:
                    kept.append(part)
            messages.append({"role": message["role"], "content": kept})
        goes_on = body.get("continue_final_message", False)
        ending = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
        text = self.processor.apply_chat_template(messages, tokenize=False, **ending)
        inputs = self.processor(text=[text], images=[images] if images else None, return_tensors="pt")
        tokens = inputs["input_ids"]
        prompt = [None]
        if body.get("prompt_logprobs") is not None:
            log_probs = self.model(**inputs).logits[0].log_softmax(-1)
            for i, token in enumerate(tokens[0, 1:].tolist()):
                entry = {"logprob": log_probs[i, token].item(), "decoded_token": self.decode(token)}
                prompt.append({str(token): entry})

        generator = torch.Generator().manual_seed(body.get("seed", 0))
        reply, entries = [], []
        temperature = body.get("temperature", 1.0)
        for _ in range(body.get("max_tokens", 16)):
            inputs["input_ids"] = tokens
            inputs["attention_mask"] = torch.ones_like(tokens)
            log_probs = self.model(**inputs).logits[0, -1].log_softmax(-1)
            if temperature == 0:
                token = int(log_probs.argmax())
            else:
                chances = (log_probs / temperature).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            top = log_probs.topk(body.get("top_logprobs") or 1)
            best = [{"token": self.decode(i), "logprob": p} for p, i in zip(top.values.tolist(), top.indices.tolist())]
            entries.append({"token": self.decode(token), "logprob": log_probs[token].item(), "top_logprobs": best})
            if token == self.processor.tokenizer.eos_token_id:
                break
            reply.append(token)
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
        message = {"role": "assistant", "content": self.processor.tokenizer.decode(reply)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        choice["logprobs"] = {"content": entries} if body.get("logprobs") else None
        if body["model"] == "mute":
            # as transformers serve
            del choice["logprobs"]
        answer = {"object": "chat.completion", "model": body["model"], "choices": [choice]}
        if len(prompt) > 1:
            answer["prompt_logprobs"] = prompt
        return answer

    def decode(self, token: int) -> str:
        return self.processor.tokenizer.decode([token])


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = Server(sys.argv[1])
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/stats", server.stats),
    ]
    uvicorn.run(Starlette(routes=routes), port=int(sys.argv[2]), log_level="warning")
