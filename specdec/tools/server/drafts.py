"""What drafts the answers of a server: made for a head, described for clients, and warmed up."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specdec import checkpoint, loading
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.loading import OpenTarget
from specdec.measuring.contexts import TrainedLength
from specdec.options import proposers
from specdec.options.proposers import ProposerOptions
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer
from specdec.proposers.costs import Costs
from specdec.proposers.heads import HeadProposer
from specdec.tools.server.lane import ServedDrafter

WARM_UP_SAMPLINGS = [Sampling(1.0, top_p=0.9), Sampling(1.0), Sampling()]  # a sampling of each Sampling.kind
MAX_WARM_UP_DEPTH = 8  # drafts of a round that a warm-up allows for; auto may make more, but hardly without a history


@dataclass(frozen=True)
class DraftsMaker:
    """Makes decoders of one target as a server's options say, with other heads.

    plain: decoder without drafts, whose compiled passes all others share
    costs: measured costs of the target, by their files; max_length: tokens of a prompt and its answer
    """

    opened: OpenTarget
    options: ProposerOptions
    drafting: Drafting
    plain: Decoder
    costs: dict[Path, Costs]
    max_length: int

    def make(self, folder: Path, version: str) -> tuple[Decoder, ServedDrafter]:
        """A decoder with the head of a checkpoint, and what clients are told of it.

        Raises ValueError for a head that cannot be served here. The target is not changed.
        """
        if checkpoint.read_head_class(folder).adapts_target:
            raise ValueError(f"{folder} changes the target, which answers that run still need: start a server for it.")
        settings = self.options.proposer_settings | {"checkpoint": str(folder)}
        options = self.options.model_copy(update={"proposer_settings": settings})
        name, config = loading.configure_proposer(options, self.drafting, str(folder), folder)
        if set(proposers.list_heads(config)) != {str(folder)}:
            raise ValueError(f"proposer={name} has another head (NAME.checkpoint=): start the server without it.")
        proposer = proposers.make_proposer(config, self.opened.target)
        if isinstance(proposer, AutoProposer):
            proposer.costs_by_file = self.costs
        limit = self.opened.target.max_positions
        if limit is not None and self.max_length + proposer.depth > limit:
            raise ValueError(
                f"{folder} drafts {proposer.depth} tokens: start with max_length={limit - proposer.depth}."
            )
        drafted = self.drafting.decoder(
            self.opened.target, proposer, sampling=Sampling(), stop=self.opened.stop, runner=self.plain.runner
        )
        return drafted, describe_drafter(name, proposer, folder, folder, version)


def describe_drafter(
    name: str,
    proposer: Proposer,
    folder: str | Path | None,
    checkpoint_folder: Path | None,
    version: str | None = None,
) -> ServedDrafter:
    """What clients are told.

    name: name of the proposer; folder: the head's folder as the user names it, where checkpoint_folder may be inside
    version: see ServedDrafter
    """
    shape = proposer.shape if isinstance(proposer, HeadProposer) else None
    title = f"{shape or name} of {folder}" if folder else str(shape or name)
    head_name, trained_length = None, None
    if checkpoint_folder:
        head_name = checkpoint.name_checkpoint(checkpoint_folder)
        drafter = getattr(proposer.shaped_head if isinstance(proposer, AutoProposer) else proposer, "drafter", None)
        tokens = checkpoint.find_trained_length(checkpoint_folder)
        trained_length = TrainedLength.from_head(head_name, tokens, drafter)
    return ServedDrafter(
        f"{title}, version {version}" if version else title,
        head_name,
        version,
        shape.nodes if shape else None,
        trained_length,
    )


def warm_up(decoder: Decoder, rows: int, *, costs: bool = False) -> Iterator[None]:
    """Decodes a little, so that passes are compiled or captured: every kind of sampling, alone and in `rows` rows.

    Yields after each round. Where nothing is compiled or captured, one round shows that drafting works.
    costs: whether costs of rounds are measured, too, which takes all rows
    """
    by_shape, steady = decoder.runner.by_shape, decoder.steady()
    if not (by_shape or costs):
        yield from _decode_a_little(decoder, 1, rows, [Sampling()], 2)
        return
    depth = decoder.proposer.depth if decoder.proposer and by_shape else 0
    num_tokens = 4 + 2 * min(depth, MAX_WARM_UP_DEPTH)  # several rounds, even if all drafts are accepted
    for size in sorted({1, rows}) if by_shape else [rows]:
        yield from _decode_a_little(decoder, size, rows, WARM_UP_SAMPLINGS, num_tokens)
        if by_shape and steady is not decoder and steady.proposer:
            yield from _decode_a_little(steady, size, rows, WARM_UP_SAMPLINGS, num_tokens)


def _decode_a_little(
    decoder: Decoder, num_requests: int, rows: int, samplings: list[Sampling], num_tokens: int
) -> Iterator[None]:
    """Answers of so many requests and tokens with each sampling. rows: requests that may run at once later"""
    for kind in samplings:
        with contextlib.closing(decoder.batch(max_rows=rows)) as batch:
            batch.admit([Request([0], num_tokens, sampling=kind) for _ in range(num_requests)])
            yield
            while batch.running:
                batch.run_round()
                yield
    if decoder.proposer:
        decoder.proposer.reset_history()
