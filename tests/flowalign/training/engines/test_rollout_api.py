"""sglang's answers, made by its own classes (scripts/sglang_fixtures.py), as flowalign reads and replays them."""

import json
import math
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from flowalign.training.engines.rollout_api import SampleRequest, read
from flowalign.training.engines.sglang import KERNELS as OF_SGLANG
from samplers import KERNELS, transition

FIXTURES = Path(__file__).with_name("sglang-0.5.23.safetensors")
SHAPE = (4, 4, 4)


def fixture(kind: str) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """A request, the bytes of its answer, and all that the fixtures say."""
    with safe_open(FIXTURES, "pt") as file:
        about = json.loads(file.metadata()["about"])
        return json.loads(about["requests"][kind]), file.get_tensor(kind).numpy().tobytes(), about


def levels(steps: int = 4, shift: float = 3.0) -> Tensor:
    """Noise levels of a shifted flow scheduler, as diffusers has them."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas


def noisy(request: dict[str, Any]) -> tuple[int, ...]:
    # cps adds no noise in the last step
    last = 3 if request["rollout_sde_type"] == "cps" else 4
    steps = request["rollout_sde_step_indices"] or range(last)
    return () if request["rollout_sde_type"] == "ode" else tuple(steps)


def asked(request: dict[str, Any], **changes: Any) -> SampleRequest:
    settings = {
        "content": b"",
        "prompt": request["prompt"],
        "seed": request["seed"],
        "steps": request["num_inference_steps"],
        "shape": SHAPE,
        "sigmas": levels(),
        "noisy": noisy(request),
        "debug": request["rollout_debug_mode"],
        "picture": 3 * 32 * 32,
    }
    return SampleRequest(**settings | changes)


@pytest.mark.parametrize("kind", ["sde", "sde_window", "cps", "cps_published", "ode"])
def test_its_steps_are_those_of_our_kernel_by_the_noise_of_the_seed(kind: str) -> None:
    request, body, _ = fixture(kind)
    drawn = read(body, asked(request))
    named = request["rollout_sde_type"], request["rollout_log_prob_no_const"]
    kernel = KERNELS[next(name for name, theirs in OF_SGLANG.items() if theirs == named)]
    sigmas, source = levels(), torch.Generator("cpu").manual_seed(request["seed"])
    # the start noise, then the noise of the steps, from one generator
    torch.testing.assert_close(drawn.states[:1], torch.randn((1, *SHAPE), generator=source), rtol=0, atol=0)
    assert drawn.velocity is not None and not drawn.rounded and drawn.seconds == 0.5
    for step in range(4):
        stochastic = step in noisy(request)
        eta = torch.tensor([request["rollout_noise_level"] if stochastic else 0.0])
        state, velocity = drawn.states[step : step + 1], drawn.velocity[step : step + 1]
        mean, std = kernel(state, velocity, sigmas[step], sigmas[step + 1], eta.view(-1, 1, 1, 1))
        noise = torch.randn((1, *SHAPE), generator=source) if stochastic else torch.zeros(1, *SHAPE)
        following = drawn.states[step + 1 : step + 2]
        torch.testing.assert_close(mean + std * noise, following, rtol=1e-5, atol=1e-6)
        at, to = sigmas[step : step + 1], sigmas[step + 1 : step + 2]
        scored = transition(kernel, state, velocity, at, to, eta, next=following)
        assert math.isclose(float(scored.log_prob), float(drawn.log_prob[step]), rel_tol=2e-5, abs_tol=2e-6)


def test_it_has_no_log_probability_where_cps_adds_no_noise() -> None:
    request, body, _ = fixture("cps_last")
    with pytest.raises(ValueError, match="rollout_log_probs has values that are infinite or NaN"):
        read(body, asked(request))


def test_velocities_are_sent_where_they_are_asked_for() -> None:
    request, body, _ = fixture("silent")
    assert read(body, asked(request)).velocity is None
    with pytest.raises(ValueError, match="no rollout_debug_tensors: the engine ignores"):
        read(body, asked(request, debug=True))


def test_a_lora_of_ours_is_read_with_its_alpha() -> None:
    lora = fixture("sde")[2]["lora"]
    assert lora["alpha"] == 4 and len(lora["layers"]) > 10
    # it looks for them by the names of the network's layers
    assert lora["read"] == sorted(f"{layer}.lora_{half}.weight" for layer in lora["layers"] for half in "AB")


def test_another_plan_is_refused() -> None:
    request, body, _ = fixture("sde")
    with pytest.raises(ValueError, match=r"steps \[0, 1, 2, 3\] have a log-probability, and \[1, 2\] were to be"):
        read(body, asked(request, noisy=(1, 2)))


def changed(body: bytes, change: Any) -> bytes:
    answers = msgpack.unpackb(body)
    change(answers[0])
    return msgpack.packb(answers)


def put(name: str, value: Any) -> Any:
    section, _, key = name.rpartition(".")
    return lambda answer: (answer[section] if section else answer).update({key: value})


def tensor(value: Tensor) -> dict[str, Any]:
    return {"__tensor__": True, "data": save({"t": value}), "shape": list(value.shape), "dtype": str(value.dtype)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("prompt", "a cat"), "its prompt is 'a cat', not 'a red square'"),
        (put("seed", 7), "its seed is '7', not '1234'"),
        (put("dit_trajectory", None), "it has no dit_trajectory"),
        (put("dit_trajectory.latents", tensor(torch.zeros(5, 4, 8, 8))), r"latents is \[5, 4, 8, 8\], not \[5, 4, 4"),
        (put("dit_trajectory.sigmas", tensor(levels(shift=9.0))), "sigmas: they are 1, 0.948"),
        (
            put("dit_trajectory.latents", tensor(torch.zeros(5, 4, 4, 4).long())),
            "latents is no tensor of F32",
        ),
        (put("dit_trajectory.latents", {"__tensor__": True, "data": "gASVAAA="}), "versions of sglang before 0.5.23"),
        (put("dit_trajectory.latents", tensor(torch.zeros(5, 4, 4, 4))["data"]), "latents is no tensor"),
        (put("rollout_log_probs", tensor(torch.full((4,), torch.nan))), "rollout_log_probs has values that are"),
    ],
)
def test_an_answer_that_is_another_one_is_refused(change: Any, message: str) -> None:
    request, body, _ = fixture("sde")
    with pytest.raises(ValueError, match=message) as raised:
        read(changed(body, change), asked(request))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("broken", ["header", "offsets", "short", "long", "sides"])
def test_tensors_whose_sizes_do_not_fit_are_refused(broken: str) -> None:
    request, body, _ = fixture("sde")
    data = save({"t": torch.zeros(5, 4, 4, 4)})
    data = {
        "header": b"\xff" * 8 + data[8:],
        "offsets": data.replace(b"[0,1280]", b"[8,1280]"),
        "short": data[:-4],
        "long": data + b"1234",
        "sides": data.replace(b"[5,4,4,4]", b"[5,4,4,0]"),
    }[broken]
    with pytest.raises(ValueError, match="latents is"):
        read(changed(body, put("dit_trajectory.latents", {"__tensor__": True, "data": data})), asked(request))


NONSENSE = [b"", b"<html>", b"\x80", b"\xc1", b"\x91" * 5000, msgpack.packb([]), b"\xdd\xff\xff\xff\xff"]


@pytest.mark.parametrize("body", NONSENSE)
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        read(body, asked(fixture("sde")[0]))


def test_no_extension_of_msgpack_is_read() -> None:
    with pytest.raises(ValueError, match="extension"):
        read(msgpack.packb([msgpack.ExtType(5, b"x")]), asked(fixture("sde")[0]))


def structure(value: Any) -> Any:
    """Names and kinds of what an answer holds; of tensors the format and the number of axes."""
    if isinstance(value, dict) and value.get("__tensor__"):
        return "tensor", value["dtype"], len(value["shape"]), sorted(value)
    if isinstance(value, dict):
        return {name: structure(inner) for name, inner in value.items()}
    return type(value).__name__
