"""Served rewards against the same reward in process, with real server processes on loopback and their faults."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save
from starlette.testclient import TestClient as AnyClient

from rewards import FunctionReward, RewardError, Scores, Spec, score
from rewards.compose import ScheduledSum
from rewards.remote import RemoteReward, _read_scores
from rewards.server import RewardServer, serve
from rewards.shapes import draw, heldout_requests, sample_requests
from rewards.shapes.reward import ShapesReward
from rewards.wire import JSON, SAFETENSORS, decode, encode

FOLDER = Path(__file__).parent


def TestClient(app, **settings):
    """A client that knows the server by its address."""
    return AnyClient(app, base_url="http://127.0.0.1:8300", **settings)


ROOT = FOLDER.parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(port: int, *settings: str, script: str = "served_reward.py") -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(FOLDER / script), str(port), *settings], env=environment)


@contextmanager
def serving(*settings: str, script: str = "served_reward.py") -> Iterator[str]:
    """A server process; its address, once it answers."""
    port = free_port()
    process = start(port, *settings, script=script)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(port: int) -> None:
    for _ in range(1200):
        try:
            assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).json() == {"status": "ok"}
            return
        except httpx2.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def samples(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    requests = sample_requests(heldout_requests(), count, rng)
    images = [Image.fromarray(draw(requests[i - i % 2], rng)) for i in range(count)]
    return images, [request.prompt for request in requests], [{"category": r.category} for r in requests]


@pytest.mark.parametrize("settings", [{}, {"images": "png"}, {"batch_size": 5}])
def test_same_scores_as_in_process(url, settings):
    here, there = ShapesReward()(*samples(32)), score(RemoteReward(url, **settings), *samples(32))
    assert torch.equal(here.value, there.value)
    assert there.parts.keys() == here.parts.keys()
    for name, values in here.parts.items():  # some are NaN
        torch.testing.assert_close(there.parts[name], values, rtol=0, atol=0, equal_nan=True)
    assert 0 < here.value.mean() < 1


def test_spec_comes_from_the_server(url):
    assert RemoteReward(url).spec == Spec(off_device=True)


def test_metrics_and_version(url):
    score(RemoteReward(url), *samples(3))
    lines = dict(line.split() for line in httpx2.get(f"{url}/metrics").text.splitlines())
    assert float(lines["flowalign_reward_samples_total"]) >= 3
    assert float(lines["flowalign_reward_queue_requests"]) == 0
    version = httpx2.get(f"{url}/version").json()
    assert version["reward"] == "shapes" and "torch" in version["versions"]


def test_errors_of_the_reward_arrive_at_once(url):
    begin = time.monotonic()
    images, prompts, metadata = samples(2)
    with pytest.raises(RewardError, match="is not a shapes prompt"):
        # the served reward's own complaint, not this end's
        RemoteReward(url, patience=30)(images, ["a cat", prompts[1]], metadata)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("encoding", ["safetensors", "png"])
def test_wire_keeps_everything(encoding):
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    mask = Image.fromarray(rng.integers(0, 256, (4, 3), dtype=np.uint8))
    alpha = Image.fromarray(rng.integers(0, 256, (2, 2, 4), dtype=np.uint8))
    records = [{"reference": mask, "n": 3, "words": ["ü", None]}, {"more": [alpha, rgb]}]
    images, prompts, metadata = decode(*encode([rgb, [rgb, mask]], ["é", "b"], records, encoding))
    assert prompts == ["é", "b"] and metadata[0]["words"] == ["ü", None] and metadata[0]["n"] == 3
    pairs = [(images[0], rgb), (images[1][0], rgb), (images[1][1], mask)]
    pairs += [(metadata[0]["reference"], mask), (metadata[1]["more"][0], alpha)]
    for got, sent in pairs:
        assert got.mode == sent.mode and np.array_equal(np.asarray(got), np.asarray(sent))


def test_metadata_that_cannot_be_sent_is_an_error(url):
    images, prompts, _ = samples(1)
    with pytest.raises(RewardError, match="cannot be sent"):
        RemoteReward(url)(images, prompts, [{"object": object()}])


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\x80\x04\x95pickle", "application/x-safetensors"),
        (b"\x80\x04\x95pickle", "application/json"),
        (b"[]", "application/json"),
        (b'{"samples": [{"$png": "xx"}], "prompts": ["a"], "metadata": [{}]}', "application/json"),
        (b'{"samples": [{"$image": 3}], "prompts": ["a"], "metadata": [{}]}', "application/json"),
        (b'{"samples": [], "prompts": ["a"], "metadata": []}', "application/json"),
        (b"", ""),
    ],
)
def test_malformed_requests_are_refused(body, kind):
    with TestClient(RewardServer(ShapesReward()).app) as client:
        answer = client.post("/score", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 400 and "error" in answer.json()
        assert client.get("/health").status_code == 200


def test_token():
    with TestClient(RewardServer(ShapesReward(), token="secret").app) as client:
        body, kind = encode(*samples(1), "safetensors")
        headers = {"Content-Type": kind}
        assert client.post("/score", content=body, headers=headers).status_code == 401
        assert client.get("/metrics").status_code == client.get("/version").status_code == 401
        assert client.get("/health").status_code == 200
        headers["Authorization"] = "Bearer secret"
        assert client.post("/score", content=body, headers=headers).status_code == 200


def test_token_comes_from_the_environment(monkeypatch):
    with pytest.raises(ValueError, match="'NO_TOKEN'.*not set"):
        RemoteReward("http://127.0.0.1:1", token_variable="NO_TOKEN")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    reward = RemoteReward("http://127.0.0.1:1", token_variable="SOME_TOKEN")
    assert reward.asker.client.headers["authorization"] == "Bearer secret"


class Recorder:
    """Notes the size of every call; scores a prompt's length."""

    name = "recorder"

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.go = threading.Event()

    def __call__(self, samples, prompts, metadata):
        self.sizes.append(len(samples))
        self.go.wait(30)
        if "bad" in prompts:
            raise RewardError("a bad prompt")
        return Scores(torch.tensor([float(len(prompt)) for prompt in prompts]))


