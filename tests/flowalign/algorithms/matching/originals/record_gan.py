"""Record what DMD2's own lines make of a generator's samples and of real ones, on networks that are a formula.

In a folder with a clone of tianweiy/DMD2 at 8d8fa55, in an environment with torch and safetensors:

    python tests/flowalign/algorithms/matching/originals/record_gan.py sources

The methods of its `SDGuidance`, and the training loop's sums, are run as they stand, with the names that they use; none
of them is kept here. Samples are noised as a flow's, since the losses do not ask how.
"""

import sys
import textwrap
import types
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

SOURCES = Path(sys.argv[1])
GUIDANCE, LOOP = (SOURCES / "DMD2/main" / name for name in ("sd_guidance.py", "train_sd.py"))
METHODS = {
    "compute_cls_logits": (145, 165),
    "compute_distribution_matching_loss": (168, 255),
    "compute_generator_clean_cls_loss": (312, 324),
    "compute_guidance_clean_cls_loss": (369, 395),
}


def lines(path: Path, first: int, last: int) -> str:
    return textwrap.dedent("".join(path.read_text().splitlines(keepends=True)[first - 1 : last]))


generator = torch.Generator().manual_seed(16)
size, shape = 4, (2, 3, 3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


sigma = torch.tensor([0.9, 0.7, 0.4, 0.2])
inputs = {name: normal(size, *shape) for name in ("x0", "real", "noise", "fake", "teacher")}
inputs["head"] = normal(*shape)


class Drawn:
    """torch, whose draws are the recorded noise, and timesteps the samples' own numbers."""

    randn_like = staticmethod(lambda _: inputs["noise"])
    randint = staticmethod(lambda *_, **__: torch.arange(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def noised(x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    s = sigma[timesteps].view(-1, 1, 1, 1)
    return (1 - s) * x0 + s * noise


def predicted(x: Tensor, velocity: Tensor, _: Any, timesteps: Tensor) -> Tensor:
    return x - sigma[timesteps].view(-1, 1, 1, 1) * velocity


head = inputs["head"].clone().requires_grad_()
unets = {name: types.SimpleNamespace(velocity=inputs[name]) for name in ("fake", "teacher")}
unets["fake"].forward = lambda x, *_, **__: [x.tanh()]
guidance = Names(
    scheduler=Names(add_noise=noised),
    diffusion_gan=True,
    diffusion_gan_max_timestep=1000,
    min_step=0,
    max_step=0,
    num_train_timesteps=1,
    network_context_manager=torch.enable_grad(),
    fake_unet=unets["fake"],
    real_unet=unets["teacher"],
    cls_pred_branch=lambda features: (features * head).sum((1, 2, 3), keepdim=True),
    use_fp16=False,
    fake_guidance_scale=1,
    real_guidance_scale=8,
    alphas_cumprod=torch.ones(()),
)
names: dict[str, Any] = {"torch": Drawn(), "F": F, "get_x0_from_noise": predicted}
names["predict_noise"] = lambda unet, *_, **__: unet.velocity
for method, (first, last) in METHODS.items():
    exec(lines(GUIDANCE, first, last), names)
    setattr(guidance, method, types.MethodType(names[method], guidance))

loop = Names(gen_cls_loss=True, cls_on_clean_image=True, gen_cls_loss_weight=5e-3, guidance_cls_loss_weight=1e-2)
loop.args = Names(gan_alone=False, dm_loss_weight=1.0)
x0 = inputs["x0"].clone().requires_grad_()
made, _ = guidance.compute_distribution_matching_loss(x0, None, None, None, None)
made |= guidance.compute_generator_clean_cls_loss(x0, None)
summed = {"self": loop, "generator_loss": 0.0, "generator_loss_dict": made}
exec(lines(LOOP, 368, 372), summed)
(slope,) = torch.autograd.grad(summed["generator_loss"], x0)
numbers = {"generator/loss": summed["generator_loss"].detach(), "generator/gradient": slope}

told, _ = guidance.compute_guidance_clean_cls_loss(inputs["real"], inputs["x0"], None, None)
summed = {"self": loop, "guidance_loss": 0.0, "guidance_loss_dict": told}
exec(lines(LOOP, 400, 401), summed)
(slope,) = torch.autograd.grad(summed["guidance_loss"], head)
numbers |= {"discriminator/loss": summed["guidance_loss"].detach(), "discriminator/gradient": slope}

if __name__ == "__main__":
    numbers = {name: value.float().reshape(value.shape or (1,)) for name, value in numbers.items()}
    save_file({**inputs, "sigma": sigma, **numbers}, Path(__file__).with_name("gan.safetensors"))
