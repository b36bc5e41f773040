"""A Hugging Face Hub on this machine, for processes whose HF_ENDPOINT is its address."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

REPO = "user/repo"


@contextlib.contextmanager
def serving(files: Mapping[str, Path], *, parts: bool = True, sent: list[int] | None = None) -> Iterator[str]:
    """The address of a hub whose only repository, `REPO`, holds `files`; any repository named gated is gated.

    Args:
        parts: It gives parts of files, if asked to.
        sent: Gets the number of bytes of each answer.
    """

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, headers, status, body = self.path.partition("?")[0], {}, 200, b""
            name = path.removeprefix(f"/{REPO}/resolve/main/")
            if path == f"/api/models/{REPO}":
                body = json.dumps({"id": REPO, "siblings": [{"rfilename": name} for name in files]}).encode()
                headers["Content-Type"] = "application/json"
            elif name in files:
                body = files[name].read_bytes()
                headers |= {"ETag": f'"{list(files).index(name):04}"', "X-Repo-Commit": "0" * 40}
                if parts and (wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
                    begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(body))
                    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
                    status, body = 206, body[begin:end]
            else:
                status = 401 if path.endswith("/gated") else 404
                headers["X-Error-Code"] = "GatedRepo" if path.endswith("/gated") else "RepoNotFound"
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if sent is not None:
                    sent.append(len(body))
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