def test_waiting_requests_are_merged_and_a_bad_one_fails_alone():
    reward = Recorder()
    image = Image.new("RGB", (2, 2))
    answers = {}
    with TestClient(RewardServer(reward, merge=8).app) as client:

        def ask(prompt: str) -> None:
            body, kind = encode([image, image], [prompt, prompt], [{}, {}], "safetensors")
            answers[prompt] = client.post("/score", content=body, headers={"Content-Type": kind})

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("a", "bb", "ccc", "bad")]
        threads[0].start()
        while not reward.sizes:  # the first is being scored; the others queue up
            time.sleep(0.01)
        for thread in threads[1:]:
            thread.start()
        while "queue_requests 3" not in client.get("/metrics").text:
            time.sleep(0.01)
        reward.go.set()
        for thread in threads:
            thread.join()
    assert reward.sizes == [2, 6, 2, 2, 2]  # the merged call fails, then each alone
    assert [answers[p].json()["value"] for p in ("a", "bb", "ccc")] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert answers["bad"].status_code == 422 and "a bad prompt" in answers["bad"].json()["error"]


class Weighted:
    """Scores with everything that scores can hold."""

    name = "weighted"
    scores = Scores(
        torch.tensor([1.0, 2.0]), {"part": torch.tensor([3.0, 4.0])}, [[(2, 1.0)], []], torch.tensor([0.5, 1])
    )

    def __call__(self, samples, prompts, metadata):
        return self.scores


