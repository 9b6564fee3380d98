"""The memory of training a head for a target, before there are data: `specdec inspect` shows it."""

import numpy
import torch

from specdec.target.model import Target
from train.prepare import plan
from train.settings.decide import GB, VOCABULARY_BOUNDS, RunSizes, TextLengths
from train.settings.hydra_text import compose_options, quote_text
from train.settings.options import fill_arguments

PACK_TOKENS = 2048  # tokens of a pack, as runs on a GPU have at least
NUM_PACKS = 64  # packs of the data that are assumed


def count_training_memory(target: Target, head: str, machine: str) -> str:
    """The memory of a process that trains a head with packs of PACK_TOKENS, and the memory of the machine's device.

    target: outline; head, machine: files of conf/head and conf/machine
    Raises ValueError for an unknown machine. A head that cannot be counted for this target gives the reason.
    """
    options = compose_options(
        [f"head={head}", f"machine={machine}", "plan=true", "run=inspect", f"target.name={quote_text(target.name)}"]
    )
    hardware = plan.find_hardware(options, torch.device("cpu"), 1)
    vocabulary = min(VOCABULARY_BOUNDS[1], target.vocab_size)
    sizes = RunSizes("bf16", PACK_TOKENS, 1, vocabulary, 0, fill_arguments(options.head.drafter, norms=True))
    texts = TextLengths(numpy.full(NUM_PACKS, PACK_TOKENS), NUM_PACKS, numpy.zeros(0))
    try:
        count = plan.count_run(options, sizes, target, texts, hardware)
    except plan.META_ERRORS as error:
        return f"cannot be counted ({error})"
    fit = "" if count.memory.fits(hardware) else ", too much"
    return f"{count.memory} of {hardware.memory / GB:.1f} GB, packs of {PACK_TOKENS:,} tokens{fit}"
