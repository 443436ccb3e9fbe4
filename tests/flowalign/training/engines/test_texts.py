"""Texts drawn by servers over real sockets: the numbers of a run without them, whatever dies or lies."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.config import load, recipe
from flowalign.errors import ConfigError, FlowalignError
from flowalign.training import Trainer
from flowalign.training.engines.texts import TextServers
from tests.flowalign.small_run import SMALL, small_run
from tests.flowalign.training.engines.text_server import TextServer, serve
from tests.flowalign.training.processes import FORKS, free_port, together

LORA = "model.lora={rank: 4, alpha: 8}"
STEPS = ["training.iterations=3", "training.optimizer.learning_rate=1e-3", "training.group_size=4"]
REAL = os.environ.get("FLOWALIGN_VLLM")
"""Address of a vLLM server of the tiny language model, started as docs/text.md says, for the tests with a real one."""


@contextmanager
def serving(**settings: Any) -> Iterator[TextServer]:
    """A server in a thread of this process."""
    server = TextServer(**settings)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def process(port: int, **settings: Any) -> Iterator[Any]:
    """A server in a process of its own, once it answers."""
    arguments = {"model": "tiny_lm", "kind": "vllm", "fault": None} | settings
    started = FORKS.Process(target=serve, args=(*arguments.values(), port), daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()


def engine(kind: str, *urls: str, **settings: Any) -> str:
    return f"rollout.engine={json.dumps({'name': kind, 'url': list(urls), 'timeout': 20, 'patience': 60} | settings)}"


def measured(trainer: Trainer) -> list[dict[str, float]]:
    """The metrics of a run's iterations that do not depend on what sampled."""
    left_out = ("seconds/", "engine/", "text/entropy")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in trainer.metrics.read()]


def same(one: Trainer, other: Trainer, tolerance: float = 1e-6) -> None:
    """Assert that two runs have the same metrics and weights."""
    for row, twin in zip(measured(one), measured(other), strict=True):
        assert row == pytest.approx(twin, abs=tolerance)
    for weight, twin in zip(one.policy.trainable().values(), other.policy.trainable().values(), strict=True):
        torch.testing.assert_close(weight, twin, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Trainer]:
    """Runs without servers, with LoRA and of all weights."""
    runs = {}
    for lora in (True, False):
        folder = tmp_path_factory.mktemp("plain")
        runs[lora] = small_run("tiny_lm/grpo", folder, "training.old_log_prob=replayed", *STEPS, *[LORA] * lora)
        runs[lora].train()
    return runs


@pytest.mark.parametrize(("kind", "lora"), [("vllm", True), ("vllm", False), ("sglang", True), ("sglang", False)])
def test_a_run_through_a_server_is_the_run_without(
    kind: str, lora: bool, plain: dict[bool, Trainer], tmp_path: Path
) -> None:
    with serving(kind=kind) as server:
        run = small_run("tiny_lm/grpo", tmp_path, engine(kind, f"{server.url}/v1"), *STEPS, *[LORA] * lora)
        run.train()
        # adapters are forgotten at the end, here and there
        assert not server.texts.adapters and not list((tmp_path / "run" / "engine").iterdir())
    same(run, plain[lora])
    for row in run.metrics.read():
        assert row["engine/lost"] == row["engine/failed"] == row["engine/staleness"] == 0
        assert 0 < row["engine/bytes_sent"] < 1000 and 0 < row["engine/bytes"] < 2000


def test_a_share_of_failing_requests_changes_no_number(plain: dict[bool, Trainer], tmp_path: Path) -> None:
    with serving(fault="errors") as server:
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", server.url), *STEPS, LORA)
        run.train()
    same(run, plain[True])
    assert sum(row["engine/failed"] for row in run.metrics.read()) >= 1


def wait_for(urls: list[str]) -> None:
    """Wait for processes to answer."""
    for url in urls:
        for _ in range(600):
            try:
                httpx2.get(f"{url}/v1/models", timeout=5)
                break
            except httpx2.HTTPError:
                time.sleep(0.1)