def test_steps_and_weights_arrive():
    with TestClient(RewardServer(Weighted()).app) as client:
        body, kind = encode([Image.new("RGB", (2, 2))] * 2, ["a", "b"], [{}, {}], "png")
        there = _read_scores(client.post("/score", content=body, headers={"Content-Type": kind}))
    assert there.steps == Weighted.scores.steps and there.weight.tolist() == [0.5, 1]


def test_a_schedule_is_not_served():
    reward = ScheduledSum([FunctionReward(lambda images, prompts: [0.0], "zero")], [[(0.0, 1.0), (1.0, 0.0)]])
    with pytest.raises(ValueError, match="changes over training"):
        RewardServer(reward)


def test_groups_are_not_merged():
    reward = FunctionReward(lambda images, prompts: [0.0] * len(images), "grouped")
    reward.spec = Spec(kind="group")
    with pytest.raises(ValueError, match="looks at whole groups"):
        RewardServer(reward, merge=8)


def post(client, *request, images="safetensors", **headers):
    body, kind = encode(*request, images)
    return client.post("/score", content=body, headers={"Content-Type": kind, **headers})


class Bad:
    """Does what its prompt says."""

    name = "bad"

    def __init__(self):
        self.go = threading.Event()

    def __call__(self, samples, prompts, metadata):
        if prompts[0] == "exit":
            sys.exit(0)
        if prompts[0] == "hang":
            self.go.wait(60)
        value = torch.zeros(len(samples))
        return Scores(value, {"part": torch.zeros(3)} if prompts[0] == "shape" else {})


def test_a_request_that_fails_is_answered_and_the_next_one_scored():
    picture = Image.new("RGB", (2, 2))
    with TestClient(RewardServer(Bad()).app) as client:
        for prompt, why in (("shape", "returned 3 values of the part 'part' for 1 samples"), ("exit", "SystemExit")):
            answer = post(client, [picture], [prompt], [{}])
            assert answer.status_code == 422 and why in answer.json()["error"]
            assert post(client, [picture], ["good"], [{}]).json()["value"] == [0.0]
        assert client.get("/health").json() == {"status": "ok"}


def test_a_reward_that_hangs_is_cut_and_health_tells_when_too_many_do():
    reward, picture = Bad(), Image.new("RGB", (2, 2))
    with TestClient(RewardServer(reward, timeout=0.2).app) as client:
        for _ in range(2):
            answer = post(client, [picture], ["hang"], [{}])
            assert answer.status_code == 422 and "has not answered within 0.2 s" in answer.json()["error"]
            assert post(client, [picture], ["good"], [{}]).status_code == 200
        assert client.get("/health").status_code == 200
        assert post(client, [picture], ["hang"], [{}]).status_code == 422
        assert client.get("/health").status_code == post(client, [picture], ["good"], [{}]).status_code == 503
        reward.go.set()
        while client.get("/health").status_code == 503:
            time.sleep(0.01)
        assert post(client, [picture], ["good"], [{}]).status_code == 200


def bombs():
    picture = Image.new("RGB", (512, 512))
    repeated, kind = encode([picture], ["a"], [{}], "safetensors")
    many = b'{"samples":[' + b"[]," * 200_000 + b'1],"prompts":[],"metadata":[]}'
    yield "one picture many times", repeated.replace(b'[{"$image": 0}]', b"[" + b'{"$image":0},' * 99), kind
    yield "pictures", *encode([picture] * 12, ["a"] * 12, [{}] * 12, "png")
    yield "pictures in metadata", *encode([picture], ["a"], [{"more": [picture] * 12}], "png")
    yield "lists", many, JSON
    yield "lists in a header", (len(many)).to_bytes(8, "little") + many, SAFETENSORS
    yield "bytes", b" " * (9 << 20), JSON


