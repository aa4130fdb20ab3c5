"""A scripted API server, for tests of what a client sends and of which answers it must handle."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

TOKEN = "secret-token"
POLL_S = 0.01
"""Interval at which the server looks for its end."""
JOBS = "/apis/paceline.dev/v1alpha1/namespaces/team/trainingjobs"
Answers = dict[tuple[str, str], tuple[int, Any] | list[tuple[int, Any]]]


class ScriptedServer:
    """An HTTP server with prepared answers by method and path.

    Of several answers each is given once and the last one from then on. All other paths give 404. A
    watch has the method WATCH.
    """

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.bodies: dict[tuple[str, str], list[Any]] = {}
        """Bodies that were received, by method and path."""
        self.headers: dict[tuple[str, str], list[dict[str, str]]] = {}
        """Headers of each request, by method and path."""
        self.hangs: set[str] = set()
        """Paths that are never answered."""
        self._closing = threading.Event()
        answers, bodies, hangs, closing = self.answers, self.bodies, self.hangs, self._closing
        headers = self.headers

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                headers.setdefault((self.command, path), []).append(dict(self.headers))
                if path in hangs:
                    closing.wait()
                    return
                method = "WATCH" if "watch=true" in query else self.command
                if sent:
                    bodies.setdefault((method, path), []).append(json.loads(sent))
                answer = answers.get((method, path), (404, "404 page not found"))
                if isinstance(answer, list):
                    answer = answer.pop(0) if len(answer) > 1 else answer[0]
                code, body = answer
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(POLL_S,), daemon=True)
        self._thread.start()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig of a user with a token, in the namespace `team` and context `here`."""
        context = {"cluster": "here", "user": "me", "namespace": "team"}
        config = {
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }
        path = folder / "config"
        path.write_text(yaml.safe_dump(config))
        return path

    def close(self) -> None:
        """Stop the server; requests that hang end."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def refuses(self, method: str, path: str, code: int, reason: str, message: str) -> None:
        """Prepare a refusal in the form of a Kubernetes Status."""
        body = {"kind": "Status", "code": code, "reason": reason, "message": message}
        self.answers[method, path] = code, body
