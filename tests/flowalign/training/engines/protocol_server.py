"""A server that speaks the protocol of sglang's diffusion engine 0.5.23 and samples with a policy of flowalign:
`python protocol_server.py PORT [--noise FILE] [fault ...]`.

Requests and answers have the names, shapes and formats of sglang's own classes, which `test_rollout_api.py` compares with
fixtures made by them. As there, a sample's start noise and the noise of its steps come from one generator, unless a
file says which seed the noise of its steps has: {"start seed": noise seed}, so that a run can be compared with one
without a server.
"""

import argparse
import hashlib
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import msgpack
import torch
import uvicorn
from safetensors.torch import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from flowalign.data import shipped
from flowalign.policies.diffusion import DiffusersPolicy
from samplers import KERNELS, Recorder
from samplers.noise import generators

OWN = {("sde", False): "flow_sde", ("cps", False): "cps", ("cps", True): "cps_published", ("ode", True): "ode"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--model", default="tiny_sd3")
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--die-after", type=int, help="requests after which the process is gone, once")
    parser.add_argument("--died", type=Path, help="file that says that it was")
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that end with status 500")
    parser.add_argument("--ignore", default="", help="key of the request, or 'lora', that has no effect")
    parser.add_argument("--pipeline", default="", help="name of another pipeline")
    parser.add_argument("--size", type=int, help="height and width of pictures, whatever is asked for")
    return parser.parse_args()


class Engine:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.policy = DiffusersPolicy.from_pretrained(
            shipped(settings.model), "float32", encode_options={"max_sequence_length": 0}
        )
        self.noise = json.loads(settings.noise.read_text()) if settings.noise else None
        self.lora: str | None = None
        self.lock, self.requests, self.asleep = threading.Lock(), 0, False
        self.random = random.Random(0)

    def models(self, _: Request) -> Response:
        name = self.settings.pipeline or type(self.policy.pipeline).__name__
        card = {"id": self.settings.model, "object": "model", "pipeline_name": name, "pipeline_class": name}
        return JSONResponse({"object": "list", "data": [card]})

    def put(self, path: str) -> None:
        """As sglang does, read a LoRA only where the path is another."""
        if path != self.lora and self.settings.ignore != "lora":
            self.policy.load(path)
        self.lora = path

    def checksum(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for name, value in sorted(self.policy.network.named_parameters()):
            digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
        return {"transformer": digest.hexdigest()}

    def generate(self, body: dict[str, Any]) -> Response:
        self.requests += 1
        if self.requests == self.settings.die_after and not self.settings.died.exists():
            self.settings.died.touch()
            os._exit(9)
        if self.asleep:
            return JSONResponse({"detail": "Generation failed: the engine sleeps"}, 500)
        if self.random.random() < self.settings.fail:
            return JSONResponse({"detail": "Generation failed: as asked for"}, 500)
        if self.settings.ignore in body:
            defaults = {"seed": 42, "guidance_scale": 1.0, "rollout_noise_level": 0.7, "num_inference_steps": 8}
            body[self.settings.ignore] = defaults.get(self.settings.ignore)
        return Response(msgpack.packb([self.answer(body)]), media_type="application/msgpack")

    @torch.no_grad()
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        steps, seed = body["num_inference_steps"], body["seed"]
        sides = {name: self.settings.size or body[name] for name in ("height", "width")}
        stay = self.policy.sample(
            body["prompt"],
            [seed],
            steps=steps,
            guidance=body["guidance_scale"],
            negative_prompt=body["negative_prompt"] or "",
            dry=True,
            **sides,
        )
        kernel = KERNELS[OWN[body["rollout_sde_type"], body["rollout_log_prob_no_const"]]]
        indices = body["rollout_sde_step_indices"]
        noisy = [step for step in range(steps) if indices is None or step in indices]
        eta = torch.zeros(steps)
        eta[noisy] = 0.0 if body["rollout_sde_type"] == "ode" else body["rollout_noise_level"]
        first, sigmas = stay.trajectory.latents[:, 0], stay.trajectory.sigmas
        recorder = Recorder(first, sigmas, kernel, eta, [seed])
        if self.noise is None:
            torch.randn(first.shape, generator=recorder.sources[0])
        else:
            recorder.sources = generators([self.noise[str(seed)]])
        rows = torch.arange(1)
        for step in range(steps):
            recorder.step(self.policy.velocity(stay, rows, rows + step, recorder.x))
        walked = recorder.trajectory()
        means = walked.latents[:, 1:]
        debug = {
            "rollout_variance_noises": tensor(torch.zeros_like(means)[0]),
            "rollout_prev_sample_means": tensor(means[0]),
            "rollout_noise_std_devs": tensor(torch.zeros(steps, 1)),
            "rollout_model_outputs": tensor(walked.velocity[0]),
        }
        picture = self.policy.decode_pixels(walked.final)[0]
        return {
            "request_id": "1",
            "prompt": body["prompt"],
            "seed": seed,
            "generated_output": tensor(picture),
            "rollout_log_probs": tensor(walked.log_prob[0]),
            "rollout_debug_tensors": debug if body["rollout_debug_mode"] else None,
            "denoising_env": None,
            "dit_trajectory": {
                "latents": tensor(walked.latents[0]),
                "timesteps": tensor(sigmas[:-1] * 1000),
                "sigmas": tensor(sigmas),
            },
            "inference_time_s": 0.01,
            "peak_memory_mb": None,
        }


def tensor(value: Tensor) -> dict[str, Any]:
    value = value.detach().contiguous()
    return {"__tensor__": True, "data": save({"t": value}), "shape": list(value.shape), "dtype": str(value.dtype)}


def application(engine: Engine) -> Starlette:
    def answering(answer: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            body = json.loads(await request.body() or b"{}")
            with engine.lock:
                result = answer(body)
            return result if isinstance(result, Response) else JSONResponse(result)

        return endpoint

    def set_lora(body: dict[str, Any]) -> dict[str, str]:
        engine.put(body["lora_path"])
        return {"status": "ok", "message": "Successfully set LoRA adapter(s)"}

    def list_loras(_: Any) -> dict[str, Any]:
        active = [{"nickname": "flowalign", "path": engine.lora, "merged": False, "mode": "unmerged"}]
        return {"loaded_adapters": [], "active": {"transformer": active} if engine.lora else {}}

    def sleep(asleep: bool) -> Any:
        def switch(_: Any) -> dict[str, Any]:
            engine.asleep = asleep
            return {"success": True, "sleeping": asleep, "message": ""}

        return switch

    return Starlette(
        routes=[
            Route("/health", answering(lambda _: {"status": "ok"})),
            Route("/v1/models", engine.models),
            Route("/v1/set_lora", answering(set_lora), methods=["POST"]),
            Route("/v1/list_loras", answering(list_loras)),
            Route("/get_weights_checksum", answering(lambda _: engine.checksum()), methods=["POST"]),
            Route("/release_memory_occupation", answering(sleep(True)), methods=["POST"]),
            Route("/resume_memory_occupation", answering(sleep(False)), methods=["POST"]),
            Route("/rollout/generate", answering(engine.generate), methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    settings = arguments()
    torch.set_num_threads(1)
    uvicorn.run(application(Engine(settings)), host="127.0.0.1", port=settings.port, log_level="error")
