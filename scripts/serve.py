"""Serves a target with drafts over OpenAI's HTTP interface, for trying a head and for measuring it.

    python scripts/serve.py checkpoint=checkpoints/shipped/eagle3
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'

http://localhost:8000 is a page on which drafted and plain answers are written side by side. Beside OpenAI's fields, requests may
have top_k, repetition_penalty, ignore_eos, structured_outputs, chat_template_kwargs (enable_thinking), speculate=false for an answer without drafts, and details=true for
what every round drafted. /metrics counts drafts under vLLM's names. record=FOLDER records conversations, to train on them
(docs/traffic.md); nothing is recorded without it. Ctrl-C or SIGTERM: what runs is finished, a second one ends it.
docs/serving.md says when to serve with vLLM, SGLang or llama.cpp instead.
"""

from helpers import decoding, loading, proposers, recording, watching
from helpers.listening import listen, warn_if_open
from helpers.options import option, options, run

import copy
import functools
import logging
from dataclasses import dataclass, field

from specdec import checkpoint
from specdec.core.grammar import Grammars
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.server.traffic import Origin
from train.data import chat_template
from train.data import rows as data
from train.pages.page import live_page

KINDS = [Sampling(1.0, top_p=0.9), Sampling(1.0), Sampling()]  # one of each Sampling.kind


@dataclass(frozen=True, kw_only=True)
class Serve(proposers.ProposerOptions, recording.RecordOptions):
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine, for anyone who reaches it")
    port: int = option(8000, "port to listen at; 0: any free one")
    model: str | None = option(None, "name of the model in requests; null: the target's. The checkpoint's is known too")
    thinking: bool | None = option(None, f"{loading.THINKING}; null: the template's default")
    rows: int = option(8, "requests that are decoded at once; the others wait")
    queue: int = option(256, "requests that may wait; further ones are refused with status 429")
    prefill_tokens: int = option(512, "tokens of new prompts that are read between two rounds of the other requests")
    max_length: int = option(
        4096, "tokens that a prompt and its answer may have together, at most the target's positions"
    )
    max_body: int = option(1 << 20, "bytes that a request may have")
    timeout: float = option(600.0, "seconds after which a request is given up")
    watch: float | None = option(
        None,
        "look every so many seconds whether checkpoint= stands for another head, and draft with that then; null: no",
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


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


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Serve, __doc__, arguments)
    try:
        import uvicorn

        from specdec.server.app import Served, make_app
        from specdec.server.engine import Engine
        from specdec.server.metrics import Metrics
    except ImportError as error:
        raise ValueError(f"Serving needs more packages ({error}): pip install '.[serve]'") from error
    if chosen.watch is not None:
        watching.check(chosen)
    if chosen.decode.temperature != "0":
        raise ValueError("decode.temperature is for each request to say: give temperature in the request.")
    if chosen.decode.grammar is not None:
        raise ValueError("decode.grammar is for each request to say: give structured_outputs in the request.")

    record = recording.settings(chosen)
    listening = listen(chosen.host, chosen.port)
    drafting = chosen.decode.drafting()
    loaded = proposers.load(chosen, chosen.target, drafting)
    chat_template.check_mode(loaded.tokenizer, chosen.thinking)
    decoding.show_measuring(loaded.proposer)
    runner, stop = drafting.runner(), loaded.stop
    decoder = lambda proposer: drafting.decoder(loaded.target, proposer, sampling=Sampling(), stop=stop, runner=runner)
    drafted = decoder(loaded.proposer)
    plain = Decoder(loaded.target, None, sampling=Sampling(), stop=stop, runner=runner)
    warm_up(drafted, chosen.rows)

    own = copy.deepcopy(loaded.tokenizer)  # grammars are compiled in threads of their own

    @functools.cache
    def grammars() -> Grammars:  # with the first request that needs them
        return Grammars(own, loaded.target.vocab_size, stop)

    model = chosen.model or loaded.target.name
    metrics = Metrics(model)
    head = checkpoint.name_of(loaded.checkpoint) if loaded.checkpoint else None
    engine = Engine(
        drafted, plain, rows=chosen.rows, queue=chosen.queue, prefill_tokens=chosen.prefill_tokens, head=head,
        saw=metrics.saw_step,
    )  # fmt: skip
    positions = loaded.target.max_positions
    longest = chosen.max_length if positions is None else min(chosen.max_length, positions - loaded.proposer.depth)
    drafts = f"{loaded.title} of {chosen.checkpoint}" if chosen.checkpoint else loaded.title
    origin = Origin("server", loaded.target.name, loaded.target.fingerprint())  # each request knows its head
    recorder = recording.open_recorder(record, origin, loaded.tokenizer) if record else None
    served = Served(
        engine=engine,
        metrics=metrics,
        tokenizer=loaded.tokenizer,
        engine_tokenizer=copy.deepcopy(loaded.tokenizer),
        encode_chat=functools.partial(data.encode_prompt, loaded.tokenizer),
        thinking=chosen.thinking,
        stop=frozenset(stop),
        model=model,
        other_names=(str(chosen.checkpoint),) if chosen.checkpoint else (),
        max_length=longest,
        timeout=chosen.timeout,
        max_body=chosen.max_body,
        compile_grammar=lambda grammar: grammars().constraint(grammar),
        page=live_page(target=model, drafts=drafts, max_length=longest, chat=bool(loaded.tokenizer.chat_template)),
        recorder=recorder,
    )
    warn_if_open(chosen.host, chosen.port, "server")
    logging.basicConfig(level=logging.WARNING)
    host, port = listening.getsockname()[:2]
    address = f"http://{host}:{port}"
    print(
        f"{model}, drafted by {drafts}: {address} (page), {address}/v1 (OpenAI's interface){recording.describe(record)}",
        flush=True,
    )
    if chosen.watch is not None:
        watching.start(chosen, loaded, drafting, engine, decoder)
    config = uvicorn.Config(make_app(served), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    run(main)
