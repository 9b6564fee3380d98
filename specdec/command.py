"""The console command `specdec VERB key=value ..`: each verb is a file of scripts/, or train.py.

The files come from the clone beside this package, else from the copy in the wheel. This module imports nothing large,
so that `specdec --help` answers at once. Launchers of several processes run it as a module:
accelerate launch -m specdec.command train ..
"""

import ast
import difflib
import platform
import runpy
import sys
from importlib import metadata
from pathlib import Path

import specdec
from specdec import DISTRIBUTION
from specdec.core.closed_pipe import end_at_closed_pipe
from specdec.options.config_files import HOME, IN_CLONE, PACKAGE

TRAIN = "train"
CLONE_FILES = ("data/", "targets/", "checkpoints/shipped")  # files of a clone that defaults of options name


def find_verbs() -> dict[str, Path]:
    """The file of each verb by name, in the order of the alphabet.

    A file inspect.py would hide the module of Python for all scripts beside it, so its name ends in an underscore.
    """
    files = {path.stem.rstrip("_"): path for path in (HOME / "scripts").glob("*.py") if path.stem != "__init__"}
    return dict(sorted((files | {TRAIN: HOME / "train.py"}).items()))


def describe_verbs(verbs: dict[str, Path]) -> str:
    """The text of `specdec --help`, with the first line of each verb's docstring."""
    lines = [
        "specdec VERB key=value ..  trains drafters for speculative decoding, decodes with them and measures them.",
        "",
    ]
    for name, path in verbs.items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<14} {docstring.partition(chr(10))[0]}")
    return "\n".join([*lines, "", "specdec VERB --help lists the options of a verb, specdec --version says what runs."])


def describe_version() -> str:
    """The text of `specdec --version`, as pip writes its own."""
    versions = f"torch {metadata.version('torch')}, python {platform.python_version()}"
    return f"specdec {specdec.__version__} from {PACKAGE} ({versions})"


def make_verb_error(verb: str, verbs: dict[str, Path]) -> SystemExit:
    """The error for a verb that does not exist."""
    close = difflib.get_close_matches(verb, verbs, n=1, cutoff=0.5)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return SystemExit(f"There is no verb {verb!r}.{guess} Verbs: {', '.join(verbs)}. See specdec --help.")


def run_verb(path: Path, arguments: list[str]) -> None:
    """Runs the file of a verb as Python runs it. Raises SystemExit where it fails."""
    sys.path.insert(0, str(HOME))
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def refuse_clone_files(error: SystemExit) -> None:
    """Raises SystemExit, with where they are, for an error about files of a clone where there is no clone."""
    message = str(error.code)
    names = [separator + name for name in CLONE_FILES for separator in " ="]
    if not IN_CLONE and any(name in message for name in names):
        advice = "data/, targets/ and checkpoints/shipped are folders of the clone: work there, or name other files."
        raise SystemExit(f"{message} ({advice})") from error


def warn_of_namesake() -> None:
    """Prints that the distribution `specdec`, another project, is installed beside this one, where it is."""
    try:
        _, version = (metadata.version(name) for name in (DISTRIBUTION, "specdec"))
    except metadata.PackageNotFoundError:
        return
    message = f"warning: specdec {version} and {DISTRIBUTION} are installed together and overwrite each other's files"
    print(f"{message}: pip uninstall both, then install one.", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Runs one verb. arguments: None: the command line"""
    with end_at_closed_pipe():
        start_verb(*(sys.argv[1:] if arguments is None else arguments) or ["--help"])


def start_verb(verb: str, *verb_arguments: str) -> None:
    """Runs a verb, or prints the help or the version."""
    verbs = find_verbs()
    warn_of_namesake()
    if verb in ("-h", "--help", "help"):
        return print(describe_verbs(verbs))
    if verb in ("-V", "--version", "version"):
        return print(describe_version())
    if not verb.startswith("-"):
        verb = verb.replace("-", "_")
    if verb not in verbs:
        raise make_verb_error(verb, verbs)
    try:
        run_verb(verbs[verb], [*verb_arguments])
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("specdec", "scripts", TRAIN):
            raise
        sentence = f"specdec {verb} needs the package {package}, which is not installed"
        raise SystemExit(f"error: {sentence}: pip install '{DISTRIBUTION}[train]'.") from error
    except SystemExit as error:
        refuse_clone_files(error)
        raise


if __name__ == "__main__":
    main()
