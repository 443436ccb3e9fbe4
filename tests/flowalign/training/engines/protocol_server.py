"""A server that speaks the protocol of sglang's diffusion engine 0.5.23 and samples with a policy of flowalign:
`python protocol_server.py PORT`.

Requests and answers have the names, shapes and formats of sglang's own classes, which `test_rollout_api.py` compares
with fixtures made by them. As there, a sample's start noise and the noise of its steps come from one generator, unless
it is told which seed the noise of its steps has, so that a run can be compared with one without a server. `POST /be`
with the fields of `Settings` makes it so, or faulty.
"""

import hashlib
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch
import uvicorn
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from flowalign.data import shipped
from flowalign.policies.base import TRAINED
from flowalign.policies.diffusion import DiffusersPolicy
from samplers import KERNELS, Recorder
from samplers.noise import generators

OWN = {("sde", False): "flow_sde", ("cps", False): "cps", ("cps", True): "cps_published", ("ode", True): "ode"}


IGNORED = {"seed": 42, "prompt": "a cat", "guidance_scale": 1.0, "rollout_noise_level": 0.3}
"""What an engine does that ignores a key; others are as if left out."""


@dataclass
class Settings:
    noise: dict[str, int] | None = None
    """Seeds of the step noise by those of the start noise."""
    die: int = 0
    """Requests after which the process is gone."""
    fail_every: int = 0
    """Every so many requests one ends with status 500."""
    ignore: str = ""
    """Key of the request that has no effect; or `lora`."""
    pipeline: str = ""
    """Name of another pipeline."""
    size: int = 0
    """Height and width of pictures, whatever is asked for."""
    model: str = ""
    """Folder of another model; default tiny_sd3."""
    encode: dict[str, int] = field(default_factory=lambda: {"max_sequence_length": 0})
    """Arguments of its prompt encoding."""


class Engine:
    def __init__(self) -> None:
        self.policies: dict[str, DiffusersPolicy] = {}
        self.lora: str | None = None
        self.lock, self.requests, self.asleep = threading.Lock(), 0, False
        self.be({})

    def be(self, body: dict[str, Any]) -> dict[str, Any]:
        self.settings, self.requests = Settings(**body), 0
        model = self.settings.model
        if model not in self.policies:
            self.policies[model] = DiffusersPolicy.from_pretrained(
                model or shipped("tiny_sd3"), "float32", encode_options=self.settings.encode
            )
        self.policy = self.policies[model]
        return {}

    def models(self, _: Request) -> Response:
        name = self.settings.pipeline or type(self.policy.pipeline).__name__
        card = {"id": "tiny_sd3", "object": "model", "pipeline_name": name, "pipeline_class": name}
        return JSONResponse({"object": "list", "data": [card]})

    def put(self, path: str, alpha: int) -> None:
        """As sglang does, read a LoRA only where the path is another, by the names of layers in the network."""
        if path != self.lora and self.settings.ignore != "lora":
            [file] = Path(path).glob("*.safetensors")
            tensors = load_file(file)
            if not self.policy.lora:
                rank = next(len(value) for name, value in tensors.items() if name.endswith("lora_A.weight"))
                self.policy.add_lora(rank, alpha)
            refused = set_peft_model_state_dict(self.policy.network, tensors, TRAINED).unexpected_keys
            assert not refused and len(tensors) == len(self.policy.trainable())
        self.lora = path

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """As sglang does, read the weights of a module from the folder of its name."""
        if self.settings.ignore != "weights":
            [module] = body["target_modules"]
            assert module == self.policy.family.denoiser and not self.policy.lora
            [file] = Path(body["model_path"], module).glob("*.safetensors")
            self.policy.network.load_state_dict(load_file(file))
        return {"success": True, "message": "Updated 1 modules (transformer)."}

    def checksum(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for name, value in sorted(self.policy.network.named_parameters()):
            digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
        return {"transformer": digest.hexdigest()}

    def generate(self, body: dict[str, Any]) -> Response:
        self.requests += 1
        if self.requests == self.settings.die:
            os._exit(9)
        if self.asleep:
            return JSONResponse({"detail": "Generation failed: the engine sleeps"}, 500)
        if self.settings.fail_every and self.requests % self.settings.fail_every == 0:
            return JSONResponse({"detail": "Generation failed: as asked for"}, 500)
        asked, ignored = dict(body), self.settings.ignore
        if ignored in body:
            body[ignored] = IGNORED.get(ignored)
        answer = self.answer(body) | {name: asked[name] for name in ("prompt", "seed")}
        return Response(msgpack.packb([answer]), media_type="application/msgpack")

    @torch.no_grad()
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        steps, seed = body["num_inference_steps"], body["seed"]
        sides = {name: self.settings.size or body[name] for name in ("height", "width")}
        if body["num_frames"] is not None:
            sides["num_frames"] = body["num_frames"]
        stay = self.policy.sample(
            body["prompt"],
            [seed],
            metadata=[{"image": body["image_path"]}],
            steps=steps,
            guidance=body.get("true_cfg_scale") or body.get("guidance_scale"),
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
        if self.settings.noise is None:
            torch.randn(first.shape, generator=recorder.sources[0])
        else:
            recorder.sources = generators([self.settings.noise[str(seed)]])
        rows = torch.arange(1)
        for step in range(steps):
            recorder.step(self.policy.velocity(stay, rows, rows + step, recorder.x))
        walked = recorder.trajectory()
        # as they are in the pipeline's loop
        latents, velocity = (self.policy.family.pack(states[0]) for states in (walked.latents, walked.velocity))
        debug = {
            "rollout_variance_noises": tensor(torch.zeros_like(velocity)),
            "rollout_prev_sample_means": tensor(latents[1:]),
            "rollout_noise_std_devs": tensor(torch.zeros(steps, 1)),
            "rollout_model_outputs": tensor(velocity),
        }
        trajectory = {
            "latents": tensor(latents),
            "timesteps": tensor(sigmas[:-1] * 1000),
            "sigmas": tensor(sigmas),
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
            "dit_trajectory": trajectory if body["rollout_return_dit_trajectory"] else None,
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
        engine.put(body["lora_path"], body["lora_alpha"])
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
            Route("/be", answering(engine.be), methods=["POST"]),
            Route("/health", answering(lambda _: {"status": "ok"})),
            Route("/v1/models", engine.models),
            Route("/v1/set_lora", answering(set_lora), methods=["POST"]),
            Route("/v1/list_loras", answering(list_loras)),
            Route("/update_weights_from_disk", answering(engine.read), methods=["POST"]),
            Route("/get_weights_checksum", answering(lambda _: engine.checksum()), methods=["POST"]),
            Route("/release_memory_occupation", answering(sleep(True)), methods=["POST"]),
            Route("/resume_memory_occupation", answering(sleep(False)), methods=["POST"]),
            Route("/rollout/generate", answering(engine.generate), methods=["POST"]),
        ]
    )


def serve(port: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    engine = Engine()
    engine.be(settings)
    uvicorn.run(application(engine), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    serve(int(sys.argv[1]), {})
