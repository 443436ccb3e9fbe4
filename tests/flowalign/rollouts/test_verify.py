"""Rollouts with a fault each, which is found and named, and sound ones, about which nothing is said."""

import functools
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.data.batches import Batch
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Sampling
from flowalign.rollouts.checks import check_requested
from flowalign.rollouts.contract import RolloutFile, Weights, describe, read, write
from flowalign.rollouts.verify import verify
from samplers import KERNELS

PROMPTS = ["a red circle", "a red circle", "two blue squares", "two blue squares"]
ETA = torch.tensor([0.7, 0.7, 0.7, 0.0])
STEPS = len(ETA)

Fault = Callable[[DiffusersPolicy, RolloutFile], RolloutFile]


@pytest.fixture(scope="module", params=["sd35", "flux"])
def policy(request: pytest.FixtureRequest) -> DiffusersPolicy:
    made = DiffusersPolicy(build(request.param), encode_options=PIPELINES[request.param].encode)
    made.add_lora(rank=2, alpha=64)
    change(made)
    return made


def change(policy: DiffusersPolicy) -> None:
    """Train the adapter, in a way."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def sound(policy: DiffusersPolicy) -> RolloutFile:
    return sampled(policy)


def sampled(
    policy: DiffusersPolicy, seeds: Any = (4, 5, 6, 7), noise: Any = (14, 15, 16, 17), **changes: Any
) -> RolloutFile:
    batch = Batch(
        prompts=PROMPTS,
        metadata=[{}] * 4,
        group=[0, 0, 1, 1],
        seeds=list(seeds),
        noise_seeds=list(noise),
        iteration=3,
        picks=[0, 0, 1, 1],
    )
    settings = {"kernel": KERNELS["flow_sde"], "eta": ETA, "prompts": PROMPTS} | changes
    own = {key: settings.pop(key) for key in ("guidance", "negative_prompt", "sigmas") if key in settings}
    sampling = Sampling(steps=STEPS, **{"guidance": 3.0, **own}, height=16, width=16)
    rollout = policy.sample(seeds=seeds, noise_seeds=noise, **settings, **sampling.arguments())
    return describe(rollout, batch, sampling)


def says(file: RolloutFile, **changes: Any) -> RolloutFile:
    return replace(file, about=file.about.model_copy(update=changes))


def as_said(file: RolloutFile, of: RolloutFile) -> RolloutFile:
    """A file that says of itself what another one says."""
    return replace(file, about=of.about)


def other_eta(policy: DiffusersPolicy, file: RolloutFile) -> RolloutFile:
    other = sampled(policy, eta=ETA / 2)
    return as_said(replace(other, eta=file.eta), file)


def without_constants(policy: DiffusersPolicy, file: RolloutFile) -> RolloutFile:
    at = [file.sigmas[k].expand(4) for k in range(STEPS)]
    std = torch.stack(
        [
            KERNELS["flow_sde"](
                file.latents[:, k], file.velocity[:, k], at[k][:1, None, None, None], file.sigmas[k + 1], ETA[k]
            )[1].flatten()
            for k in range(STEPS - 1)
        ],
        1,
    )
    log_prob = file.log_prob.clone()
    log_prob[:, :-1] += std.log() + 0.5 * torch.log(torch.tensor(2 * torch.pi))
    return replace(file, log_prob=log_prob)


def start_weights(policy: DiffusersPolicy, file: RolloutFile) -> RolloutFile:
    with policy.reference():
        return as_said(sampled(policy), file)


def stale_weights(policy: DiffusersPolicy, file: RolloutFile) -> RolloutFile:
    kept = {name: value.detach().clone() for name, value in policy.trainable().items()}
    change(policy)
    stale = sampled(policy)
    for name, value in policy.trainable().items():
        value.data.copy_(kept[name])
    return stale


def noise_in_the_end(policy: DiffusersPolicy, file: RolloutFile) -> RolloutFile:
    noisy = sampled(policy, kernel=KERNELS["cps"], eta=torch.tensor([0.7, 0.7, 0.7, 0.0]))
    latents = file.latents.clone()
    latents[:, -1] += 0.1 * noisy.latents[:, 0]
    return replace(file, latents=latents)


def each(file: RolloutFile, function: Callable[[Any], Any]) -> dict[str, Any]:
    """The tensors of samples, each by a function."""
    return {name: function(value) for name, value in file.tensors().items() if name != "sigmas"}


def rows(file: RolloutFile, picks: list[int], lists: bool = True) -> RolloutFile:
    names = ("prompts", "negative_prompts", "seeds", "noise_seeds", "groups")
    taken = {name: [getattr(file.about, name)[i] for i in picks] for name in names} if lists else {}
    return replace(says(file, **taken), **each(file, lambda value: value[picks]))


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "a sigma too few": (lambda p, f: replace(f, sigmas=f.sigmas[1:]), "sigmas", "4 sigmas for 5 states"),
    "levels that rise": (lambda p, f: replace(f, sigmas=f.sigmas.flip(0)), "sigmas", "must fall"),
    "a schedule shifted twice": (
        lambda p, f: replace(f, sigmas=3 * f.sigmas / (1 + 2 * f.sigmas)),
        "sigmas",
        "shifted once more by 3",
    ),
    "other levels": (
        lambda p, f: says(sampled(p, sigmas=[1.0, 0.7, 0.6, 0.2]), levels=None),
        "sigmas",
        "the pipeline's",
    ),
    "the last step missing": (
        lambda p, f: replace(f, sigmas=f.sigmas[:-1], **each(f, lambda value: value[:, :-1])),
        "endpoint",
        "not 0",
    ),
    "the finished state missing": (
        lambda p, f: replace(f, latents=torch.cat([f.latents[:, :-1], f.latents[:, -2:-1]], 1)),
        "endpoint",
        "stored twice",
    ),
    "one start noise for two prompts": (
        lambda p, f: sampled(p, seeds=(4, 5, 4, 5)),
        "start noise",
        "2 of them distinct: the seeds repeat",
    ),
    "seeds that were not used": (
        lambda p, f: says(sampled(p, seeds=(4, 5, 4, 5)), seeds=[4, 5, 6, 7]),
        "start noise",
        "did not use them",
    ),
    "start noise of other seeds": (lambda p, f: says(f, seeds=[4, 5, 6, 8]), "seeds", "samples 3"),
    "samples in another order": (
        lambda p, f: replace(f, **each(f, lambda value: value[[1, 0, 2, 3]])),
        "seeds",
        "in another order",
    ),
    "one step noise for two samples": (
        lambda p, f: sampled(p, noise=(14, 15, 14, 15)),
        "step noise",
        "6 pairs among 12",
    ),
    "step noise like the start": (lambda p, f: sampled(p, noise=(4, 5, 6, 7)), "step noise", "start noise again"),
    "a sample twice": (lambda p, f: rows(f, [0, 0, 2, 3], lists=False), "doubled samples", "1 is 0"),
    "a sample lost": (lambda p, f: rows(f, [0, 1, 2]), "dropped samples", "group 1 has 1 samples, others have 2"),
    "a sample lost in silence": (lambda p, f: rows(f, [0, 1, 2], lists=False), "dropped samples", "3 are there"),
    "a prompt in the wrong group": (lambda p, f: says(f, groups=[0, 1, 0, 1]), "groups", "more than one prompt"),
    "another prompt": (
        lambda p, f: as_said(sampled(p, prompts=[*PROMPTS[:3], PROMPTS[0]]), f),
        "velocity",
        "3 of 'a red circle'",
    ),
    "no prompt": (lambda p, f: as_said(sampled(p, prompts=[""] * 4), f), "velocity", "0 of ''"),
    "16-bit states": (lambda p, f: replace(f, latents=f.latents.bfloat16().float()), "16 bits", "bfloat16"),
    "states in float16": (lambda p, f: replace(f, latents=f.latents.half()), "16 bits", "float16"),
    "another eta": (other_eta, "standard deviation", "0.5"),
    "another kernel": (
        lambda p, f: as_said(sampled(p, kernel=KERNELS["dance_sde"]), f),
        "log-probability",
        "kernel dance_sde",
    ),
    "noise in a deterministic step": (noise_in_the_end, "deterministic steps", "steps 3"),
    "no log-probabilities": (lambda p, f: replace(f, log_prob=0 * f.log_prob), "stochastic steps", "are 0"),
    "a log-probability too many": (
        lambda p, f: replace(f, log_prob=f.log_prob - 1),
        "stochastic steps",
        "steps 3 have eta 0",
    ),
    "no constants": (without_constants, "log-probability", "log std"),
    "sums": (lambda p, f: replace(f, log_prob=f.log_prob * f.latents[0, 0].numel()), "log-probability", "sums"),
    "log-probabilities of the next step": (
        lambda p, f: replace(f, log_prob=torch.cat([f.log_prob[:, 1:3], f.log_prob[:, :1], f.log_prob[:, 3:]], 1)),
        "log-probability",
        "from those of steps",
    ),
    "log-probabilities of other samples": (
        lambda p, f: replace(f, log_prob=f.log_prob.flip(0)),
        "log-probability",
        "other samples",
    ),
    "another convention": (lambda p, f: says(f, log_prob="squared_error"), "log-probability", "the Gaussian's"),
    "NaN": (lambda p, f: replace(f, log_prob=f.log_prob / 0), "not finite", "log_prob"),
    "another version": (stale_weights, "weights", "another version"),
    "no adapter": (start_weights, "velocity", "without its adapter"),
    "no adapter, said": (lambda p, f: says(f, weights=Weights()), "weights", "no adapter"),
    "another size": (lambda p, f: says(f, size={"height": 32, "width": 32}), "size", "a state is"),
    "another model": (lambda p, f: says(f, model="WanPipeline"), "model", "WanPipeline"),
}


def test_nothing_is_said_of_sound_rollouts(policy: DiffusersPolicy, sound: RolloutFile, tmp_path: Path) -> None:
    write(tmp_path / "file", sound)
    for file in (
        read(tmp_path / "file"),
        replace(sound, velocity=None),
        sampled(policy, guidance=1.0, kernel=KERNELS["cps_published"]),
        # noise of an engine, which these seeds do not make here
        says(as_said(sampled(policy, seeds=(24, 25, 26, 27)), sound), generator="cuda"),
    ):
        verdict = verify(policy, file)
        assert verdict.findings == []
        assert [bool(step.std) for step in verdict.steps] == [True, True, True, False]
        assert max(step.largest for step in verdict.steps) < 1e-5


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, policy: DiffusersPolicy, sound: RolloutFile) -> None:
    fault, finding, cause = FAULTS[name]
    verdict = verify(policy, fault(policy, sound))
    named = [found for found in verdict.findings if found.name == finding]
    assert named and cause in named[0].cause, verdict.findings
    # and hardly anything else is blamed
    assert len(verdict.findings) <= 3, verdict.findings
    assert all("\n" not in str(found) for found in verdict.findings)


def test_another_guidance_is_measured() -> None:
    policy = DiffusersPolicy(build("sd35"), encode_options=PIPELINES["sd35"].encode)
    file = sampled(policy, guidance=5.0)
    [finding] = verify(policy, says(file, guidance=[3.0])).findings
    assert finding.cause.endswith("guidance 5 sampled, and the file says 3")
    negative = says(sampled(policy, negative_prompt="noise"), negative_prompts=[""] * 4)
    assert [found.name for found in verify(policy, negative).findings] == ["velocity"]


def test_what_was_not_asked_for_is_named(sound: RolloutFile) -> None:
    asked = [
        "rollout.guidance=4.5",
        "rollout.kernel=cps",
        "rollout.steps=6",
        "rollout.sigmas=null",
        "training.group_size=4",
    ]
    config = load(recipe("tiny_sd3/flow_grpo"), asked)
    names = {finding.name for finding in check_requested(sound, config)}
    assert names == {"guidance", "kernel", "steps", "size", "share_start_noise", "prompt", "dropped samples"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.flowalign.small_run import small_run

    folder = tmp_path_factory.mktemp("verified")
    settings = ["training.iterations=2", "training.checkpoint_every=1", "rollout.save_every=1", "training.previews=0"]
    run = Path(small_run("tiny_sd3/flow_grpo", folder, *settings, whole=True).train().folder)
    # as of a run whose samples a server draws, which no verdict asks
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["rollout"]["engine"] = {"name": "sglang", "url": "http://127.0.0.1:1"}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(run / "rollouts"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_command_verifies_a_runs_rollouts(run: Path, address: str, capfd: pytest.CaptureFixture[str]) -> None:
    def told(*words: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["verify-rollout", *map(str, words)])
        said = capfd.readouterr()
        return int(left.value.code or 0), said.out + said.err

    name = "iteration-000001-rank0.safetensors"
    code, text = told(f"{address}/{name}", "--model", run)
    assert code == 0 and "32 samples of 5 steps by flow_sde: 0 findings" in text and "of clip" in text
    code, text = told(run / "rollouts" / name, "--model", run, "--lora", run / "lora")
    assert code == 1 and "weights: sampled with the adapter" in text
    first = run / "rollouts/iteration-000000-rank0.safetensors"
    code, text = told(first, "--model", "tiny_sd3", "--config", "tiny_sd3/flow_grpo")
    assert code == 0
    later = Path(shutil.move(run / "checkpoints/checkpoint-000001", run / "moved"))
    code, text = told(run / "rollouts" / name, "--model", run)
    assert code == 2 and "has no checkpoint of iteration 1" in text and len(text.strip().splitlines()) == 1
    code, text = told(run / "rollouts" / name, "--model", run, "--lora", later)
    assert code == 0
    for file, why in (
        (f"{address}/nothing", "404"),
        ("ftp://here/a", "begins with"),
        (run / "config.yaml", "no rollout"),
    ):
        code, text = told(file, "--model", run)
        assert code in (1, 2) and why in text and len(text.strip().splitlines()) == 1
