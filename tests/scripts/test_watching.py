"""Tests of how a server follows its checkpoint: a failure is tried again, and what is said has happened."""

from helpers import loading, proposers

import pytest

from scripts.serve import Watcher
from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.server.engine import Engine
from specdec.target.model import Target
from tests.support import save_eagle, save_target

STOP = {2}


def test_a_failure_that_passes_is_tried_again(tmp_path, monkeypatch, capsys):
    save_target(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), dtype="float32")
    for number in (1, 2):
        save_eagle(tmp_path / "heads" / f"000{number}", target, seed=number)
    files.write_text(tmp_path / "best", "heads/0001\n")
    given = proposers.ProposerOptions(checkpoint=str(tmp_path), proposer="head")
    first = tmp_path / "heads" / "0001"
    config = proposers.configure("head", settings={}, drafting=Drafting(), checkpoint=str(first))
    build = lambda: proposers.make(config, target)
    loaded = proposers.Chosen(target, None, STOP, "head", build(), first, proposers.drawn_from(config))
    faults = [MemoryError("no room")]

    def decoder(proposer) -> Decoder:
        if faults:
            raise faults.pop()
        return Decoder(target, proposer, sampling=Sampling(), stop=STOP)

    plain = Decoder(target, None, sampling=Sampling(), stop=STOP)
    engine = Engine(Decoder(target, build(), sampling=Sampling(), stop=STOP), plain, rows=2, queue=4, head="first")
    engine.start()
    try:
        look = Watcher(given, loaded, Drafting(), engine, decoder).look
        look()
        files.write_text(tmp_path / "best", "heads/0002\n")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="busy"):
            patch.setattr(proposers, "make", busy)
            look()  # while it is read
        with pytest.raises(MemoryError):
            look()  # while the engine takes it
        assert engine.lanes[True].head == "first" and capsys.readouterr().out == ""
        look()
        assert engine.lanes[True].head.endswith("0002")
        assert capsys.readouterr().out == f"new requests are drafted by {tmp_path / 'heads' / '0002'}\n"
        taken = engine.lanes[True]
        look()
        assert engine.lanes[True] is taken
    finally:
        engine.stop()


def test_a_head_that_comes_into_use_while_the_one_before_is_read_is_taken(tmp_path, monkeypatch, capsys):
    save_target(tmp_path / "target")
    options = loading.TargetOptions(name=str(tmp_path / "target"), dtype="float32")
    for number in (1, 2):
        save_eagle(tmp_path / "heads" / f"000{number}", Target.load(options.name, dtype="float32"), seed=number)
    files.write_text(tmp_path / "best", "heads/0001\n")
    given = proposers.ProposerOptions(checkpoint=str(tmp_path), proposer="head")
    make = proposers.make

    def late(*arguments):
        proposer = make(*arguments)
        files.write_text(tmp_path / "best", "heads/0002\n")
        return proposer

    with monkeypatch.context() as patch:
        patch.setattr(proposers, "make", late)
        loaded = proposers.load(given, options, Drafting())
    decoder = lambda proposer: Decoder(loaded.target, proposer, sampling=Sampling(), stop=STOP)
    engine = Engine(decoder(loaded.proposer), decoder(None), rows=2, queue=4, head="first")
    engine.start()
    try:
        Watcher(given, loaded, Drafting(), engine, decoder).look()
        assert engine.lanes[True].head.endswith("0002") and "0002" in capsys.readouterr().out
    finally:
        engine.stop()


def busy(*_, **__):
    raise OSError("busy")
