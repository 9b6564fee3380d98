"""Options of a script, written key=value (or group.key=value), from a small dataclass."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

Options = TypeVar("Options")


def flatten(dataclass_type: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """(name, field) of every option; a field that is itself a dataclass is a group."""
    for field in dataclasses.fields(dataclass_type):
        if dataclasses.is_dataclass(field.type):
            yield from flatten(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def describe(name: str, field: dataclasses.Field) -> str:
    if "prefix" in field.metadata:
        return f"  {field.metadata['prefix'] + 'KEY':<22} {field.metadata['help']}"
    default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
    return f"  {name:<22} {field.metadata['help']} ({default})"


def options(dataclass_type: type[Options], docstring: str) -> Options:
    """The dataclass filled from the command line; -h or --help prints `docstring` and every field, and exits.

    A field without default is required; its metadata {"help": ...} explains it in one line. A field of type str may
    hold a comma list; a dict with metadata {"prefix": "NAME."} takes every NAME.KEY=VALUE as it is written. What cannot be understood ends the program with a sentence.
    """
    fields = dict(flatten(dataclass_type))
    open_ended = {field.metadata["prefix"]: name for name, field in fields.items() if "prefix" in field.metadata}
    known = ", ".join([name for name in fields if name not in open_ended.values()] + [f"{p}KEY" for p in open_ended])
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        print(
            "\n".join(
                [docstring.strip(), "", "Options, written key=value:", *(describe(*item) for item in fields.items())]
            )
        )
        raise SystemExit(0)
    given: dict = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise SystemExit(f"{argument!r} is not of the form key=value. Known options: {known}. See --help.")
        prefix = next((prefix for prefix in open_ended if key.startswith(prefix)), None)
        if prefix:
            given.setdefault(open_ended[prefix], {})[key.removeprefix(prefix)] = value
            continue
        if key not in fields or key in open_ended.values():
            raise SystemExit(f"There is no option {key!r}. Known options: {known}. See --help.")
        given[key] = value  # kept as written: a prompt may hold quotes, commas and equals signs
    try:
        merged = OmegaConf.structured(dataclass_type)
        for group in {name.rpartition(".")[0] for name in fields}:  # a frozen dataclass becomes a read-only group
            OmegaConf.set_readonly(OmegaConf.select(merged, group) if group else merged, False)
        for key, value in given.items():
            nothing = isinstance(value, str) and value.lower() in ("null", "none") and "None" in str(fields[key].type)
            OmegaConf.update(merged, key, None if nothing else value)
        return OmegaConf.to_object(merged)
    except MissingMandatoryValue:
        missing = ", ".join(name for name in fields if OmegaConf.is_missing(merged, name))
        raise SystemExit(f"Give a value for: {missing}. See --help.") from None
    except OmegaConfBaseException as error:
        raise SystemExit(f"{error.full_key}: {str(error).splitlines()[0]}. See --help.") from None


def run(main) -> None:
    """Runs a script's main: what a user did wrong ends in one sentence, Ctrl-C without a traceback."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except BrokenPipeError:
        os._exit(1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
