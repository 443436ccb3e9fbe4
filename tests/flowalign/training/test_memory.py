"""What saves memory does not change the numbers, and what runs out of it says what to lower."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowalign.config import load, recipe
from flowalign.errors import ConfigError, FlowalignError
from flowalign.planning.fake_device import DEVICE, FakeDevice
from flowalign.planning.tiny_pipelines import DATA, PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.settings import Snapshot
from flowalign.policies.snapshots import Snapshots
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from flowalign.training import Trainer
from flowalign.training.memory import check_precision, make_optimizer, out_of_memory
from samplers import All, flow_sde
from tests.flowalign.small_run import small_run

CUDA = torch.device("cuda", 0)
FEWER = [
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "rollout.steps=3",
    "rollout.sigmas=[1.0, 0.6, 0.3]",
]


def trainer(folder: Path, *overrides: str, **more: Any) -> Trainer:
    return small_run("tiny_sd3/flow_grpo", folder, *FEWER, *overrides, **more)


def crowded(policy: DiffusersPolicy, most: int) -> None:
    """As on a device that holds so many samples."""

    def check(module: Any, args: Any, kwargs: Any) -> None:
        if len((*args, *kwargs.values())[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    policy.denoiser.register_forward_pre_hook(check, with_kwargs=True)


def test_batches_are_halved_until_they_fit_and_the_update_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = trainer(tmp_path / "own", "training.group_size=16")
    own.train()
    small = trainer(tmp_path / "small", "training.group_size=16")
    crowded(small.policy, 8)
    with caplog.at_level(logging.WARNING):
        small.train()
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    tried = [("rollout.batch_size", size) for size in (64, 32, 16)]
    tried += [("training.micro_batch_size", size) for size in (64, 32, 16)]
    assert told == [f"out of memory with {name} {size}; going on with {size // 2}" for name, size in tried]
    mine, theirs = small.metrics.read()[0], own.metrics.read()[0]
    for name in ("reward/mean", "policy/loss", "policy/gradient_norm"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)


def test_what_to_lower_is_told_in_order(tmp_path: Path) -> None:
    small = trainer(tmp_path)
    crowded(small.policy, 0)
    with pytest.raises(FlowalignError) as caught:
        small.train()
    told = str(caught.value)
    # batches have been halved to 1 already where it ran out
    assert "rollout.batch_size" not in told
    ways = ["gradient_checkpointing: true", "offload_vae: true", "tile_vae: true", "fsdp2.yaml", "base_bits: 4"]
    places = [told.index(way) for way in ways]
    assert places == sorted(places) and "optimizer.bits" not in told
    full = load(recipe("tiny_sd3/flow_grpo"), ["model.lora=null", "model.offload_vae=true"])
    told = out_of_memory(full, 2)
    assert "optimizer.bits: 8" in told and "offload_vae" not in told and "not halved" in told


def test_a_precision_that_the_device_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    with pytest.raises(ConfigError, match="model.dtype: Tesla T4 has no bfloat16 arithmetic; float16 or float32 works"):
        check_precision("bfloat16", CUDA)
    check_precision("float16", CUDA)
    check_precision("bfloat16", torch.device("cpu"))


def test_the_vae_visits_tiles_and_slices(tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    plain, sparing = tiny_policy(), tiny_policy()
    model = load(recipe("tiny_sd3/flow_grpo"), ["model.offload_vae=true", "model.slice_vae=true"]).model
    sparing.save_memory(model)
    assert sparing.pipeline.vae.use_slicing and not sparing.pipeline.vae.use_tiling
    calls: list[str] = []
    hook = sparing.pipeline.vae._hf_hook
    came, left = hook.pre_forward, sparing._vae_visit.offload
    hook.pre_forward = lambda *args, **kwargs: (calls.append("comes"), came(*args, **kwargs))[1]
    sparing._vae_visit.offload = lambda: (calls.append("leaves"), left())[1]
    final = plain.sample(["a red circle", "a blue square"], [1, 2], steps=2).trajectory.final
    for mine, theirs in zip(sparing.decode_latents(final), plain.decode_latents(final), strict=True):
        # a picture decoded alone may round to the next of 256 levels
        assert np.abs(np.asarray(mine, dtype=int) - np.asarray(theirs)).max() <= 1
    assert calls == ["comes", "leaves"]


def test_compiled_blocks_give_the_same_transitions_and_train(tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    plain, compiled = tiny_policy(), tiny_policy()
    for policy in (plain, compiled):
        torch.manual_seed(0)
        policy.add_lora(2, 4)
        policy.checkpoint_gradients()
    compiled.compile(backend="eager")
    settings = {"steps": 3, "kernel": flow_sde, "eta": All().etas(3, 0.7, 0, 0)}
    made = [policy.sample(["a red circle"] * 2, [1, 2], **settings) for policy in (plain, compiled)]
    torch.testing.assert_close(made[1].trajectory.final, made[0].trajectory.final, atol=1e-5, rtol=1e-5)
    for policy, rollout in zip((plain, compiled), made, strict=True):
        policy.velocity(rollout, torch.tensor([0, 1]), torch.tensor([0, 1])).square().mean().backward()
    for mine, theirs in zip(compiled.trainable().values(), plain.trainable().values(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_all_kinds_of_blocks_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """SD3.5's three: of two attentions, of one, and the last, each with and without gradients and adapters."""
    graphs = 0

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    # its first layer has two attentions
    monkeypatch.setitem(DATA["parts"]["sd3_transformer"], "num_layers", 3)
    policy = DiffusersPolicy(build("sd35"), encode_options={"max_sequence_length": 20})
    policy.add_lora(2, 4)
    policy.compile(backend=counted)
    rollout = policy.sample(["a red circle"], steps=2, height=8, width=8)
    rows = torch.zeros(1, dtype=torch.long)

    def every_way() -> None:
        for weights in (contextlib.nullcontext, policy.reference):
            for gradients in (torch.no_grad, torch.enable_grad):
                with weights(), gradients():
                    policy.velocity(rollout, rows, rows)

    every_way()
    assert graphs == 3 * 2 * 2
    every_way()
    assert graphs == 3 * 2 * 2


