"""A small server that implements the part of the Hugging Face hub's protocol which an upload uses; it keeps the files.

with HubServer() as server:
    server.use_as_hub(monkeypatch)
"""

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class HubServer:
    """Attributes set its behaviour and may change while it runs."""

    token: str = "hf_right"
    role: str = "write"
    private: set[str] = field(default_factory=set)
    """Repositories that are private."""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each repository, by their paths."""
    broken: bool = False
    """Whether commits fail, as where the connection is lost after the files."""
    requests: list[str] = field(default_factory=list)

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                right = self.headers.get("Authorization") == f"Bearer {server.token}"
                path = self.path.partition("?")[0]
                with server._lock:
                    server.requests.append(f"{self.command} {path}")
                    status, answer = server.answer(f"{self.command} {path}", body, right)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format, *arguments):
                pass

        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def use_as_hub(self, patch: pytest.MonkeyPatch):
        """Make huggingface_hub use this server as the hub, with its token in the environment."""
        constants = {"ENDPOINT": self.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        for name, value in {**constants, "HF_TOKEN_PATH": "/no/token"}.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.setenv("HF_TOKEN", self.token)

    def answer(self, asked: str, body: bytes, right: bool) -> tuple[int, Any]:
        """Return the status and the JSON to send."""
        if stored := re.fullmatch(r"PUT /objects/(\w+)", asked):  # the URL is signed: no token
            self._objects[stored[1]] = body
            return 200, {}
        if not right:
            return 401, {"error": "Invalid credentials"}
        if asked == "GET /api/whoami-v2":
            return 200, {"name": "ada", "type": "user", "orgs": [], "auth": {"accessToken": {"role": self.role}}}
        if asked == "POST /api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if asked == "POST /api/repos/create":
            said = json.loads(body)
            repo = f"{said['organization'] or 'ada'}/{said['name']}"
            if repo not in self.repos and said.get("visibility") == "private":
                self.private.add(repo)
            known = repo in self.repos
            self.repos.setdefault(repo, {})
            return 409 if known else 200, {"url": f"{self.url}/{repo}"}
        if asked.endswith(".git/info/lfs/objects/batch"):
            upload = lambda one: {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}  # noqa: E731
            return 200, {"objects": [{**one, "actions": upload(one)} for one in json.loads(body)["objects"]]}
        of_repo = re.fullmatch(r"\w+ /api/models/(\w+/[\w.-]+)/?(\w*)(?:/main)?", asked)
        if of_repo is None or of_repo[1] not in self.repos:
            return 404, {"error": "Repository not found"}
        repo, files = of_repo[1], self.repos[of_repo[1]]
        match of_repo[2]:
            case "":
                return 200, {"id": repo, "private": repo in self.private}
            case "tree":
                return 200, [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files]
            case "preupload":
                modes = {True: "lfs", False: "regular"}
                named = [file["path"] for file in json.loads(body)["files"]]
                found = [{"path": path, "uploadMode": modes[path.endswith(".safetensors")]} for path in named]
                return 200, {"files": [{**one, "shouldIgnore": False} for one in found]}
            case "commit" if self.broken:
                return 400, {"error": "the disk of the hub is full"}
            case "commit":
                for line in map(json.loads, body.splitlines()):
                    self._commit(files, line["key"], line["value"])
                return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": "Not found"}

    def _commit(self, files: dict[str, bytes], kind: str, value: dict[str, Any]):
        match kind:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
