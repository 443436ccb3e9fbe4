"""Servers that are asked before they are ready."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flowalign.errors import FlowalignError
from flowalign.training.engines import servers
from flowalign.training.engines.servers import Servers


def test_a_server_that_warms_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT", 0.01)
    statuses = [200, 503, 503]

    class Warming(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop() if statuses else 503)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Warming) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        asked = Servers("rollout.engine", [url], timeout=5, retries=0, patience=0.1)
        asked.wait_until_warm(url)
        assert not statuses
        # no longer than the patience
        asked.wait_until_warm(url)
        with pytest.raises(FlowalignError, match="/health answers with status 503"):
            asked.call(url, "/health")
        asked.close()
        server.shutdown()
    # where nothing answers, the next call says so
    Servers("rollout.engine", [url], timeout=5, retries=0, patience=60).wait_until_warm("http://127.0.0.1:1")