def test_float32_products_are_tf32_unless_they_shall_not_be(tmp_path: Path) -> None:
    for wanted in (True, False):
        trainer(tmp_path / str(wanted), f"model.tf32={str(wanted).lower()}")
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is wanted


def test_cudnns_attention_is_only_taken_by_name(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    trainer(tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_quantised_weights_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can")
    with pytest.raises(ConfigError, match="model.base_bits: bitsandbytes needs a GPU"):
        trainer(tmp_path, "model.base_bits=4")
    with pytest.raises(ConfigError, match="model.base_bits: quantised weights cannot be trained"):
        trainer(tmp_path, "model.base_bits=4", "model.lora=null")


def test_moments_and_copies_of_the_weights_on_the_host_change_no_number(tmp_path: Path) -> None:
    """Of a run that is cut off and goes on, with an average and a snapshot that is neither copied nor frozen."""
    more = ["training.ema_decay=0.9", "training.snapshots={slow: {decay: 0.5}}", "training.iterations=2"]
    offloaded = ["training.optimizer.offload=true", "training.offload_copies=true"]
    for name, overrides in (("device", more), ("host", more + offloaded)):
        trainer(tmp_path / name, *overrides, "training.iterations=1", "training.checkpoint_every=1").train()
        trainer(tmp_path / name, *overrides, "training.checkpoint_every=1", resume=True).train()
    folders = [tmp_path / name / "run" / "checkpoints" / "checkpoint-000002" for name in ("device", "host")]
    for part in ("trainable", "optimizer", "ema", "snapshot_slow"):
        mine, theirs = (load_file(folder / f"{part}.safetensors") for folder in folders)
        assert mine.keys() == theirs.keys() and mine
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (part, key)


def test_moments_and_copies_of_the_weights_are_on_the_host_between_their_uses() -> None:
    settings = load(recipe("tiny_sd3/flow_grpo"), ["training.optimizer.offload=true"]).training.optimizer
    kept = Snapshot(decay=0.5)
    with FakeDevice() as device:
        weights = {name: torch.nn.Parameter(torch.zeros(256, 256, device=DEVICE)) for name in ("a", "b")}
        for parameter in weights.values():
            parameter.grad = torch.zeros_like(parameter)
        before = device.live
        optimizer = make_optimizer([list(weights.values())], settings, DEVICE)
        snapshots = Snapshots(weights, {"slow": kept}, host=True)
        device.peak = device.live
        for _ in range(2):
            optimizer.step()
            snapshots.follow("iteration", 1, 1)
            with snapshots.use("slow"):
                pass
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert {value.device.type for value in [*moments, *snapshots.weights["slow"]]} == {"cpu"}
        assert len(moments) == 4 and device.live == before
        # one parameter's moments at a time, and what AdamW needs beside them
        assert device.peak - before < 6 * 256 * 256 * 4
    whole = make_optimizer([[torch.nn.Parameter(torch.zeros(2))]], settings.model_copy(update={"offload": False}), CUDA)
    assert type(whole) is torch.optim.AdamW


def test_text_encoders_that_stay_off_the_device_give_the_same_embeddings() -> None:
    tiny = PIPELINES["sd35"]
    plain = DiffusersPolicy(build("sd35"), "cpu", tiny.encode)
    made = plain.encoder.arguments(["a red circle"], [""], 3.0)
    with FakeDevice():
        policy = DiffusersPolicy(build("sd35"), DEVICE, tiny.encode)
        policy.save_memory(load(recipe("tiny_sd3/flow_grpo"), ["model.offload_text=true"]).model)
        # what comes to a device that has no values could not be told apart from anything else
        moved = policy.encoder.arguments(["a red circle"], [""], 3.0)
    assert {name: value.device for name, value in moved.items()} == dict.fromkeys(made, DEVICE)
    assert policy.encoder.embeddings.keys() == plain.encoder.embeddings.keys()
    for key, own in plain.encoder.embeddings.items():
        for name, value in policy.encoder.embeddings[key].items():
            assert torch.equal(value, own[name])


def test_fp8_is_refused_without_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.base_bits: fp8 needs torchao: pip install 'flowalign\[torchao\]'"):
        trainer(tmp_path, "model.base_bits=fp8")


def test_a_lora_trains_on_weights_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    run = trainer(tmp_path, "model.base_bits=fp8", "model.dtype=bfloat16")
    frozen = run.policy.network.transformer_blocks[0].attn.to_q.base_layer.weight
    assert frozen.qdata.dtype == torch.float8_e4m3fn
    run.train()
    assert run.metrics.read()[0]["policy/gradient_norm"] > 0 and (run.folder / "lora").is_dir()


def test_8_bit_moments_go_on_after_a_checkpoint() -> None:
    settings = load(recipe("tiny_sd3/flow_grpo"), ["training.optimizer.bits=8"]).training.optimizer

    def train(steps: range, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    start = torch.randn(128, 64)
    whole = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer([[whole]], settings, torch.device("cpu"))
    train(range(2), whole, optimizer)
    resumed = torch.nn.Parameter(whole.detach().clone())
    again = make_optimizer([[resumed]], settings, torch.device("cpu"))
    tensors, rest = optimizer_tensors(optimizer.state_dict())
    assert any(value.dtype == torch.uint8 for value in tensors.values())
    again.load_state_dict(optimizer_state(tensors, rest))
    train(range(2, 4), whole, optimizer)
    train(range(2, 4), resumed, again)
    assert torch.equal(whole, resumed)


def test_8_bit_moments_without_bitsandbytes_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    settings = load(recipe("tiny_sd3/flow_grpo"), ["training.optimizer.bits=8"]).training.optimizer
    with pytest.raises(ConfigError, match="pip install"):
        make_optimizer([[torch.nn.Parameter(torch.zeros(1))]], settings, torch.device("cpu"))


def test_weights_in_float32_are_computed_under_autocast(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.autocast: weights in bfloat16 are computed in it"):
        load(recipe("tiny_sd3/flow_grpo"), ["model.dtype=bfloat16", "model.autocast=bfloat16"])
    run = trainer(tmp_path, "model.autocast=bfloat16")
    policy = run.policy
    assert {parameter.dtype for parameter in policy.network.parameters()} == {torch.float32}
    assert policy.compute_dtype == torch.bfloat16
    seen = []
    linear = next(module for module in policy.network.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    assert run.iterate()["policy/gradient_norm"] > 0
    assert set(seen) == {torch.bfloat16}
