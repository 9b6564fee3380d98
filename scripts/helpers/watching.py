"""Lets a server draft with another head when its checkpoint= stands for another one, as after scripts/adapt.py."""

from helpers import loading, proposers

import threading
import time
from collections.abc import Callable

from specdec import checkpoint
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer
from specdec.server.engine import Engine


def check(given: proposers.ProposerOptions) -> None:
    """Raises ValueError where there is nothing that could be replaced."""
    head = given.settings.get("checkpoint", given.checkpoint)
    if head is None:
        raise ValueError("watch= looks at checkpoint=: give that too.")
    if loading.adapts(head):
        raise ValueError(
            f"watch=: {head} changes its target, so it cannot be replaced while requests run: leave watch=null."
        )


def make_look(
    given: proposers.ProposerOptions,
    loaded: proposers.Chosen,
    drafting: Drafting,
    engine: Engine,
    decoder: Callable[[Proposer], Decoder],
) -> Callable[[], None]:
    """-> a function that replaces the drafts if they have changed, and returns when the engine has taken the new ones.

    It raises an error if that fails; the next call tries again. decoder: makes the decoder of a proposer
    """
    known = loaded.drawn_from

    def look() -> None:
        nonlocal known
        config = proposers.configure(
            loaded.name, settings=given.settings, drafting=drafting, checkpoint=given.checkpoint
        )
        now = proposers.drawn_from(config)
        if now == known:
            return
        head = given.settings.get("checkpoint", given.checkpoint)
        name = checkpoint.name_of(checkpoint.resolve(head)) if head else None
        new = proposers.make(config, loaded.target)
        if isinstance(new, Auto) and isinstance(loaded.proposer, Auto):
            new.opened = loaded.proposer.opened  # what passes of the target cost is known
        engine.swap(lambda: decoder(new), name).result()
        known = now
        print(f"new requests are drafted by {', '.join(now)}", flush=True)

    return look


def start(
    given: proposers.ProposerOptions,
    loaded: proposers.Chosen,
    drafting: Drafting,
    engine: Engine,
    decoder: Callable[[Proposer], Decoder],
) -> threading.Thread:
    """Looks every `given.watch` seconds, in a thread of its own, which reads the new head; the engine does the rest."""
    look = make_look(given, loaded, drafting, engine, decoder)

    def run() -> None:
        said = ""
        while True:
            time.sleep(given.watch)  # type: ignore[attr-defined]
            try:
                look()
                said = ""
            except Exception as error:  # the drafts before go on
                sentence = f"warning: the drafts were not replaced: {error}"
                if sentence != said:
                    print(sentence, flush=True)
                said = sentence

    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    return thread
