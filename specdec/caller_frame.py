"""A workaround: reads the variables of transformers' running `generate` from the frames of the calls.

Why: `generate` hands a callable given as `custom_generate` neither its `streamer`, nor `assistant_model`, `synced_gpus`
and the negative prompts, which must be refused; and it forgets the `tokenizer` that `stop_strings` need: before it reads
the signature of a callable it puts the tokenizer aside, and then drops it.

Written for transformers 5.17 to 5.23. Without it (or if a later version renames these variables), streamers get no
token, stop_strings are refused for lack of a tokenizer, and the arguments above are silently ignored. Decoding itself
does not depend on it. tests/specdec/test_generate.py covers each of these.
"""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin


def variables(function: Callable) -> dict[str, Any]:
    """The variables of the innermost running call of a function; empty if it is not running."""
    code, frame = inspect.unwrap(function).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def generate_arguments() -> dict[str, Any]:
    """The arguments of the running `generate`; empty outside of it."""
    return variables(GenerationMixin.generate)


def return_tokenizer() -> None:
    """Puts the tokenizer back among the arguments of `generate`, where it is looked for next.

    To be called when `generate` reads the signature of a callable: when it asks for `__signature__`.
    """
    around = variables(GenerationMixin._extract_generation_mode_kwargs)
    if "tokenizer" in around.get("generation_mode_kwargs", {}):
        around["kwargs"]["tokenizer"] = around["generation_mode_kwargs"]["tokenizer"]
