"""What following grammars gave and cost: complete and valid answers, tokens without a choice, time of masks."""

from helpers.loading import Opened

import json
import time
from collections.abc import Iterable

from specdec.core.grammar import Constraint, Grammar, Grammars, unpack
from specdec.measuring.measure import Prompt


def measure(grammars: Grammars, loaded: Opened, answers: Iterable[tuple[Prompt, list[int]]]) -> dict:
    """Figures of answers, of those that follow a grammar.

    complete: whole sentences of the grammar; the others were cut, or met a dead end of the grammar
    json, valid: complete ones under a schema that the validator can read, and those of them that it finds valid
    invalid: for each of the others, what the validator finds wrong, by the prompt's id
    forced_share: of tokens where the grammar left no choice; mask_ms: for each token, of one row
    """
    counts = dict.fromkeys(("answers", "complete", "json", "valid", "tokens", "forced"), 0)
    seconds, invalid = 0.0, dict[str, str]()
    for prompt, tokens in answers:
        if prompt.grammar is None:
            continue
        constraint = grammars.constraint(prompt.grammar)
        assert constraint is not None
        forced, spent = follow(constraint, tokens, loaded.target.vocab_size)
        seconds += spent
        counts["answers"] += 1
        counts["tokens"] += len(tokens)
        counts["forced"] += forced
        counts["complete"] += constraint.complete
        if prompt.grammar.kind == "json_schema" and constraint.complete:
            fault = find_fault(prompt.grammar, str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)))
            counts["json"] += fault is not None
            counts["valid"] += fault == ""
            if fault:
                invalid[prompt.id] = fault
    per_token = max(1, counts["tokens"])
    return counts | {
        "forced_share": counts["forced"] / per_token,
        "mask_ms": 1e3 * seconds / per_token,
        "invalid": invalid,
    }


def follow(constraint: Constraint, tokens: list[int], vocab_size: int) -> tuple[int, float]:
    """Goes along an answer -> how many tokens were forced, seconds that masks took on the host"""
    forced, known, seconds = 0, 0, 0.0
    for token in tokens:
        known = max(known, len(constraint.forced()))  # forced tokens may be known before they are the next ones
        forced += known > 0
        known = max(0, known - 1)
        start = time.perf_counter()
        unpack([[constraint.following()]], vocab_size, "cpu")
        constraint.take([token])
        seconds += time.perf_counter() - start
    return forced, seconds


def find_fault(grammar: Grammar, text: str) -> str | None:
    """Why a text is not JSON that the schema allows, by a validator that knows nothing of masks; empty if it is; None if the
    validator cannot read the schema."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), json.loads(grammar.text), format_checker=jsonschema.FormatChecker())
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    except ValueError as error:
        return str(error)
    except Exception:  # a faulty schema, a reference that leads nowhere, an expression of another dialect
        return None
    return ""


def sentence(figures: dict) -> str:
    valid = f"; of {figures['json']} in JSON {figures['valid']} are valid" if figures["json"] else ""
    for name, fault in figures["invalid"].items():
        valid += f" ({name} is not: {fault})"
    return (
        f"grammar: {figures['complete']} of {figures['answers']} answers are complete"
        f"{valid}; {figures['forced_share']:.0%} of the tokens were forced; masks took {figures['mask_ms']:.2f} ms a token"
    )
