"""Options of a script, written key=value, from a small dataclass."""

import dataclasses
import sys
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

Options = TypeVar("Options")


def describe(field: dataclasses.Field) -> str:
    default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
    return f"  {field.name:<16} {field.metadata['help']} ({default})"


def options(dataclass_type: type[Options], docstring: str) -> Options:
    """The dataclass filled from the command line; -h or --help prints `docstring` and every field, and exits.

    A field without default is required; its metadata {"help": ...} explains it in one line. A field of type str may
    hold a comma list. What cannot be understood ends the program with a sentence.
    """
    fields = dataclasses.fields(dataclass_type)
    known = ", ".join(field.name for field in fields)
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        print("\n".join([docstring.strip(), "", "Options, written key=value:", *map(describe, fields)]))
        raise SystemExit(0)
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise SystemExit(f"{argument!r} is not of the form key=value. Known options: {known}. See --help.")
        if key not in {field.name for field in fields}:
            raise SystemExit(f"There is no option {key!r}. Known options: {known}. See --help.")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(dataclass_type), OmegaConf.from_cli(arguments))
        return OmegaConf.to_object(merged)
    except MissingMandatoryValue:
        missing = ", ".join(field.name for field in fields if OmegaConf.is_missing(merged, field.name))
        raise SystemExit(f"Give a value for: {missing}. See --help.") from None
    except OmegaConfBaseException as error:
        raise SystemExit(f"{error.full_key}: {str(error).splitlines()[0]}. See --help.") from None
