"""Record what the authors' own lines make of random velocities, under weights that are not the old or the start's.

In a folder with clones of the repositories below, at these commits, in an environment with torch and safetensors:

    python tests/flowalign/algorithms/matching/originals/record_online.py sources

- NVlabs/DiffusionNFT 24af555
- scxue/advantage_weighted_matching be51372
- Luo-Yihong/DGPO 01ceb4b
- X-GenGroup/Flow-Factory a0b2bc5 (CRD, by its authors)

Lines of the training loops are run as they stand, with the names that they use; none of them is kept here.
"""

import os
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Names

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.nn import functional as F

SOURCES = Path(sys.argv[1])
NFT = SOURCES / "DiffusionNFT/scripts/train_nft_sd3.py"
AWM = SOURCES / "advantage_weighted_matching/advantage_weighted_matching/scripts/train_sd3_awm.py"
DGPO = SOURCES / "DGPO/scripts/train_sd3_dgpo.py"
CRD = SOURCES / "Flow-Factory/src/flow_factory/trainers/crd.py"


def lines(path: Path, first: int, last: int) -> str:
    return textwrap.dedent("".join(path.read_text().splitlines(keepends=True)[first - 1 : last]))


generator = torch.Generator().manual_seed(16)
size, shape = 6, (1, 2, 3)


def normal() -> Tensor:
    return torch.randn(size, *shape, generator=generator)


x0, noise = normal(), normal()
sigma = torch.tensor([0.9, 0.9, 0.9, 0.4, 0.4, 0.4])
target = noise - x0
old = target + 0.5 * normal()
velocity = old + 0.3 * normal()
reference = old + 0.4 * normal()
advantage = torch.tensor([1.3, -0.2, -1.1, 7.0, -2.0, -5.5])
s = sigma.view(-1, 1, 1, 1)
x = (1 - s) * x0 + s * noise
numbers = {
    "x0": x0,
    "noise": noise,
    "sigma": sigma,
    "old": old,
    "velocity": velocity,
    "reference": reference,
    "advantage": advantage,
}


def record(name: str, loss_of: Callable[[Tensor], Tensor]) -> None:
    v = velocity.clone().requires_grad_()
    loss = loss_of(v)
    loss.backward()
    numbers[f"{name}/loss"] = loss.detach().float().reshape(1)
    numbers[f"{name}/gradient"] = v.grad.float().clone()


def nft(beta: float, mode: str) -> Callable[[Tensor], Tensor]:
    def loss_of(v: Tensor) -> Tensor:
        names = {
            "torch": torch,
            "x0": x0,
            "xt": x,
            "t_expanded": s,
            "forward_prediction": v,
            "old_prediction": old,
            "ref_forward_prediction": reference,
            "train_sample_batch": {"advantages": advantage[:, None]},
            "j_idx": 0,
            "loss_terms": {},
            "config": Names(beta=beta, train=Names(adv_clip_max=5, adv_mode=mode, beta=0.1)),
        }
        exec(lines(NFT, 908, 971), names)
        return names["loss"]

    return loss_of


def awm(weighting: str) -> Callable[[Tensor], Tensor]:
    def loss_of(v: Tensor) -> Tensor:
        train = Names(cfg=False, ghuber_power=0.25, adv_clip_max=5, advantage_max=1, loss_type="exp_first")
        vars(train).update(clip_range=1, beta=0.1, ema_beta=1.0, kl_weight="Uniform", kl_ema_weight="Uniform")
        vars(train).update(train_timesteps=1, batch_size=size)
        config = Names(sample=Names(guidance_scale=1.0), train=train)
        names = {"torch": torch, "print": lambda *_: None, "config": config}
        names["accelerator"] = Names(is_main_process=False)
        exec(lines(AWM, 210, 252), names)
        given = (None, None, s, None, None, config, x, x0, noise)
        log_prob, made, std = names["compute_log_prob_awm"](lambda **_: [v], *given, weighting=weighting)
        names["sample"] = {
            "log_probs": log_prob[None],
            "old_log_probs": log_prob[None].detach(),
            "model_output": made[None],
            "model_output_ref": reference.double()[None],
            "model_output_ema": old.double()[None],
            "std_dev_t": std[None],
            "advantages": advantage[:, None],
        }
        exec(lines(AWM, 1292, 1354), names)
        return names["loss"]

    return loss_of


def dgpo(dynamic: bool, beta: float, clip_range: float) -> Callable[[Tensor], Tensor]:
    def loss_of(v: Tensor) -> Tensor:
        names = {
            "torch": torch,
            "dist": distributed,
            "accelerator": None,
            "x0": x0,
            "target_v": target,
            "model_v": v,
            "ref_old_v": reference,
            "old_v": old,
            "use_old": True,
            "info": defaultdict(list),
            "sample": {"advantages": advantage[:, None]},
            "j": 0,
            "group_info": {"local_group_indices": torch.tensor([0, 0, 0, 1, 1, 1]), "num_groups": 2},
            "config": Names(
                use_ema_ref=dynamic,
                clip_range=clip_range,
                clip_dsm=True,
                clip_kl=False,
                train=Names(adv_clip_max=5, beta_dpo=beta, beta=0.1),
                sample=Names(num_image_per_prompt=3),
            ),
        }
        exec(lines(DGPO, 162, 193), names)
        exec(lines(DGPO, 1122, 1158), names)
        return names["loss"]

    return loss_of


def crd(temperature: float, kind: str, adaptive: bool) -> Callable[[Tensor], Tensor]:
    """A group at a time, since the code centres over all samples that it is given."""

    def loss_of(v: Tensor) -> Tensor:
        total = torch.zeros(())
        for rows in (slice(0, 3), slice(3, 6)):
            trainer = Names(weight_temp=temperature, crd_loss_type=kind, crd_beta=0.7, adaptive_logp=adaptive)
            vars(trainer).update(reward_adaptive_kl=True, kl_beta=0.1, training_args=Names(adv_clip_range=(-5.0, 5.0)))
            trainer.accelerator = Names(gather=lambda values: values, device="cpu")
            names = {"torch": torch, "F": F, "self": trainer, "batch": {"advantage": advantage[rows]}}
            exec(lines(CRD, 522, 629), names)
            trainer._compute_crd_loss = types.MethodType(names["_compute_crd_loss"], trainer)
            names |= {"forward_pred": v[rows], "v_target": target[rows]}
            names |= {"old_v_pred": old[rows], "ref_pred": reference[rows]}
            exec(lines(CRD, 753, 825), names)
            total = total + names["loss"] / 2
        return total

    return loss_of


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    distributed.init_process_group("gloo", rank=0, world_size=1)
    for beta, mode in ((1.0, "all"), (0.1, "all")):
        record(f"nft/{beta:g}/{mode}", nft(beta, mode))
    for mode in ("positive_only", "negative_only", "one_only", "binary"):
        record(f"nft/0.5/{mode}", nft(0.5, mode))
    for weighting in ("Uniform", "t", "t**2", "huber", "ghuber"):
        record(f"awm/{weighting.lower()}", awm(weighting))
    record("dgpo/reference", dgpo(False, 2.0, 0.02))
    record("dgpo/old", dgpo(True, 3.0, 0.1))
    record("crd/mean", crd(-1.0, "mse", True))
    record("crd/plain", crd(-1.0, "mse", False))
    record("crd/softmax", crd(0.4, "mse", True))
    record("crd/bce", crd(-1.0, "bce", True))
    save_file(numbers, Path(__file__).with_name("online.safetensors"))
    distributed.destroy_process_group()
