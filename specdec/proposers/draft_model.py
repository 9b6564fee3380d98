"""An existing small causal LM drafts without training: speculative decoding's first form (2211.17192, 2302.01318)."""

from specdec.core.tree import TreeShape
from specdec.heads.draft import Draft, existing
from specdec.proposers.growth import Children
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target


def draft(
    target: Target, *, model: str, depth: int, width: int, nodes: int | None, children: Children, compile: bool
) -> HeadProposer:
    """The proposer of a frozen model, in the target's dtype. Raises ValueError if the model cannot be used.

    model: folder or Hub name of a causal LM with the target's tokenizer; of tokens that only one of the two has, such as further special
        ones, none is drafted
    depth, width, nodes: see TreeShape; nodes None: depth x width
    """
    lm, drafted = existing(target, model, dtype=str(target.dtype).removeprefix("torch."))
    drafter = Draft(target, model=lm, vocab=drafted).requires_grad_(False)
    return HeadProposer(drafter, TreeShape(depth, width, nodes or depth * width), children=children, compile=compile)