@pytest.mark.parametrize(("body", "kind"), [pytest.param(*bomb[1:], id=bomb[0]) for bomb in bombs()])
def test_memory_is_counted_before_it_is_taken(body, kind):
    if b'"$image":0},' in body:  # the header counts the bytes of the text
        images = [{"$image": 0}] * 99
        tensors = {"0": np.zeros((512, 512, 3), np.uint8)}
        text = json.dumps({"samples": images, "prompts": ["a"] * 99, "metadata": [{}] * 99})
        body = save(tensors | {"request": np.frombuffer(text.encode(), dtype=np.uint8)})
    server = RewardServer(Bad(), memory=16)
    with TestClient(server.app) as client:
        answer = client.post("/score", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 413 and "batch_size" in answer.json()["error"]
        assert post(client, [Image.new("RGB", (512, 512))] * 4, ["good"] * 4, [{}] * 4).status_code == 200
    assert server.held == 0


def test_a_length_is_refused_before_the_body_is_read():
    with TestClient(RewardServer(Bad(), memory=16).app) as client:
        answer = client.post("/score", content=b"{}", headers={"Content-Length": str(10**12)})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        (2**60).to_bytes(8, "little") + b"{}",
        b"\x02",
        (75).to_bytes(8, "little") + b'{"request": {"dtype": "U8", "shape": [999999], "data_offsets": [0, 999999]}}',
        (67).to_bytes(8, "little") + b'{"request": {"dtype": "U8", "shape": [-1], "data_offsets": [4, 0]}}',
        (66).to_bytes(8, "little") + b'{"request": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}}',
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_safetensors_that_are_none(body):
    with pytest.raises(ValueError, match="not a request for a reward"):
        decode(body, SAFETENSORS)


@pytest.mark.parametrize("key", ["reference", "image"])
def test_pictures_of_metadata_are_sent_and_the_server_opens_no_file(tmp_path, key):
    class Wide:
        name = "wide"
        spec = Spec(frozenset({"image", "metadata"}))

        def __call__(self, samples, prompts, metadata):
            return Scores(torch.tensor([float(record[key].width) for record in metadata]))

    file = tmp_path / "picture.png"
    Image.new("RGB", (7, 2)).save(file)
    samples = [Image.new("RGB", (2, 2))], ["a"]
    with TestClient(RewardServer(Wide()).app) as client:
        for value in (str(file), [str(file)]):
            answer = post(client, *samples, [{key: value}])
            assert answer.status_code == 400 and "must be a picture" in answer.json()["error"]
        reward = RemoteReward("http://127.0.0.1:8300")
        reward.asker.client = client
        assert reward(*samples, [{key: str(file)}]).value.tolist() == [7.0]
    with pytest.raises(RewardError, match="cannot be sent.*none.png"):
        reward(*samples, [{key: str(tmp_path / "none.png")}])


def test_web_pages_are_refused():
    picture = Image.new("RGB", (2, 2))
    request = [picture], ["good"], [{}]
    with TestClient(RewardServer(Bad()).app) as client:
        assert post(client, *request, Host="evil.example").status_code == 403
        assert post(client, *request, Origin="http://evil.example").status_code == 403
        assert client.get("/version", headers={"Host": "evil.example:8300"}).status_code == 403
        for host in ("localhost:8300", "127.0.0.1", "[::1]:8300", "10.0.0.7:8300"):
            assert post(client, *request, Host=host).status_code == 200
    with TestClient(RewardServer(Bad(), token="secret").app) as client:  # no page has the token
        assert post(client, *request, Host="judges", Authorization="Bearer secret").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node1"])
def test_beyond_loopback_a_server_wants_a_token(host):
    with pytest.raises(ValueError, match="without a token"):
        serve(Bad(), host)


def test_an_empty_host_is_loopback(monkeypatch):
    seen = {}
    monkeypatch.setattr("rewards.server.uvicorn.run", lambda app, **settings: seen.update(settings))
    serve(Bad(), "")
    assert seen["host"] == "127.0.0.1" and seen["limit_concurrency"]


@pytest.mark.parametrize("url", ["127.0.0.1:8300", "judge:8300", "ftp://judge", "http://", "me:hunter2@judge:1"])
def test_a_url_without_a_scheme_is_refused_at_once(url):
    with pytest.raises(ValueError, match="must begin with http:// or https://") as caught:
        RemoteReward(url)
    assert "hunter2" not in str(caught.value)


def test_secrets_are_in_no_message(monkeypatch, caplog):
    reward = RemoteReward("http://me:hunter2@127.0.0.1:9/judge?key=hunter2", patience=0.1)
    with pytest.raises(RewardError, match="gave up on http://127.0.0.1:9/judge/version") as caught:
        _ = reward.spec
    assert "hunter2" not in str(caught.value) + caplog.text
    with pytest.raises(ValueError, match="must be the name of an environment variable") as wrong:
        RemoteReward("http://127.0.0.1:9", token_variable="sk-hunter2")
    assert "hunter2" not in str(wrong.value)


# Faults


def faulty(fault: str):
    return serving(fault, script="faulty_server.py")


def test_killed_and_restarted_server_is_waited_for():
    port = free_port()
    process = start(port)
    reward = RemoteReward(f"http://127.0.0.1:{port}", patience=120, timeout=60)
    wanted = [ShapesReward()(*samples(8, seed)).value for seed in range(6)]
    try:
        wait_for(port)
        found = [reward(*samples(8, seed)).value for seed in range(3)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        restart = threading.Timer(0.5, lambda: restarted.append(start(port)))
        restarted: list[subprocess.Popen] = []
        restart.start()
        found += [reward(*samples(8, seed)).value for seed in range(3, 6)]
        restart.join()
    finally:
        for child in (process, *restarted):
            child.kill()
            child.wait()
    assert all(torch.equal(here, there) for here, there in zip(wanted, found))


def test_slow_server_is_given_its_time():
    with serving("0.5") as url:
        assert torch.equal(RemoteReward(url, timeout=60)(*samples(4)).value, ShapesReward()(*samples(4)).value)


def test_garbage_is_an_error_soon():
    with faulty("garbage") as url, pytest.raises(RewardError, match=r"3 times .*<html>not a score</html>"):
        RemoteReward(url, patience=60)(*samples(4))


def test_wrong_count_is_an_error():
    with faulty("count") as url, pytest.raises(RewardError, match="returned 1 values for 4 samples"):
        RemoteReward(url)(*samples(4))


@pytest.mark.parametrize("fault", ["hang", "drip", "drip_headers", "hide"])
def test_server_that_never_scores_stops_the_run_after_the_stated_time(fault):
    with faulty(fault) as url:
        reward = RemoteReward(url, timeout=0.5, patience=1.0)
        begin = time.monotonic()
        with pytest.raises(RewardError, match=r"gave up on http.* after 1 s"):
            reward(*samples(2))
        assert 0.5 < time.monotonic() - begin < 1.5 + 8.0  # timeout + patience, and a busy machine


def test_server_that_is_not_there_stops_the_run_after_the_stated_time():
    begin = time.monotonic()
    with pytest.raises(RewardError, match="gave up on http://127.0.0.1:9/version after 1 s"):
        _ = RemoteReward("http://127.0.0.1:9", patience=1.0).spec
    assert time.monotonic() - begin < 1.0 + 8.0


def test_an_error_keeps_no_sample_in_memory():
    """Its frames hold what was scored, in circles that only the garbage collector frees."""
    seen = []

    class Failing:
        name, spec = "failing", Spec()

        def __call__(self, images, prompts, metadata):
            seen.extend(weakref.ref(image) for image in images)
            raise ValueError("no")

    gc.disable()
    try:
        with TestClient(RewardServer(Failing()).app) as client:
            assert post(client, [Image.new("RGB", (8, 8))], ["a"], [{}]).status_code == 422
            assert seen and all(picture() is None for picture in seen)
    finally:
        gc.enable()
