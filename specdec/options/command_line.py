"""Options of a command, written key=value or group.key=value, from a frozen dataclass.

The same words mean the same thing in every command:

    checkpoint=DIR                a trained head: a step's folder, a run's folder for its best step, or a name on the
                                  Hugging Face Hub, user/name or user/name@revision. DIR,DIR,.. where a command compares several
    proposer=NAME proposers=A,B   what drafts, by its file in conf/proposer
    proposer.KEY=VALUE            its settings; with proposers=, or inside another proposer, proposer.NAME.KEY=VALUE
    proposer.checkpoint=DIR       the trained head inside a proposer that holds one; default: the first of checkpoint=
    target.name= target.dtype= target.device=
    prompts= split= limit= max_new_tokens= batch= seed= out=
    decode.temperature= decode.depth= decode.width= decode.nodes= decode.compile= ...
    chains=1,2,3 trees=4x3x8      shapes to compare: chain lengths, and DEPTHxWIDTHxNODES of trees
    progress=                     how long work is shown (specdec/core/progress.py); every command takes it
"""

import dataclasses
import difflib
import errno
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from specdec.core import devices, files, progress, ranges
from specdec.options import config_files

if str(config_files.HOME) not in sys.path:  # a script that is started as a file finds train and other scripts, too
    sys.path.insert(0, str(config_files.HOME))

WRITTEN = ("out", "picture")  # options that name what a command writes
SPLIT = "split of a dataset; null: train"
Options = TypeVar("Options")
# Options that size what a command holds at once, which a sentence names where memory does not suffice
SIZES = "batch rows max_new_tokens max_length length prefill_tokens decode.nodes trees".split()
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_names: set[str] = set()  # of the options of this command


@dataclasses.dataclass(frozen=True)
class Option:
    name: str  # with its group: decode.depth
    type: Any
    default: Any  # dataclasses.MISSING if a value must be given
    help: str
    prefix: str | None  # of a dict that takes PREFIX.KEY=VALUE for every KEY
    prose: bool = False  # whether a value is a text for the model, and no path or name
    empty: bool = False  # whether an empty value has a meaning

    @property
    def types(self) -> tuple[type, ...]:
        return typing.get_args(self.type) or (self.type,)

    @property
    def range(self) -> ranges.Range | None:
        """What it may be, beside its type: the declaration of its name, if that is of this type."""
        declared = ranges.find(self.name)
        if declared is None or declared.kind not in self.types:
            return None
        return dataclasses.replace(declared, null=type(None) in self.types, lists="no")

    def convert(self, text: str) -> Any:
        """The value of a text. Raises SystemExit for a wrong type, and ValueError for a value outside of its range."""
        value: Any = text
        if type(None) in self.types and text.lower() in ("null", "none"):
            value = None
        elif str not in self.types:
            kind = next(each for each in self.types if each is not type(None))
            try:
                value = TRUTH[text.lower()] if kind is bool else kind(text)
            except (KeyError, ValueError):
                raise SystemExit(f"error: {self.name}={text} must be {KINDS[kind]}. See --help.") from None
        elif not self.prose:
            value = read_paths(self.name, text, empty=self.empty or self.default == "")
        if self.range is not None and not self.range.fits(value):
            raise ValueError(f"{self.name}={show(value)} must be {self.range.words(value)}.")
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLineOptions:
    """For commands where it counts that an option was given, even with the value of its default.

    given_names: options on the command line, with their groups, such as decode.depth
    """

    given_names: frozenset[str] = dataclasses.field(default=frozenset(), metadata={"hidden": True})


def option(default: Any, text: str, **more: Any) -> Any:
    """A field of an options dataclass with its help text. more: metadata, such as folder=True for out="""
    return dataclasses.field(default=default, metadata={"help": text, **more})


