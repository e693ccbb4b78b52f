"""A daemon that answers like zeusd on a Unix domain socket and notes what it is asked."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class FakeZeusd:
    """What it knows, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.tokens: list[str | None] = []
        self.status = 200
        self.discovery: Any = {
            "gpus": [
                {"id": 0, "name": "X", "pci_address": "0000:09:00.0"},
                {"id": 1, "name": "X", "pci_address": "0000:00:00.0"},
            ],
            "cpus": [],
            "enabled_api_groups": ["gpu-control", "gpu-read"],
            "auth_required": False,
        }


@contextlib.contextmanager
def serving(path: Path) -> Iterator[FakeZeusd]:
    """The daemon, listening on a socket file."""
    daemon = FakeZeusd()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, daemon.discovery)

        def do_POST(self) -> None:
            daemon.requests.append(self.path)
            daemon.tokens.append(self.headers.get("Authorization"))
            ok = daemon.status == 200
            self._answer(daemon.status, None if ok else {"errors": {"0": "NVML error: no"}})

        def _answer(self, status: int, values: Any) -> None:
            body = b"" if values is None else json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield daemon
        finally:
            server.shutdown()
            thread.join()
