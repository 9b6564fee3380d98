"""A stand-in for the Hugging Face Hub: those parts of its HTTP interface that huggingface_hub uses for models, in
memory.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

import yaml

from tests.support.small_server import Quiet


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by name
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags

    def commit(self, branch: str, contents: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(contents))).encode()).hexdigest()
        self.commits[name] = contents
        self.refs[branch] = name
        return name


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code}


class Hub:
    """Serves while it is used as a context manager. tokens: user by token

    failing: the status that all requests get; damaged: names of files that are sent with a wrong last byte
    gated: names of repositories that only their owner may read; requests: method and path of each
    """

    def __init__(self, **tokens: str):
        self.tokens = tokens
        self.repositories: dict[str, Repository] = {}
        self.failing: int | None = None
        self.damaged: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[str] = []

    def __enter__(self) -> "Hub":
        self.server = Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    # What is asked: each returns status, headers and content

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, dict, object]:
        if self.failing:
            raise Refusal(self.failing, "out of order")
        user = self.tokens.get(token) if token else None
        if token and user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        for pattern, answer in (
            ("POST /api/repos/create", self.create),
            ("POST /api/validate-yaml", self.validate),
            (r"POST /api/models/(\w+/[\w.-]+)/preupload/(.+)", self.preupload),
            (r"POST /api/models/(\w+/[\w.-]+)/commit/(.+)", self.commit),
            (r"GET /api/models/(\w+/[\w.-]+)/tree/([^/]+)/(.+)", self.list_folder),
            (r"GET /api/models/(\w+/[\w.-]+)/tree/(.+)", self.tree),
            (r"GET /api/models/(\w+/[\w.-]+)/revision/(.+)", self.describe),
            (r"GET /api/models/(\w+/[\w.-]+)", self.describe),
            (r"(?:GET|HEAD) /(\w+/[\w.-]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            if match := re.fullmatch(pattern, f"{method} {path}"):
                return answer(*map(unquote, match.groups()), user=user, body=body)
        raise Refusal(404, f"no such interface: {method} {path}")

    def find(self, name: str, user: str | None, *, write: bool = False) -> Repository:
        repository = self.repositories.get(name)
        if repository is None or (repository.private and user != name.partition("/")[0]):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if name in self.gated and user != name.partition("/")[0]:
            raise Refusal(403, "you have not accepted its conditions", "GatedRepo")
        if write and user != name.partition("/")[0]:
            raise Refusal(403 if user else 401, "you may not write to it")
        return repository

    def find_revision(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repository.commits[commit]

    def create(self, *, user, body):
        request = json.loads(body)
        name = f"{request['organization'] or user}/{request['name']}"
        if user is None or user != name.partition("/")[0]:
            raise Refusal(403 if user else 401, "you may not create it")
        if name in self.repositories:
            return 409, {}, {"url": f"{self.url}/{name}", "error": "exists"}
        self.repositories[name] = Repository(request.get("visibility") == "private")
        self.repositories[name].commit("main", {".gitattributes": b""})
        return 200, {}, {"url": f"{self.url}/{name}"}

    def validate(self, *, user, body):
        metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        wrong = [key for key in ("license", "tags") if key not in metadata]
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", metadata.get("base_model", "x")):
            wrong.append("base_model")
        return (400 if wrong else 200), {}, {"errors": [{"message": name} for name in wrong], "warnings": []}

    def preupload(self, name, revision, *, user, body):
        self.find(name, user, write=True)
        asked = json.loads(body)["files"]
        return (
            200,
            {},
            {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]},
        )

    def commit(self, name, revision, *, user, body):
        repository = self.find(name, user, write=True)
        contents = dict(self.find_revision(repository, revision)[1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                contents[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del contents[value["path"]]
        commit = repository.commit(revision, contents)
        return 200, {}, {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit}

    def describe(self, name, revision="main", *, user, body):
        repository = self.find(name, user)
        commit, contents = self.find_revision(repository, revision)
        return (
            200,
            {},
            {
                "id": name,
                "sha": commit,
                "private": repository.private,
                "tags": [],
                "siblings": [{"rfilename": path} for path in contents],
            },
        )

    def tree(self, name, revision, *, user, body):
        _, contents = self.find_revision(self.find(name, user), revision)
        return 200, {}, [entry(path, content) for path, content in contents.items()]

    def list_folder(self, name, revision, folder, *, user, body):
        raise Refusal(404, f"no folder {folder}", "EntryNotFound")

    def resolve(self, name, revision, path, *, user, body):
        commit, contents = self.find_revision(self.find(name, user), revision)
        if path not in contents:
            raise Refusal(404, "no such file", "EntryNotFound")
        content = contents[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry(path, content)["oid"]}"'}
        return 200, headers, content[:-1] + bytes([content[-1] ^ 1]) if path in self.damaged else content

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = urlsplit(self.path).path
                hub.requests.append(f"{self.command} {path}")
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
                try:
                    status, headers, content = hub.answer(self.command, path, body, token)
                except Refusal as refusal:
                    status, headers = refusal.status, refusal.headers
                    content = {"error": headers["X-Error-Message"]}
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(sent))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(sent)

            do_GET = do_HEAD = do_POST = do_PUT = handle_one

            def log_message(self, *_):
                pass

        return Handler


def entry(path: str, content: bytes) -> dict:
    """A file as the Hub lists it."""
    oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}
