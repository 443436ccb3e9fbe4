"""Record what the authors' code of methods that learn from files makes of these inputs; README.md says how to run it.

Most of their losses are lines of long scripts, and are run as they stand there.
"""

import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.nn import functional as F

HERE = Path(__file__).parent
PAIRS, SHAPE = 3, (2, 2, 3)
LABELS = [1, 0, 0, 1, 1, 0]


def run(file: Path, first: str, last: str, names: dict[str, Any]) -> None:
    """The lines of a script from the first that holds a text to the next that holds another."""
    lines = file.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if i > start and last in line)
    exec(textwrap.dedent("\n".join(lines[start : end + 1])), names)


def function(file: Path, name: str) -> Any:
    """A function of a file that stands alone but for torch."""
    names: dict[str, Any] = {"torch": torch, "F": F}
    run(file, f"def {name}(", "    return l", names)
    return names[name]


def loss(file: Path, given: dict[str, torch.Tensor], first: str, last: str, **names: Any) -> dict[str, Any]:
    """Loss and gradient in the prediction."""
    pred = given["pred"].clone().requires_grad_()
    known = {"torch": torch, "F": F, "model_pred": pred, "target": given["target"], "model_batch_args": ()}
    known |= {"ref_unet": lambda **_: SimpleNamespace(sample=given["reference"]), "added_cond_kwargs": None}
    known |= names
    run(file, first, last, known)
    known["loss"].backward()
    assert pred.grad is not None
    return {"loss": known["loss"].item(), "gradient": pred.grad.tolist()}


def kto(folder: Path, given: dict[str, torch.Tensor], halo: str) -> dict[str, Any]:
    pred = given["pred"].clone().requires_grad_()
    errors, reference = ((p - given["target"]).pow(2).mean([1, 2, 3]) for p in (pred, given["reference"]))
    args = {"beta_dpo": 20.0, "bce_offset": "default", "halo": halo, "lambda_d_kto": 1.0, "lambda_u_kto": 0.7}
    names: dict[str, Any] = {"torch": torch, "args": SimpleNamespace(**args), "model_losses": errors}
    names |= {"ref_loss": reference, "batch": {"labels": torch.tensor(LABELS)}}
    names["accelerator"] = SimpleNamespace(reduce=lambda value, reduction: value)
    run(folder / "train_kto_sd_v1.5.py", "policy_KL_logps = -model_losses", "l_kto = w_y", names)
    names["l_kto"].mean().backward()
    assert pred.grad is not None
    return {"loss": names["l_kto"].mean().item(), "offset": names["kl"].item(), "gradient": pred.grad.tolist()}


def sdpo(folder: Path, given: dict[str, torch.Tensor], method: str, beta: float, mu: float) -> dict[str, Any]:
    """One pair at a time, which is what its scale is of here."""
    file, parts = folder / "train.py", []
    args = SimpleNamespace(
        train_method=method,
        beta_dpo=beta,
        winner_preserving_mu=mu,
        use_winner_preserving=True,
        sdxl=False,
        dmpo_alpha=0.01,
    )
    scale = function(file, "get_adaptive_lose_l_scale")
    for pair in range(PAIRS):
        own = {name: value[[pair, pair + PAIRS]] for name, value in given.items()}
        first, last = "model_losses = (model_pred", "raise NotImplementedError"
        made = loss(file, own, first, last, args=args, get_adaptive_lose_l_scale=scale)
        parts.append(made | {"scale": scale(own["pred"], own["target"], mu).item()})
    return {name: [part[name] for part in parts] for name in parts[0]}


def soar(folder: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec((folder / "soar/utils/algorithm.py").read_text(), names)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    noise, clean, velocity = given["target"], given["reference"], given["pred"]
    t0 = torch.linspace(0.2, 0.9, len(noise))
    sigma, _ = names["t_to_sigma_timestep"](t0, scheduler)
    sigma_to, _ = names["t_to_sigma_timestep"](t0 - 1 / 40, scheduler)
    s = sigma.view(-1, 1, 1, 1)
    torch.manual_seed(0)
    points = names["single_step_aux_points"](
        (1 - s) * clean + s * noise, t0, velocity, noise, 1, 2, 1.5, scheduler, 40, "cps", 0.0
    )
    made = [{"states": p["latents"], "sigma_back": p["sigmas"]} for p in points]
    for point in made:
        point["target"] = (point["states"] - clean) / point["sigma_back"].view(-1, 1, 1, 1)
    return {"sigma": sigma.tolist(), "sigma_to": sigma_to.tolist()} | {
        name: [point[name].tolist() for point in made] for name in made[0]
    }


def main() -> None:
    dpo, safe, mapo, labels, real = (Path(folder).resolve() for folder in sys.argv[1:6])
    torch.manual_seed(7)
    given = {name: torch.randn(2 * PAIRS, *SHAPE) for name in ("target", "pred", "reference")}
    given["reference"] = given["pred"] + 0.3 * given["reference"]
    first, last = "model_losses = (model_pred", "loss = -1 * F.logsigmoid"
    args = SimpleNamespace(beta_dpo=20.0, snr_value=0.5, beta_mapo=0.1)
    names: dict[str, Any] = {"torch": torch, "F": F}
    run(mapo / "utils.py", "def compute_loss(", "return ", names)
    noise_scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    # errors far apart would take the sigmoid to its ends, and of small ones their exp(x) - 1 keeps few digits
    off = given["pred"] / given["pred"].square().mean([1, 2, 3], keepdim=True).sqrt()
    alike = given["target"] + off * torch.linspace(2.0, 2.005, len(off)).view(-1, 1, 1, 1)
    pred = alike.clone().requires_grad_()
    made, *_ = names["compute_loss"](args, noise_scheduler, pred, given["target"])
    made.backward()
    assert pred.grad is not None
    recorded = {
        "inputs": {name: value.tolist() for name, value in (given | {"alike": alike}).items()} | {"labels": LABELS},
        "dpo": loss(dpo / "train.py", given, first, last, args=args),
        "mapo": {"loss": made.item(), "gradient": pred.grad.tolist()},
        "kto": kto(labels, given, "sigmoid"),
        "kto_loss_averse": kto(labels, given, "loss_averse"),
        "sdpo": sdpo(safe, given, "diffusion-dpo", 20.0, 0.9),
        "sdpo_dspo": sdpo(safe, given, "dspo", 0.5, 0.9),
        "sdpo_dmpo": sdpo(safe, given, "dmpo", 20.0, 0.9),
        "soar": soar(real, given),
    }
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: float(f"{float(text):.9g}"))
    (HERE / "files.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
