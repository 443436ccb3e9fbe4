"""A reward server that does everything wrong: `python faulty_server.py PORT FAULT`.

Faults: garbage, count (one value, however many samples), hang (never answers), drip (a byte now and then),
drip_headers (the same before the body), hide (503).
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, FAULT = int(sys.argv[1]), sys.argv[2]
ANSWERS = {
    "garbage": (200, b"<html>not a score</html>"),
    "count": (200, json.dumps({"value": [0.5], "parts": {}}).encode()),
    "hide": (503, b'{"error": "try later"}'),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b'{"status": "ok"}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if FAULT == "hang":
            time.sleep(3600)
        if FAULT == "drip_headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while True:
                self.wfile.write(b"x")
                time.sleep(0.05)
        if FAULT == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                time.sleep(0.05)
        self.answer(*ANSWERS[FAULT])

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
