"""A small server with a scripted model that implements the part of vLLM's protocol which jaxtune uses.

with CompletionServer(lambda prompt, seed: [prompt[-1] + 1, 2]) as server:
    complete(ServerPool([server.url]), "base", ...)
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[list[int], int], list[int]]
"""(prompt, seed) -> completion; the request's max_tokens and stop_token_ids cut it as they would a model's."""


@dataclass
class CompletionServer:
    """Attributes set its behaviour and may change while it runs; `requests` lists the requests it got, in order."""

    script: Script
    failures: int = 0
    """Requests that are answered with `failure` before one is served."""
    failure: int = 503
    updates: bool = True
    """Whether adapters can be loaded (VLLM_ALLOW_RUNTIME_LORA_UPDATING)."""
    token_ids: bool = True
    """Whether it knows return_token_ids."""
    log_probs: float | None = -1.5
    """The log-probability of every token; None: the server does not know them."""
    routed_experts: Callable[[list[int]], Any] | None = None
    """(tokens of a prompt and its completion) -> the field of a choice; None: it has none."""
    prompt_log_probs: Callable[[list[int], int], Any] | None = None
    """(prompt, most tokens) -> what vLLM says of each of its tokens; None: the server does not know it."""
    weights: Callable[[str], None] | None = lambda path: None
    """Is called with the folder of weights to load in place of those there are; None: not available, as on a vLLM
    without VLLM_SERVER_DEV_MODE."""
    busy: int = 0
    """Requests to forget prefixes that fail, because others use them."""
    key: str | None = None
    models: list[str] = field(default_factory=lambda: ["base"])
    adapters: dict[str, str] = field(default_factory=dict)
    """Path of each adapter that is loaded."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(*server.answer(self.path, {}, self.headers.get("Authorization")))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*server.answer(self.path, body, self.headers.get("Authorization")))

            def reply(self, status: int, answer: Any):
                text = answer if isinstance(answer, str | bytes) else json.dumps(answer)
                content = text.encode() if isinstance(text, str) else text
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format, *arguments):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self._lock = threading.Lock()
        self._http = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path: str, body: dict[str, Any], authorization: str | None) -> tuple[int, Any]:
        """Return the status and the body to send: text, bytes or JSON."""
        with self._lock:
            self.requests.append((path, body))
            if self.failures:
                self.failures -= 1
                return self.failure, _error("not now")
            if self.key is not None and authorization != f"Bearer {self.key}":
                return 401, {"error": "Unauthorized"}
            match path:
                case "/v1/models":
                    return 200, {"object": "list", "data": [{"id": name} for name in (*self.models, *self.adapters)]}
                case "/v1/completions":
                    return self._completions(body)
                case "/v1/load_lora_adapter" if self.updates:
                    if body["lora_name"] in self.adapters:
                        return 400, _error(f"The lora adapter '{body['lora_name']}' has already been loaded.")
                    self.adapters[body["lora_name"]] = body["lora_path"]
                    return 200, "Success: added."
                case "/v1/unload_lora_adapter" if self.updates:
                    if self.adapters.pop(body["lora_name"], None) is None:
                        return 404, _error(f"The lora adapter '{body['lora_name']}' cannot be found.")
                    return 200, "Success: removed."
                case "/collective_rpc" if self.weights is not None:
                    assert body["method"] == "reload_weights"
                    self.weights(body["kwargs"]["weights_path"])
                    return 200, {"results": [None]}
                case "/reset_prefix_cache" if self.weights is not None:
                    self.busy -= 1
                    return 200, {"success": self.busy < 0}
        return 404, {"detail": "Not Found"}

    def _completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "model" in body and body["model"] not in (*self.models, *self.adapters):
            return 404, _error(f"The model `{body['model']}` does not exist.")
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            tokens = self.script(prompt, body["seed"])[: body["max_tokens"]]
            stops = [place for place, token in enumerate(tokens) if token in body["stop_token_ids"]]
            choice = {"index": index, "text": "", "finish_reason": "stop" if stops else "length"}
            if self.token_ids and body.get("return_token_ids"):
                choice["token_ids"] = tokens[: stops[0] + 1] if stops else tokens
            if self.log_probs is not None and body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": [self.log_probs] * len(choice["token_ids"])}
            if self.prompt_log_probs is not None and body.get("prompt_logprobs"):
                choice["prompt_logprobs"] = self.prompt_log_probs(prompt, body["prompt_logprobs"])
            if self.routed_experts is not None:
                choice["routed_experts"] = self.routed_experts([*prompt, *choice["token_ids"]])
            choices.append(choice)
        return 200, {"object": "text_completion", "choices": choices}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError"}}
