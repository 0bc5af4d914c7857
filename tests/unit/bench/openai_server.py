"""A server with OpenAI's completions API over real HTTP: one event a token, or several tokens an event, and faults on demand."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OpenAiServer:
    """Used as a context. `bodies` is what it was asked; `tokens_per_event`, `stop_after` and `broken` change what it answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.tokens_per_event = 1
        self.stop_after: int | None = None
        self.usage = True
        self.status = 200
        self.broken = ""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> OpenAiServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def events(self, wanted: int) -> list[dict[str, Any] | str]:
        made = wanted if self.stop_after is None else min(wanted, self.stop_after)
        choice = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
        events: list[dict[str, Any] | str] = [choice] * -(-made // self.tokens_per_event)
        # As llama.cpp and vLLM do: the reason to end comes in an event without text.
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.usage:
            events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": made}})
        return [*events, self.broken] if self.broken else events


def _handler(server: OpenAiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self._answer(200, "application/json", json.dumps({"data": [{"id": "some-model"}]}).encode())

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            if server.status != 200:
                self._answer(server.status, "text/plain", b"no room")
                return
            events = (event if isinstance(event, str) else json.dumps(event) for event in server.events(body["max_tokens"]))
            lines = [": ping", *(f"data: {event}" for event in events), "data: [DONE]"]
            self._answer(200, "text/event-stream", "".join(f"{line}\n\n" for line in lines).encode())

        def _answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
