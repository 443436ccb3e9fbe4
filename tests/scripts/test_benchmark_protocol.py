"""The benchmark of the protocol sends what sglang sends: its own answers, packed again, are the same bytes."""

import importlib.util
from pathlib import Path

import msgpack
import pytest
import torch

from flowalign.training.engines.rollout_api import read, unpack
from flowalign.training.engines.servers import Servers
from tests.flowalign.training.engines.test_rollout_api import asked, fixture

SCRIPT = Path(__file__).parents[2] / "scripts/benchmark_protocol.py"


@pytest.mark.parametrize("kind", ["sde", "silent"])
def test_answers_go_through_it_as_they_are(kind: str) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_protocol", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    request, body, _ = fixture(kind)
    drawn = script.loaded(unpack(body))
    assert msgpack.packb(script.packed(drawn)) == body
    wanted = asked(request, content=b"this")
    with script.echo({b"this": drawn}) as address:
        servers = Servers("here", [address], timeout=10, retries=0, patience=10)
        _, sample = servers.ask(0, script.PATH, b"this", None, lambda answer: read(answer, wanted), wanted.most)
        servers.close()
    assert torch.equal(sample.states, read(body, wanted).states)
