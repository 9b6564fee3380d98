"""What a server says of itself, for a record: the engine with its version, the target, and the machine."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.core import hub
from specdec.core.untrusted import read_json
from specdec.engines.client import find_fingerprint, is_local
from specdec.measuring.privacy import hide_private, shorten_name
from specdec.measuring.record import RecordedEngine, RecordedMachine, RecordedTarget
from specdec.measuring.servers.server import LLAMA_CPP, SGLANG, SPECDEC, VLLM, Server
from specdec.proposers.costs import describe_processor

UNSAID = (None, "auto", "None", "")  # values of SGLang's settings that say nothing


def describe_engine(server: Server, flags: str | None) -> RecordedEngine:
    """The engine with its version. flags: the user's text of its command line"""
    facts = read_facts(server)
    version: Any = facts.get("version") or facts.get("build_info") or server.entry.get("version")
    if version is None and server.kind == SPECDEC and is_local(server.url):
        version = specdec.__version__
    known = version is not None and "unknown" not in str(version)
    return RecordedEngine(name=server.kind, version=str(version) if known else None, flags=hide_private(flags or ""))


def read_facts(server: Server) -> dict[str, Any]:
    """What the server tells about itself at the path that its kind has for that; {} where it has none."""
    paths = {VLLM: ["version"], SGLANG: ["server_info", "get_server_info"], LLAMA_CPP: ["props"]}
    with server.open() as connection:
        documents = (connection.read_document(path) for path in paths.get(server.kind, ()))
        return next(filter(None, documents), {})


def describe_target(server: Server, name: str | None, dtype: str) -> RecordedTarget:
    """The target as it is served. name: the target's name for the client; None: unknown

    dtype: the user's, for a server that does not say its own; auto: unknown
    """
    root = server.root or (server.model if server.kind == SPECDEC and is_local(server.url) else "")
    name, _, revision = hub.pin_commit(Path(name or root or server.model)).partition("@")
    fingerprint = find_fingerprint({**server.entry, "root": root or None})
    quantisation, kv_cache, served_dtype = read_precision(server, root)
    return RecordedTarget(
        name=shorten_name(name),
        revision=revision or None,
        digest=None if fingerprint is None else fingerprint.text,
        quantisation=quantisation,
        kv_cache=kv_cache,
        dtype=served_dtype or (None if dtype in UNSAID else dtype),
    )


def read_precision(server: Server, root: str) -> Iterator[str | None]:
    """Yields the quantisation of the weights, the dtype of keys and values, and that of weights, as the server says."""
    if server.kind == LLAMA_CPP:
        values = [str((server.entry.get("meta") or {}).get("ftype") or "").removeprefix("all "), None, None]
    elif server.kind == SGLANG:
        settings = read_facts(server)
        values = [settings.get(name) for name in ("quantization", "kv_cache_dtype", "dtype")]
    else:
        values = [read_config(root).get("quant_method"), None, None]
    yield from (None if value in UNSAID else str(value) for value in values)


def read_config(root: str) -> dict[str, Any]:
    """The settings of quantisation in a model's folder; {} without any."""
    path = Path(root) / "config.json"
    return (read_json(path) if root and path.is_file() else {}).get("quantization_config") or {}


def describe_machine(urls: Sequence[str], device: str | None, busy: float | None) -> RecordedMachine:
    """The machine of the servers. device: the user's text; busy: share of the CPU that other programs took"""
    count = None
    if device is None and all(map(is_local, urls)):
        cores, count = len(os.sched_getaffinity(0)), 1 if torch.cuda.device_count() < 2 else None
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{describe_processor()}, {cores} cores"
    return RecordedMachine(device=device, count=count, busy=busy)
