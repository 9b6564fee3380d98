"""Serves a target with drafts over OpenAI's HTTP interface, for trying a head and for measuring it.

    specdec serve checkpoint=checkpoints/shipped/eagle3
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'

http://localhost:8000 is a page on which drafted and plain answers are written side by side. Beside OpenAI's fields, requests may have
top_k, repetition_penalty, ignore_eos, structured_outputs, chat_template_kwargs, and speculate=false for an answer
without drafts. record=FOLDER records conversations, to train on them (docs/adapting.md); nothing is recorded without it. Ctrl-C or
SIGTERM: what runs is finished, a second one ends it.
docs/serving.md says when to serve with vLLM, SGLang or llama.cpp instead.
"""

from specdec.options.command_line import option, options, run

import copy
import functools
import logging
import socket
from dataclasses import dataclass, field

from specdec import checkpoint, loading
from specdec.core import progress
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.measuring.page import live_page
from specdec.options import decoding, proposers
from specdec.text import conversations as data
from specdec.tools.grammar.grammar import Grammars
from specdec.tools.server.engine import Engine
from specdec.tools.server.record import Recorder

KINDS = [Sampling(1.0, top_p=0.9), Sampling(1.0), Sampling()]  # one of each Sampling.kind
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
)  # options of decode that requests have in their place
OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Serve(proposers.ProposerOptions):
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine, for anyone who reaches it")
    port: int = option(8000, "port to listen at; 0: any free one")
    model: str | None = option(None, "name of the model in requests; null: the target's")
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TEMPLATE)
    rows: int = option(8, "requests that are decoded at once; the others wait")
    queue: int = option(256, "requests that may wait; further ones are refused with status 429")
    prefill_tokens: int = option(512, "tokens of new prompts that are read between two rounds of the other requests")
    max_length: int = option(4096, "tokens of a prompt and its answer together, at most the target's positions")
    timeout: float = option(600.0, "seconds after which a request is given up")
    record: str | None = option(None, "folder that conversations are written to, as rows to train on; null: nowhere")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


def refuse_unused(chosen: Serve) -> None:
    """Raises ValueError for an option of sampling that was given: each request says its own."""
    if unused := [name for name in SAMPLING if f"decode.{name}" in chosen.given_names]:
        raise ValueError(f"decode.{unused[0]} is for each request to say: give {unused[0]} in the request.")


def listen(host: str, port: int) -> socket.socket:
    """Takes a port before anything large is loaded. Raises ValueError if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Nothing can listen at {host}:{port} ({error}): choose another port= or host=.") from error


def warm_up(decoder: Decoder, rows: int) -> None:
    """Decodes a little with distributions of every kind, so that what rounds cost is measured now."""
    for kind in KINDS:
        batch = decoder.batch()
        batch.admit([Request([0], 4, sampling=kind) for _ in range(rows)])
        while batch.running:
            batch.step()
        batch.close()
    if decoder.proposer:
        decoder.proposer.forget()


def compile_seeded(engine: Engine, rows: int) -> None:
    """Compiles now what only requests with a seed need, if anything is compiled."""
    decoder = engine.seeded.decoder
    if decoder.runner.by_shape and engine.seeded not in (engine.drafted, engine.plain):
        warm_up(decoder, rows)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Serve, __doc__, arguments)
    try:
        import uvicorn

        from specdec.tools.server.app import Served, make_app
    except ImportError as error:
        raise ValueError(f"Serving needs more packages ({error}): pip install '.[serve]'") from error
    refuse_unused(chosen)
    listening = listen(chosen.host, chosen.port)
    recorder = Recorder(chosen.record) if chosen.record is not None else None
    drafting = chosen.decode.drafting()
    loaded = loading.load_proposer(chosen, chosen.target, drafting)
    template = loading.read_template(chosen.template, loaded.tokenizer)
    decoding.show_measuring(loaded.proposer)
    runner, stop, target = drafting.runner(), loaded.stop, loaded.target
    drafted = drafting.decoder(target, loaded.proposer, sampling=Sampling(), stop=stop, runner=runner)
    plain = Decoder(target, None, sampling=Sampling(), stop=stop, runner=runner)
    warm_up(drafted, chosen.rows)

    own = copy.deepcopy(loaded.tokenizer)  # grammars are compiled in threads of their own
    grammars = functools.cache(lambda: Grammars(own, target.vocab_size, stop))  # with the first request that needs them
    engine = Engine(drafted, plain, rows=chosen.rows, queue=chosen.queue, prefill_tokens=chosen.prefill_tokens)
    compile_seeded(engine, chosen.rows)
    model, most = chosen.model or target.name, chosen.max_length
    longest = most if target.max_positions is None else min(most, target.max_positions - loaded.proposer.depth)
    drafts = f"{loaded.title} of {chosen.checkpoint}" if chosen.checkpoint else loaded.title
    if recorder:
        recorder.set_origin(target, loaded.tokenizer)
    served = Served(
        engine=engine,
        tokenizer=loaded.tokenizer,
        engine_tokenizer=copy.deepcopy(loaded.tokenizer),
        encode_chat=functools.partial(data.encode_chat, loaded.tokenizer, template),
        stop=frozenset(stop),
        model=model,
        head=checkpoint.name_of(loaded.checkpoint) if loaded.checkpoint else None,
        max_length=longest,
        timeout=chosen.timeout,
        compile_grammar=lambda grammar: grammars().constraint(grammar),
        page=live_page(target=model, drafts=drafts, max_length=longest, chat=bool(loaded.tokenizer.chat_template)),
        recorder=recorder,
    )
    if chosen.host not in OWN_HOSTS:
        place = f"{chosen.host}:{chosen.port}"
        progress.note(f"warning: anyone who reaches {place} can use this server: it asks for no password.")
    logging.basicConfig(level=logging.WARNING)
    address = "http://{}:{}".format(*listening.getsockname()[:2])
    recorded = f"; conversations are recorded in {chosen.record}" if recorder else ""
    print(f"{model}, drafted by {drafts}: {address} (page), {address}/v1 (OpenAI's interface){recorded}", flush=True)
    config = uvicorn.Config(make_app(served), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    run(main)