@pytest.mark.parametrize("lora", [True, False])
def test_a_server_that_is_killed_and_started_again_changes_no_number(
    lora: bool, plain: dict[bool, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with process(ports[0]) as first, process(ports[1]), ExitStack() as later:
        wait_for(urls)
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", *urls), *STEPS, *[LORA] * lora)
        begin, killed = TextServers.generate, []

        def generate(self: TextServers, parts: Any, published: Any) -> Any:
            tasks = begin(self, parts, published)
            if parts[0].iteration == 1 and not killed:
                # requests are under way
                killed.append(os.kill(first.pid, signal.SIGKILL))
                later.enter_context(process(ports[0]))
            if parts[0].iteration == 2:
                wait_for(urls)
            return tasks

        monkeypatch.setattr(TextServers, "generate", generate)
        run.train()
    same(run, plain[lora])
    assert sum(row["engine/lost"] for row in run.metrics.read()) >= 1


def test_weights_that_a_server_lost_unnoticed_are_loaded_again(
    plain: dict[bool, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", server.url), *STEPS)
        generate = TextServers.generate

        def lost(self: TextServers, parts: Any, published: Any) -> Any:
            tasks = generate(self, parts, published)
            if parts[0].iteration == 1:
                for future in tasks[0].drawn:
                    future.result()
                server.texts.version = "default"
            return tasks

        monkeypatch.setattr(TextServers, "generate", lost)
        run.train()
    same(run, plain[False])
    assert [row["engine/lost"] for row in run.metrics.read()] == [0, 1, 0]


@pytest.mark.slow
def test_two_learners_have_the_numbers_of_two_without_servers(tmp_path: Path) -> None:
    with serving() as one, serving() as other:
        for name, changes in (
            ("plain", ["training.old_log_prob=replayed"]),
            ("served", [engine("vllm", one.url, other.url)]),
        ):
            config = load(recipe("tiny_lm/grpo"), [*SMALL, *STEPS, LORA, f"output={tmp_path / name}", *changes])
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
            (tmp_path / name / "launch.yaml").write_text("{}")
        together(2, tmp_path / "plain", tmp_path / "served")
    made, expected = (load_file(tmp_path / name / "run/lora/adapter_model.safetensors") for name in ("served", "plain"))
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, atol=1e-6, rtol=0)
    assert any(bool(value.any()) for key, value in made.items() if "lora_B" in key)


def test_texts_drawn_ahead_have_the_age_that_was_asked_for(tmp_path: Path) -> None:
    changes = [*STEPS, LORA, "algorithm.off_policy={level: token}", "rollout.overlap=2"]
    with serving() as server:
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", server.url, staleness=1), *changes)
        run.train()
    assert [row["engine/staleness"] for row in run.metrics.read()] == [0.0, 1.0, 1.0]


FAULTS = {
    "raw": ("rollout.temperature=0.7", r"before rollout's temperature.*--logprobs-mode processed_logprobs"),
    "base": ("training.iterations=3", "they are of the start weights"),
    "seed": ("name=run", "draws other texts for the same seeds"),
    "greedy": ("rollout.temperature=2", "draws the same text for all seeds of a prompt"),
    "no_logprobs": ("name=run", "ignores logprobs"),
    "no_ids": ("name=run", "ignores return_token_ids"),
    "cut": ("name=run", r"stops after 1 of 5 tokens without an end token \(finish_reason 'length'\)"),
    "ends": ("name=run", "ignores stop_token_ids"),
    "prompt": ("name=run", "changed or cut the prompt"),
    "nan": ("name=run", "no finite number"),
    "long": ("name=run", "6 tokens, and at most 5 were asked for"),
    "garbage": ("name=run", "no completion of one text"),
    "huge": ("name=run", "longer than .* bytes"),
    "hang": ("name=run", "no answer for 1 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_ignores_what_it_is_asked_ends_the_run_in_one_line(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    # the start adapter changes nothing: a server that ignores adapters shows it once weights have moved
    steps = ["training.iterations=1", "training.group_size=4", "training.optimizer.learning_rate=0.05"]
    limits = {"timeout": 1.0, "patience": 1.0} if fault == "hang" else {"retries": 1}
    with serving(fault=fault) as server:
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", server.url, **limits), *steps, LORA, change)
        with pytest.raises(FlowalignError, match=message) as raised:
            run.train()
    assert "\n" not in str(raised.value) and "rollout.engine" in str(raised.value)
    # before the first update, or before the first that would learn from such texts
    assert len(run.metrics.read()) == (1 if fault == "base" else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.engine={name: vllm, url: 'http://127.0.0.1:9'}"], "no server answers: .*vllm serve MODEL"),
        (["rollout.engine={name: sglang, url: 'http://127.0.0.1:9'}"], "no server answers: .*sglang.launch_server"),
        (["rollout.engine={name: vllm, url: 'URL', model: other}"], "URL has no 'other', it has tiny_lm"),
        (["rollout.engine={name: vllm, url: 'URL'}", "rollout.max_new_tokens=32"], "reads 32 tokens"),
        (["rollout.engine={name: vllm, url: '127.0.0.1:8000'}"], "is no address"),
        (["rollout.engine={name: vllm, url: 'URL', token_variable: NO_SUCH_KEY}"], "no 'NO_SUCH_KEY'"),
        (["rollout.engine={name: vllm, uri: 'URL'}"], "rollout.engine"),
        (["rollout.engine={name: sglang}"], "rollout.engine.url"),
        (["rollout.engine={name: vllm, url: 'URL'}", "rollout.temperature=3"], "vllm takes 0.01 to 2"),
        (
            ["rollout.engine={name: vllm, url: 'URL'}", "rollout.min_p=0.1", "rollout.top_p=0.9"],
            "takes it before top_p",
        ),
        (["rollout.engine={name: sglang, url: 'URL'}", "rollout.top_p=0.9"], "temperature alone works"),
        (["rollout.engine={name: vllm, url: 'URL'}", "rollout.weights=reference"], "get the trained weights"),
        (["rollout.engine={name: vllm, url: 'URL'}", "algorithm.entropy_share=0.5"], "needs entropies"),
        (["rollout.engine={name: vllm, url: 'URL', staleness: 1}", "algorithm.off_policy={}"], "one set of whole"),
        (["rollout.engine={name: vllm, url: 'URL', staleness: 1}", LORA], "algorithm.off_policy"),
        (["rollout.engine={name: vllm, url: 'URL'}", "environment={name: higher_lower}"], "turns are sampled by"),
        (["rollout.engine={name: vllm, url: 'URL'}", "rollout.workers={count: 1}"], "samples already"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_the_first_update(
    server: TextServer, changes: list[str], message: str, tmp_path: Path
) -> None:
    changes = [change.replace("URL", server.url) for change in changes]
    with pytest.raises(ConfigError, match=message.replace("URL", server.url)) as raised:
        small_run("tiny_lm/grpo", tmp_path, *changes)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def server() -> Iterator[TextServer]:
    with serving() as server:
        yield server


def test_methods_that_sample_otherwise_are_refused(server: TextServer) -> None:
    for name in ("prefix_rft", "visurf"):
        with pytest.raises(ConfigError, match=f"'{name}' asks more of sampling"):
            load(recipe(f"tiny_lm/{name}"), [engine("vllm", server.url)]).check(1)


@pytest.mark.skipif(REAL is None, reason="no vLLM server of the tiny language model (FLOWALIGN_VLLM, docs/text.md)")
def test_a_real_server_of_vllm_draws_what_the_policy_would(tmp_path: Path) -> None:
    assert REAL is not None
    run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", REAL), *STEPS, LORA)
    run.train()
    rows = run.metrics.read()
    assert len(rows) == 3 and all(row["policy/mismatch"] < 1e-5 for row in rows)
    for cut in ("rollout.top_p=0.9", "rollout.min_p=0.1"):
        changes = [*STEPS, LORA, "rollout.temperature=0.7", cut, "name=cut"]
        run = small_run("tiny_lm/grpo", tmp_path, engine("vllm", REAL), *changes)
        run.experience()
        run.engine.close()
