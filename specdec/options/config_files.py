"""Where the YAML of options is: conf/ of the clone or of the wheel, and the folder conf of each tool and experiment."""

from pathlib import Path

from specdec.core import extensions

PACKAGE = extensions.PACKAGE
IN_CLONE = (PACKAGE.parent / "train.py").is_file() and (PACKAGE.parent / "scripts").is_dir()
HOME = PACKAGE.parent if IN_CLONE else PACKAGE / "_clone"  # of scripts, train, conf and train.py


def conf_folders() -> list[Path]:
    """Every folder with groups of YAML, that of the core first."""
    return [HOME / "conf", *extensions.list_conf_folders()]


def list_files(group: str) -> dict[str, Path]:
    """The files of a group, such as head, by name in the order of the alphabet."""
    files = {path.stem: path for folder in conf_folders() for path in folder.glob(f"{group}/*.yaml")}
    return dict(sorted(files.items()))


def flatten(settings: dict, prefix: str = "", *, without: tuple[str, ...] = (), keep_empty: bool = False) -> dict:
    """Settings by dotted name. without: names of settings and of groups that are left out; keep_empty: whether an empty group is a value"""
    values: dict = {}
    for key, value in settings.items():
        name = prefix + key
        if name in without:
            continue
        if isinstance(value, dict) and (value or not keep_empty):
            values |= flatten(value, f"{name}.", without=without, keep_empty=keep_empty)
        else:
            values[name] = value
    return values
