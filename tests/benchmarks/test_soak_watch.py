"""What watches a soak from a process of its own."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.soak.watch import HealthWatch


class _Healthy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = threading.Semaphore(0)

    def do_GET(self) -> None:
        self.asked.release()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
def test_a_watch_tells_what_it_saw_and_is_out_of_reach_of_ctrl_c() -> None:
    with HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with HealthWatch(server.server_port) as watch:
            assert os.getsid(watch._process.pid) != os.getsid(0)
            for _ in range(20):
                assert _Healthy.asked.acquire(timeout=30)
        server.shutdown()
    assert watch.seen.failures == []
    assert watch.seen.milliseconds and watch.seen.late_ms
    assert watch._process.returncode == 0
