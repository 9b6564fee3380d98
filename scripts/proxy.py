"""Records the conversations of any server with OpenAI's interface, as rows to train a head on. It passes everything on unchanged.

    python scripts/proxy.py upstream=http://localhost:8000 target.name=Qwen/Qwen3-8B record=conversations
    python scripts/proxy.py upstream=http://localhost:8000 target.name=Qwen/Qwen3-8B record=conversations token_ids=true

Clients ask http://localhost:8001/v1 instead of the server. target.name= is the model that the server has: its tokenizer makes the ids
of the rows. With token_ids=true a vLLM server is asked for the ids that it read and wrote, which is exact; clients see them too.
docs/traffic.md explains the rows, and what is not recorded. Ctrl-C or SIGTERM: what runs is finished.
"""

from helpers import loading, recording
from helpers.listening import listen, warn_if_open
from helpers.options import option, options, run

import logging
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specdec.server.traffic import Origin
from specdec.target.model import load_tokenizer
from train.data import rows as data


@dataclass(frozen=True, kw_only=True)
class ProxyOptions(recording.RecordOptions):
    upstream: str = field(metadata={"help": "URL of the server, with or without /v1"})
    record: str = field(metadata={"help": "folder that conversations are written to, as rows to train on"})
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine, for anyone who reaches it")
    port: int = option(8001, "port to listen at; 0: any free one")
    max_body: int = option(1 << 25, "bytes that a request may have")
    token_ids: bool = option(False, "ask the server for token ids (return_token_ids of vLLM)")
    target: loading.TokenizerOptions = field(default_factory=loading.TokenizerOptions)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts behind an answer; None if it puts none."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = data.encode(tokenizer, {"id": "a short chat", "category": "all", "messages": messages})
    last = row.tokens[data.last_answer(row)[1] - 1]
    return last if last in data.find_special(tokenizer) else None


def main() -> None:
    chosen = options(ProxyOptions, __doc__)
    try:
        import uvicorn

        from specdec.server.proxy import Proxy, make_proxy
    except ImportError as error:
        raise ValueError(f"The proxy needs more packages ({error}): pip install '.[serve]'") from error
    settings = recording.settings(chosen)
    if not chosen.upstream.startswith(("http://", "https://")):
        raise ValueError(f"upstream={chosen.upstream} must be a URL, such as http://localhost:8000.")
    listening = listen(chosen.host, chosen.port)
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    logging.basicConfig(level=logging.WARNING)
    proxy = Proxy(
        chosen.upstream.rstrip("/").removesuffix("/v1"),
        recording.open_recorder(settings, Origin("proxy", chosen.target.name), tokenizer),
        turn_end(tokenizer) if tokenizer.chat_template else None,
        tokenizer.eos_token_id,
        token_ids=chosen.token_ids,
        max_body=chosen.max_body,
    )
    warn_if_open(chosen.host, chosen.port, "proxy")
    host, port = listening.getsockname()[:2]
    print(f"http://{host}:{port}/v1 asks {proxy.upstream}/v1{recording.describe(settings)}", flush=True)
    config = uvicorn.Config(make_proxy(proxy), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    run(main)
