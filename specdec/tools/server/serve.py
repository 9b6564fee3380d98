"""A server from the options of specdec serve: loading, warming up and listening."""

import copy
import functools
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specdec import DISTRIBUTION, loading
from specdec.core import progress
from specdec.core.option_types import Count, Duration, Text
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.engines.launch import open_port
from specdec.loading import LoadedProposer, OpenTarget
from specdec.measuring.page import render_live_page
from specdec.options import decoding
from specdec.options.command_types import MEMORY, TemplateSettings
from specdec.options.decoding import SamplingOptions, ShapedDraftingOptions
from specdec.options.proposers import ProposerOptions, keep_shape
from specdec.options.target import TargetOptions
from specdec.proposers.auto import AutoProposer
from specdec.text import conversations as data
from specdec.tools.grammar.grammar import GrammarCompiler
from specdec.tools.server.drafts import DraftsMaker, describe_drafter, warm_up
from specdec.tools.server.engine import Engine
from specdec.tools.server.lane import ServedDrafter
from specdec.tools.server.record import Recorder
from specdec.tools.server.weights import WeightsFolder, check_weights_folder

if TYPE_CHECKING:
    from specdec.tools.server.app import ServerContext

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
    allow_weights: Text | None
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

        from specdec.tools.server.app import make_app
    except ImportError as error:
        raise ValueError(f"Serving needs more packages ({error}): pip install {DISTRIBUTION}") from error
    listening = open_port(options.host, options.port)  # before anything large is loaded
    # A thread that computes has its own OpenMP threads, and those of two share the cores: one does it all
    loaded: Future[ServerContext] = Future()
    threading.Thread(target=run_engine, args=(options, loaded), name="engine", daemon=True).start()
    served = loaded.result()
    print_address(options, listening, f"{served.model}, drafted by {served.engine.drafts.drafter.title}")
    config = uvicorn.Config(make_app(served), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


def run_engine(options: ServeOptions, loaded: "Future[ServerContext]") -> None:
    """Loads a server, and decodes in the same thread until its engine is stopped. loaded: gets it, or what is raised"""
    try:
        served = load_server(options)
    except BaseException as error:
        loaded.set_exception(error)
        return
    served.engine.run_here(functools.partial(loaded.set_result, served))


def load_server(options: ServeOptions) -> "ServerContext":
    """All parts of a server, warmed up. Raises ValueError for options with which nothing can be served.

    No part but the engine keeps the head, which another one may replace.
    """
    from specdec.tools.server.app import ServerContext

    recorder = Recorder(options.record) if options.record is not None else None
    drafting = options.decode.make_drafting()
    loaded = loading.load_proposer(options, options.target, drafting)
    if options.allow_weights is not None:
        check_weights_folder(options.allow_weights, loaded)
    opened = OpenTarget(loaded.target, loaded.tokenizer, loaded.stop)
    target, tokenizer, stop = loaded.target, loaded.tokenizer, loaded.stop
    template = loading.read_template(options.template, tokenizer)
    engine = make_engine(options, drafting, loaded)
    model = options.model or target.name
    max_length = options.max_length
    if target.max_positions is not None:
        max_length = min(max_length, target.max_positions - loaded.proposer.depth)
    if recorder:
        recorder.set_origin(target, tokenizer)
    grammar_tokenizer = copy.deepcopy(tokenizer)  # grammars are compiled in threads of their own
    # With the first request that needs them
    grammars = functools.cache(lambda: GrammarCompiler(grammar_tokenizer, target.vocab_size, stop))
    weights = None
    if options.allow_weights is not None:
        costs = loaded.proposer.costs_by_file if isinstance(loaded.proposer, AutoProposer) else {}
        maker = DraftsMaker(opened, options, drafting, engine.plain.decoder, costs, max_length)
        weights = WeightsFolder(options.allow_weights, engine, maker.make, options.rows)
    return ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        engine_tokenizer=copy.deepcopy(tokenizer),
        encode_chat=functools.partial(data.encode_chat, tokenizer, template),
        stop=frozenset(stop),
        model=model,
        max_length=max_length,
        timeout=options.timeout,
        compile_grammar=lambda grammar: grammars().make_constraint(grammar),
        render_page=lambda drafter: render_live_page(
            target=model, drafts=drafter.title, max_length=max_length, chat=bool(tokenizer.chat_template)
        ),
        note_length=make_length_note(lambda: engine.drafts.drafter),
        recorder=recorder,
        weights=weights,
    )


def make_length_note(find_drafter: Callable[[], ServedDrafter]) -> Callable[[int], None]:
    """A function that warns of the first prompt that is longer than all texts of the head's training.

    find_drafter: returns what drafts now; the first such prompt of each head is named
    """
    noted: list[ServedDrafter] = []

    def note_length(length: int) -> None:
        drafter = find_drafter()
        if drafter.trained_length is not None and drafter not in noted[-1:]:
            for sentence in drafter.trained_length.describe_longer([length]):
                noted.append(drafter)
                progress.print_note(f"warning: {sentence}")

    return note_length


def print_address(options: ServeOptions, listening: socket.socket, title: str) -> None:
    """Prints the server's address, and a warning if others can reach it. title: target and drafter"""
    if options.host not in LOCAL_HOSTS:
        actions = "use this server" if options.allow_weights is None else "use this server and change its head"
        progress.print_note(
            f"warning: anyone who reaches {options.host}:{options.port} can {actions}: it asks for no password."
        )
    logging.basicConfig(level=logging.WARNING)
    address = "http://{}:{}".format(*listening.getsockname()[:2])
    recorded = f"; conversations are recorded in {options.record}" if options.record is not None else ""
    print(f"{title}: {address} (page), {address}/v1 (OpenAI's interface){recorded}", flush=True)


def make_engine(options: ServeOptions, drafting: Drafting, loaded: LoadedProposer) -> Engine:
    """An engine, warmed up: the costs of rounds are measured, and all passes are compiled."""
    decoding.show_measuring(loaded.proposer)
    runner, stop, target = drafting.runner(), loaded.stop, loaded.target
    drafted = drafting.decoder(target, loaded.proposer, sampling=Sampling(), stop=stop, runner=runner)
    plain = Decoder(target, None, sampling=Sampling(), stop=stop, runner=runner)
    for _ in warm_up(drafted, options.rows, costs=True):
        pass
    return Engine(
        drafted,
        plain,
        max_requests=options.rows,
        max_waiting=options.queue,
        prefill_tokens=options.prefill_tokens,
        drafter=describe_drafter(loaded.name, loaded.proposer, options.checkpoint, loaded.checkpoint),
    )
