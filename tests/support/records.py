"""Invented records of judgements: figures of no engine, for tests of what is made from records."""

import copy
import json
from pathlib import Path
from typing import Any

LOAD = {
    "at_once": 1,
    "prompts": 14,
    "failed": 0,
    "tau": [1.75, 1.6, 1.9],
    "by_position": [0.5, 0.25],
    "drafted": 800,
    "user_tok_s": [30.0, 29.0, 31.0],
    "total_tok_s": [30.0, None, None],
    "plain_user_tok_s": [20.0, 19.5, 20.5],
    "speedup": [1.5, 1.4, 1.6],
}
GROUP = {"prompts": 7, "tau": [1.5, 1.3, 1.7]}
DOCUMENT = {
    "schema": "specdec/record/1",
    "when": "2026-11-28T09:00:00+00:00",
    "target": {"name": "org/Base", "digest": "aa" * 32, "dtype": "float32"},
    "drafter": {"name": "ours/eagle3", "method": "eagle3", "digest": "bb" * 32},
    "engine": {"name": "vLLM", "version": "0.32.0", "adaptive": False},
    "machine": {"device": "a CPU", "count": 1, "parallel": "none", "busy": 0.0},
    "protocol": {
        "suite": "GSM8K",
        "file": "gsm8k_test.jsonl",
        "revision": "0f" * 20,
        "ids_sha256": "cc" * 32,
        "endpoint": "v1/completions",
        "template_sha256": "dd" * 32,
        "thinking": False,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "max_tokens": 64,
        "ignore_stop": False,
        "drafts": 2,
    },
    "counting": {"source": "per_request"},
    "loads": [LOAD],
    "by": {"category": {"math": GROUP, "code": GROUP}, "prompt_tokens": {"0-255": GROUP}, "answer_tokens": {}},
    "checks": {"template": "same ids as tokenizer", "served_is_trained": True, "repeat": [8, 8], "others_traffic": 0},
}
ABSENCE = {
    "schema": "specdec/absence/1",
    "drafter": "ours/eagle3",
    "engine": "OpenVINO",
    "reason": "It has no form for this head.",
}


def make_document(**changes: Any) -> dict[str, Any]:
    """DOCUMENT with other values. changes: values by the place of a field, with __ behind each group"""
    document = copy.deepcopy(DOCUMENT)
    for place, value in changes.items():
        *groups, name = place.split("__")
        group: Any = document
        for step in groups:
            group = group[int(step) if step.isdigit() else step]
        group[name] = value
    return document


def write_document(path: Path, document: Any = None, **changes: Any) -> Path:
    """Writes a document, or DOCUMENT with changes, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_document(**changes) if document is None else document))
    return path
