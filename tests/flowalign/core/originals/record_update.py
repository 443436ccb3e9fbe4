"""Record one update of Flow-GRPO's own training loop on the tiny Stable Diffusion 3; README.md says how to run it.

Sampling, advantages and the loop over the steps are theirs. train_sd3.py wants its whole training stack, so the loop
and its `compute_log_prob` are taken out of the file; what accelerate would do around them, adding up the gradients of
the steps and dividing by their number, is done here.
"""

import ast
import contextlib
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from update import BETA, CLIP, GUIDANCE, MEMBERS, NOISE, PROMPTS, RANK, REWARDS, SIGMAS, TARGETS  # noqa: E402

TINY = HERE.parents[3] / "flowalign" / "assets" / "tiny_sd3"


class Wrapped(nn.Module):
    """As torch's DistributedDataParallel wraps a network."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


def published(script: Path, names: dict[str, Any]) -> tuple[Any, Any]:
    """`compute_log_prob` of the script, and the code of its loop over the steps."""
    tree = ast.parse(script.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    [loop] = [
        node
        for node in ast.walk(functions["main"])
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == "j"
    ]
    exec(compile(ast.Module([functions["compute_log_prob"]], []), script, "exec"), names)
    return names["compute_log_prob"], compile(ast.Module([loop], []), script, "exec")


def main(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    from flow_grpo.diffusers_patch.sd3_pipeline_with_logprob import pipeline_with_logprob
    from flow_grpo.diffusers_patch.sd3_sde_with_logprob import sde_step_with_logprob
    from flow_grpo.stat_tracking import PerPromptStatTracker

    torch.manual_seed(0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(TINY, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.requires_grad_(False)
    targets = [f"attn.{name}" for name in TARGETS]
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=targets)
    pipeline.transformer = get_peft_model(pipeline.transformer, settings)
    trained = {name: p for name, p in pipeline.transformer.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)

    prompts = [prompt for prompt in PROMPTS for _ in range(MEMBERS)]
    with torch.no_grad():
        text = pipeline.encode_prompt(prompts, None, None, max_sequence_length=0)
    embeds, negative, pooled, negative_pooled = text
    _, latents, log_probs = pipeline_with_logprob(
        pipeline,
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        negative_prompt_embeds=negative,
        negative_pooled_prompt_embeds=negative_pooled,
        num_inference_steps=len(SIGMAS),
        sigmas=SIGMAS,
        guidance_scale=GUIDANCE,
        noise_level=NOISE,
        output_type="pt",
    )
    states, log_prob = torch.stack(latents, 1), torch.stack(log_probs, 1)
    steps = len(SIGMAS) - 1
    rewards = np.array(REWARDS)[:, None].repeat(steps, 1)
    advantage = torch.as_tensor(PerPromptStatTracker(global_std=True).update(prompts, rewards))

    # an update or two later
    for parameter in trained.values():
        parameter.data += 0.01 * torch.randn_like(parameter)
    kept = advantage.abs().sum(1) != 0
    sample = {
        "latents": states[kept, :-1],
        "next_latents": states[kept, 1:],
        "log_probs": log_prob[kept],
        "advantages": advantage[kept].float(),
        "timesteps": pipeline.scheduler.timesteps.repeat(int(kept.sum()), 1),
    }
    losses: list[torch.Tensor] = []

    def backward(loss: torch.Tensor) -> None:
        losses.append(loss.detach() / steps)
        (loss / steps).backward()

    names: dict[str, Any] = {"torch": torch, "sde_step_with_logprob": sde_step_with_logprob}
    compute_log_prob, loop = published(checkout / "scripts" / "train_sd3.py", names)
    info: dict[str, list[torch.Tensor]] = defaultdict(list)
    names |= {
        "compute_log_prob": compute_log_prob,
        "tqdm": lambda steps, **_: steps,
        "train_timesteps": range(steps),
        "accelerator": SimpleNamespace(
            accumulate=lambda _: contextlib.nullcontext(),
            backward=backward,
            sync_gradients=False,
            is_local_main_process=True,
        ),
        "optimizer": SimpleNamespace(step=lambda: None, zero_grad=lambda: None),
        "autocast": contextlib.nullcontext,
        "transformer": Wrapped(pipeline.transformer),
        "pipeline": pipeline,
        "sample": sample,
        "embeds": torch.cat([negative[kept], embeds[kept]]),
        "pooled_embeds": torch.cat([negative_pooled[kept], pooled[kept]]),
        "config": SimpleNamespace(
            train=SimpleNamespace(cfg=True, beta=BETA, adv_clip_max=5, clip_range=CLIP),
            sample=SimpleNamespace(guidance_scale=GUIDANCE, noise_level=NOISE),
        ),
        "info": info,
    }
    exec(loop, names)
    print({name: [round(value.item(), 6) for value in values] for name, values in info.items()})

    def named(name: str) -> str:
        return name.removeprefix("base_model.model.")

    stored = {f"weight.{named(name)}": p.detach().contiguous() for name, p in trained.items()}
    stored |= {f"gradient.{named(name)}": p.grad.contiguous() for name, p in trained.items() if p.grad is not None}
    save_file(
        stored
        | {
            "states": states[:, :-1].contiguous(),
            "log_prob": log_prob[:, :-1].contiguous(),
            "advantage": advantage.float().contiguous(),
            "loss": torch.stack(losses).sum(),
            "kl": torch.stack(info["kl_loss"]).mean(),
            "clip_fraction": torch.stack(info["clipfrac"]).mean(),
        },
        HERE / "update.safetensors",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
