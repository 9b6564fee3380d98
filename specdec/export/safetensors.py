"""Any head under this project's own tensor names, with what a reader needs to know in config.json."""

from specdec.export.layouts.base import Layout, vocab_tensors
from specdec.export.serving import Form
from specdec.heads.base import Drafter


def form(drafter: Drafter) -> Form:
    """The draft vocabulary becomes the two maps that serving engines expect, d2t and t2d."""
    tensors = {name: value for name, value in drafter.state_dict().items() if name != "draft_to_target"}
    tensors |= vocab_tensors(drafter)
    config = {
        "drafter": type(drafter).__name__,
        "reads_layers": list(drafter.target_layers),
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": None,
    }
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return Form(Layout(tensors, config, shapes, frozenset(config)), engines={})
