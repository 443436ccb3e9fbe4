"""False alarms of `flowalign verify-rollout`: sound rollouts of ten families are written, read and checked.

Every rollout has its own kernel, plan, guidance, seeds, negative prompts and number of steps. Tiny random pipelines of
the real classes (flowalign/planning/tiny_pipelines.json), on a CPU.

    python scripts/verify_sound_rollouts.py --rollouts 200
"""

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from flowalign.data.batches import Batch
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.rollouts.contract import describe, read, write
from flowalign.rollouts.verify import Verdict, verify
from samplers import KERNELS, All, Random, Window

FAMILIES = ("sd35", "sd15", "sdxl", "flux", "chroma", "qwen_image", "z_image", "sana", "wan22_5b", "hunyuan_video")
PROMPTS = ("a red circle", "two blue squares", "a green triangle above a blue circle")
NOISY = ("flow_sde", "dance_sde", "linear_sde", "cps", "cps_published", "ddim")


def verdict(family: str, policy: DiffusersPolicy, number: int, file: Path) -> Verdict:
    """Sample, write, read and check one rollout, drawn by its number."""
    draw = random.Random(f"{family} {number}")
    steps, members, kernel = draw.randint(3, 8), draw.randint(2, 4), draw.choice(NOISY)
    plans = [All(), Window(size=2, start=0), Random(size=2)]
    eta = draw.choice(plans).etas(steps, draw.uniform(0.2, 0.9), number, 0)
    guidance = draw.choice([1.0, 3.5])
    negative = "noise" if guidance > 1 and policy.family.negative(guidance) else ""
    samples = [(group, member) for group in range(len(PROMPTS)) for member in range(members)]
    batch = Batch(
        prompts=[PROMPTS[group] for group, _ in samples],
        metadata=[{}] * len(samples),
        group=[group for group, _ in samples],
        seeds=[draw.getrandbits(32) for _ in samples],
        noise_seeds=[draw.getrandbits(32) for _ in samples],
        iteration=number,
        picks=[group for group, _ in samples],
    )
    settings = Sampling(steps=steps, guidance=guidance, negative_prompt=negative, **PIPELINES[family].call)
    rollout = policy.sample(
        batch.prompts,
        batch.seeds,
        noise_seeds=batch.noise_seeds,
        kernel=KERNELS[kernel],
        eta=eta,
        **settings.arguments(),
    )
    described = describe(rollout, batch, settings)
    # an engine may leave velocities out
    write(file, described if draw.random() < 0.5 else replace(described, velocity=None))
    return verify(policy, read(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200, help="rollouts in all")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=sorted(PIPELINES))
    given = parser.parse_args()
    alarms, steps, each = 0, 0, given.rollouts // len(given.families)
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families:
            policy = DiffusersPolicy(build(family), encode_options=PIPELINES[family].encode)
            verdicts = [verdict(family, policy, number, Path(folder) / "rollout") for number in range(each)]
            findings = [str(finding) for one in verdicts for finding in one.findings]
            alarms += sum(bool(one.findings) for one in verdicts)
            steps += sum(len(one.steps) for one in verdicts)
            print(f"{family}: {len(verdicts)} rollouts, {len(findings)} findings", *findings, sep="\n  ")
    print(f"{each * len(given.families)} sound rollouts of {steps} steps: {alarms} false alarms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