def split(text: str | None) -> list[str]:
    """The parts of a comma list, without blanks around them and without empty parts."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def read_paths(name: str, text: str, *, empty: bool = False) -> str:
    """A text, or a comma list of them, with the home folder in the place of each `~` that begins one.

    empty: whether an empty text has a meaning. Raises ValueError for one that has none, and for a list of nothing
    """
    if not text.strip(" ,") and (text or not empty):
        raise ValueError(f"{name}={text} is empty: give a value, or leave the option out.")
    return re.sub(r"(?<![^,])( *)(~[^,]*)", lambda match: match[1] + files.expand_home(match[2]), text)


def flatten(kind: Any, prefix: str = "", group: Any = None) -> Iterator[Option]:
    """Every option of an options dataclass. A field that is a dataclass is a group; `group` holds its defaults."""
    for field in dataclasses.fields(kind):
        default = field.default if group is None else getattr(group, field.name)
        if group is None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(field.type):
            yield from flatten(field.type, f"{prefix}{field.name}.", default)
        elif "hidden" not in field.metadata:
            help, taken = field.metadata.get("help", ""), field.metadata.get("prefix")
            about = {key: field.metadata.get(key, False) for key in ("prose", "empty")}
            yield Option(prefix + field.name, field.type, default, help, taken, **about)


def describe(known: dict[str, Option], docstring: str) -> str:
    """What --help prints: the docstring, then the options, group by group."""
    lines = [docstring.strip(), "", "Options, written key=value:"]
    group = ""
    order = sorted(
        known.values(), key=lambda option: (option.name.count("."), option.default is not dataclasses.MISSING)
    )
    for option in order:  # required ones first, groups last
        if option.name.rpartition(".")[0] != group:
            group = option.name.rpartition(".")[0]
            lines += ["", f"{group}:"]
        if option.prefix:
            lines.append(f"  {option.prefix + 'KEY':<26} {option.help}")
        else:
            default = "required" if option.default is dataclasses.MISSING else f"default: {show(option.default)}"
            lines.append(f"  {option.name:<26} {option.help} ({default})")
    return "\n".join(lines)


def show(value: Any) -> str:
    return ranges.show(value) or "empty"


def options(
    kind: type[Options],
    docstring: str,
    arguments: list[str] | None = None,
    presets: Callable[[dict[str, Any]], dict[str, str]] = lambda given: {},
) -> Options:
    """The dataclass filled from `arguments` (None: the command line); -h or --help prints `docstring` and every option, and exits.

    `progress` is an option of all commands, and is used here. A field without a default is required; `option` gives it a help
    text. A field of type str may hold a comma list; a dict with metadata {"prefix": "NAME."} takes every NAME.KEY=VALUE as it is
    written. An argument that cannot be used ends the program with one sentence (SystemExit). Raises ValueError for a value
    outside of its range. presets: from what is given as written, to values of what is not given
    """
    known = {option.name: option for option in flatten(kind)}
    known["progress"] = Option("progress", str, os.environ.get(progress.VARIABLE, "auto"), progress.HELP, None)
    _names.update(known)
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(describe(known, docstring))
        raise SystemExit(0)
    given = parse(arguments, known)
    common = {"given_names": frozenset(given)} if issubclass(kind, CommandLineOptions) else {}
    usual = parse([f"{name}={value}" for name, value in presets(given).items()], known)
    for name, value in usual.items():
        given[name] = {**value, **given.get(name, {})} if isinstance(value, dict) else given.get(name, value)
    try:
        progress.choose(given.pop("progress", known.pop("progress").default), main=True)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    missing = [name for name in known if known[name].default is dataclasses.MISSING and name not in given]
    if missing:
        raise SystemExit(f"Give a value for: {', '.join(missing)}. See --help.")
    found = fill(kind, convert_all(given, known) | common)
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if field.name in WRITTEN and value:
            make_room(f"{field.name}={value}", Path(value), folder=field.metadata.get("folder", False))
    return found


def convert_all(given: dict[str, Any], known: dict[str, Option]) -> dict[str, Any]:
    """The values of texts by the names of their options; a dict stays as it is."""
    return {name: known[name].convert(text) if isinstance(text, str) else text for name, text in given.items()}


def fill(kind: Any, given: dict[str, Any]) -> Any:
    """An options dataclass with these values, by the names of the options, in place of its defaults."""
    own = {name: value for name, value in given.items() if "." not in name}
    for field in dataclasses.fields(kind):
        if callable(field.default_factory) and dataclasses.is_dataclass(field.type):
            inside = {
                name.partition(".")[2]: value for name, value in given.items() if name.startswith(f"{field.name}.")
            }
            own[field.name] = dataclasses.replace(field.default_factory(), **inside)
    return kind(**own)


def make_room(option: str, path: Path, *, folder: bool | None) -> None:
    """Makes the folder that a result goes to, before anything is loaded. Raises SystemExit where nothing can be written.

    folder: whether the result is a folder, or else a file; None: several files whose names begin so
    """
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        if folder is not None and path.exists() and path.is_dir() != folder:
            found, wanted = ("file", "folder") if folder else ("folder", "file")
            raise SystemExit(f"error: {option} is a {found}: give the name of a {wanted}.")
        place = path if path.exists() and folder is not None else path.absolute().parent
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {option} cannot be written ({error}). Choose another.") from None


def parse(arguments: list[str], known: dict[str, Option]) -> dict[str, Any]:
    """key=value arguments as a dict. Values stay as they are written: a prompt may hold quotes, commas, equals signs."""
    prefixes = {option.prefix: option.name for option in known.values() if option.prefix}
    names = [name for name in known if name not in prefixes.values()] + [f"{prefix}KEY" for prefix in prefixes]
    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise SystemExit(
                f"{argument!r} is not of the form key=value. Known options: {', '.join(names)}. See --help."
            )
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        if prefix:
            given.setdefault(prefixes[prefix], {})[key.removeprefix(prefix)] = read_paths(key, value)
        elif key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise SystemExit(f"There is no option {key!r}.{guess} Known options: {', '.join(names)}. See --help.")
        else:
            given[key] = value
    return given


def less_memory() -> str:
    """Which options of this command lower the memory that it needs."""
    lower = [f"{name}=" for name in SIZES if name in _names]
    use = ["target.dtype=bfloat16", "target.device=auto with more GPUs"] if "target.device" in _names else []
    first = f"lower {', '.join(lower)}, or " if lower else ""
    return first + "use " + ", or ".join([*use, "a smaller or quantised target"])


def run(main: Callable[..., None], arguments: list[str] | None = None) -> None:
    """Runs a command with `arguments` (None: the command line): a user's mistake (ValueError), full memory and what the system
    refuses (OSError) end in one sentence, Ctrl-C without a traceback, warnings are lines."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        main() if arguments is None else main(arguments)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except (RuntimeError, MemoryError) as error:
        full = devices.out_of_memory(error)
        if full is None:
            raise
        raise SystemExit(f"error: {full}: {less_memory()}.") from None
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        raise SystemExit(f"error: {files.explain(error)}") from None
    except KeyboardInterrupt as error:
        print(str(error) or "Stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        progress.close()


CHECKPOINT = (
    "a trained head: a step's folder, a run's folder for its best step, a published head's folder in its own layout, or "
    "user/name[@revision] of one on the Hugging Face Hub"
)


CHECKPOINTS = f"comma list; each {CHECKPOINT}"
