"""A server with the part of vLLM's interface that features.engine= uses, over a tiny target: real hidden states, and faults."""

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import safetensors.torch
import torch

from specdec.target import Target


class TinyEngine:
    """Serves `target` while it is used as a context manager. vLLM itself is tested in tests/scripts/test_engines.py.

    layers: hidden states that are written to `folder`, the last one before the final norm, as vLLM gives it
    spoil: changes an answer before it is sent: called with the request's number and {"answer", "tensors"}, either may become
        None: no file, or a connection that is cut
    """

    def __init__(self, target: Target, layers: list[int], folder: Path, *, port: int = 0):
        self.target, self.layers, self.folder = target, layers, folder
        self.port, self.spoil = port, lambda number, made: None
        self.numbers, self.guard = itertools.count(), threading.Lock()
        self.requests: list[dict] = []
        self.running, self.most = 0, 0  # requests that are under way now, and at most

    spoil: Callable[[int, dict], object]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "TinyEngine":
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def complete(self, body: dict) -> dict | None:
        with self.guard:
            number = next(self.numbers)
            self.requests.append(body)
            prompt, new = body["prompt"], []
            stop = body.get("stop_token_ids", [])
            while not new or (len(new) < body["max_tokens"] and new[-1] not in stop):
                states, final = self._read([*prompt, *new])
                new.append(int(self.target.logits(final[-1]).argmax()))
            tensors = {"token_ids": torch.tensor([*prompt, *new][:-1]), "hidden_states": states}
            path = self.folder / f"{number}.safetensors"
            finish = "stop" if new[-1] in stop else "length"
            answer = {"choices": [{"token_ids": new, "text": "", "finish_reason": finish}], "kv_transfer_params": {"hidden_states_path": str(path)}}  # fmt: skip
            made = {"answer": answer, "tensors": tensors, "about": {"layers": json.dumps(self.layers)}}
            self.spoil(number, made)
            if made["tensors"] is not None:
                safetensors.torch.save_file(
                    {name: value.contiguous() for name, value in made["tensors"].items()}, path, metadata=made["about"]
                )
            return made["answer"]

    @torch.no_grad()
    def _read(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """-> [t, layers, D], [t, D]"""
        before: list[torch.Tensor] = []
        hook = self.target.norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
        inner = tuple(layer for layer in self.layers if layer < self.target.num_layers)
        output = self.target.read(torch.tensor([tokens]), inner)
        hook.remove()
        states = torch.cat([output.features, before[0]], dim=-1)[0].unflatten(-1, (-1, self.target.width))
        return states, output.final[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply({"data": [{"id": engine.target.name, "max_model_len": 256}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.path.endswith("/v1/completions"):
                    self.reply({"error": {"message": "Not Found"}}, status=404)
                    return
                with engine.guard:
                    engine.running += 1
                    engine.most = max(engine.most, engine.running)
                answer = engine.complete(body)
                with engine.guard:
                    engine.running -= 1
                if answer is None:
                    self.close_connection = True
                else:
                    self.reply(answer)

            def reply(self, document: dict, status: int = 200) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        return Handler
