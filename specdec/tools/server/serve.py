"""A server from the options of specdec serve: loading, warming up and listening."""

import copy
import functools
import logging
import socket
from typing import Annotated

from pydantic import Field

from specdec import DISTRIBUTION, checkpoint, loading
from specdec.core import progress
from specdec.core.option_types import Count, Duration, Text
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.loading import LoadedProposer
from specdec.measuring.page import render_live_page
from specdec.options import decoding
from specdec.options.command_types import MEMORY, TemplateSettings
from specdec.options.decoding import SamplingOptions, ShapedDraftingOptions
from specdec.options.proposers import ProposerOptions, keep_shape
from specdec.options.target import TargetOptions
from specdec.text import conversations as data
from specdec.tools.grammar.grammar import GrammarCompiler
from specdec.tools.server.engine import Engine
from specdec.tools.server.record import Recorder

WARM_UP_SAMPLINGS = [Sampling(1.0, top_p=0.9), Sampling(1.0), Sampling()]  # a sampling of each Sampling.kind
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServeOptions(ProposerOptions):
    host: Text
    port: Annotated[int, Field(ge=0, le=65535)]
    model: Text | None
    template: TemplateSettings
    rows: Annotated[Count, MEMORY]
    queue: Count
    prefill_tokens: Annotated[Count, MEMORY]
    max_length: Annotated[Count, MEMORY]
    timeout: Duration
    record: Text | None
    target: TargetOptions
    decode: ShapedDraftingOptions


def find_presets(texts: dict[str, str]) -> dict[str, str]:
    """The presets of serve. Raises ValueError for an option of sampling, which each request sets for itself."""
    for name in SamplingOptions.model_fields:
        if f"decode.{name}" in texts:
            raise ValueError(f"decode.{name} is for each request to say: give {name} in the request.")
    return keep_shape(texts)


def run_server(options: ServeOptions) -> None:
    """Serves until it is stopped. Raises ValueError for options with which nothing can be served."""
    try:
        import uvicorn

        from specdec.tools.server.app import ServerContext, make_app
    except ImportError as error:
        raise ValueError(f"Serving needs more packages ({error}): pip install {DISTRIBUTION}") from error
    listening = open_port(options.host, options.port)
    recorder = Recorder(options.record) if options.record is not None else None
    loaded = loading.load_proposer(options, options.target, options.decode.make_drafting())
    template, target = loading.read_template(options.template, loaded.tokenizer), loaded.target
    engine = make_engine(options, loaded)
    model = options.model or target.name
    max_length = options.max_length
    if target.max_positions is not None:
        max_length = min(max_length, target.max_positions - loaded.proposer.depth)
    drafts = f"{loaded.title} of {options.checkpoint}" if options.checkpoint else loaded.title
    if recorder:
        recorder.set_origin(target, loaded.tokenizer)
    grammar_tokenizer = copy.deepcopy(loaded.tokenizer)  # grammars are compiled in threads of their own
    # With the first request that needs them
    grammars = functools.cache(lambda: GrammarCompiler(grammar_tokenizer, target.vocab_size, loaded.stop))
    served = ServerContext(
        engine=engine,
        tokenizer=loaded.tokenizer,
        engine_tokenizer=copy.deepcopy(loaded.tokenizer),
        encode_chat=functools.partial(data.encode_chat, loaded.tokenizer, template),
        stop=frozenset(loaded.stop),
        model=model,
        head=checkpoint.name_checkpoint(loaded.checkpoint) if loaded.checkpoint else None,
        max_length=max_length,
        timeout=options.timeout,
        compile_grammar=lambda grammar: grammars().make_constraint(grammar),
        page=render_live_page(
            target=model, drafts=drafts, max_length=max_length, chat=bool(loaded.tokenizer.chat_template)
        ),
        recorder=recorder,
    )
    print_address(options, listening, f"{model}, drafted by {drafts}")
    config = uvicorn.Config(make_app(served), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


def print_address(options: ServeOptions, listening: socket.socket, title: str) -> None:
    """Prints the server's address, and a warning if others can reach it. title: target and drafter"""
    if options.host not in LOCAL_HOSTS:
        progress.print_note(
            f"warning: anyone who reaches {options.host}:{options.port} can use this server: it asks for no password."
        )
    logging.basicConfig(level=logging.WARNING)
    address = "http://{}:{}".format(*listening.getsockname()[:2])
    recorded = f"; conversations are recorded in {options.record}" if options.record is not None else ""
    print(f"{title}: {address} (page), {address}/v1 (OpenAI's interface){recorded}", flush=True)


def make_engine(options: ServeOptions, loaded: LoadedProposer) -> Engine:
    """An engine, warmed up: the costs of rounds are measured, and all passes are compiled."""
    decoding.show_measuring(loaded.proposer)
    drafting = options.decode.make_drafting()
    runner, stop, target = drafting.runner(), loaded.stop, loaded.target
    drafted = drafting.decoder(target, loaded.proposer, sampling=Sampling(), stop=stop, runner=runner)
    plain = Decoder(target, None, sampling=Sampling(), stop=stop, runner=runner)
    warm_up_decoder(drafted, options.rows)
    engine = Engine(
        drafted, plain, max_requests=options.rows, max_waiting=options.queue, prefill_tokens=options.prefill_tokens
    )
    compile_seeded(engine, options.rows)
    return engine


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything large is loaded. Raises ValueError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Nothing can listen at {host}:{port} ({error}): choose another port= or host=.") from error


def warm_up_decoder(decoder: Decoder, rows: int) -> None:
    """Decodes a little with every kind of sampling, so that the costs of rounds are measured now."""
    for kind in WARM_UP_SAMPLINGS:
        batch = decoder.batch(max_rows=rows)
        batch.admit([Request([0], 4, sampling=kind) for _ in range(rows)])
        while batch.running:
            batch.run_round()
        batch.close()
    if decoder.proposer:
        decoder.proposer.reset_history()


def compile_seeded(engine: Engine, rows: int) -> None:
    """Compiles the passes of requests with a seed, if passes are compiled."""
    decoder = engine.seeded.decoder
    if decoder.runner.by_shape and engine.seeded not in (engine.drafted, engine.plain):
        warm_up_decoder(decoder, rows)
