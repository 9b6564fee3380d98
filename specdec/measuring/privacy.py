"""Texts for publication without keys, addresses and folders: command lines, and sentences."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.core import hub

HIDDEN = ".."
# Ends of the names of options, variables and keys whose values are private
NAMES = (
    r"(?:keys?|token|passw(?:or)?d|passphrase|secrets?|credentials?|auth|authorization|headers?|cookies?"
    r"|host(?:name)?|addr(?:ess)?)"
)
SECRET = re.compile(rf"{NAMES}$", re.IGNORECASE)
SECRET_PAIR = re.compile(rf"{NAMES}[\"']?\s*[:=]|\bbearer\s", re.IGNORECASE)  # all that follows in the word is private
SECRET_BEGIN = re.compile(rf"(?:{NAMES}:|\bbearer)$", re.IGNORECASE)  # all words that follow are private
VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
URL = r"[a-zA-Z][\w+.-]*://\S*?(?=[\"'>)\],.;:]*(?:\s|$))"
LOGIN = r"[^\s:/@=,\"']+:[^\s@]+@\S*"  # user:password@host
PARTS = re.compile(rf"({URL}|{LOGIN}|[,;:=\"'{{}}\[\]()|])")  # of a word, which may hold several paths
FOLDER = re.compile(r"(?<!\S)(?:~|\.[^\s/]*/|/|[^\s/]+/[^\s/]+/)")  # begin of a path with folders
HOME = re.compile(r"(?:/home/|/Users/|~)[^/\s]*")
QUOTED_PATH = re.compile(r"([\"'])((?:~|\.{0,2}/)[^\"'\n]*)\1")
PATH = re.compile(r"(?<![\w/.~])(?!//)(?:(?:~[\w.-]*|\.{1,2})?/[^\s\"',():;]+|~\w[\w.-]*)")


def hide_private(flags: str) -> list[str]:
    """The words of a command line, without folders, addresses, and the values of keys and variables.

    Raises ValueError, without the text, for one that a shell cannot read.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", flags))
    except ValueError as error:
        raise ValueError(f"flags= is no command line ({error}): quote it as for a shell.") from None
    hidden, is_secret = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--?[A-Za-z]\S*", name):
            is_secret = bool(SECRET.search(name))
            content = HIDDEN if is_secret else hide_value(value)
            hidden.append(f"{name}={content}" if equals else hide_value(name))
        else:
            hidden.append(HIDDEN if is_secret else hide_value(word))
            is_secret |= bool(SECRET_BEGIN.search(word))
    return hidden


def hide_value(text: str) -> str:
    """A word of a command line, or a value of its JSON, without what is private."""
    if text[:1] in ("{", "["):
        try:
            return json.dumps(hide_json(json.loads(text)))
        except ValueError:
            pass
    if re.search(r"\s", text) and re.search(r"(?:^|\s)--?[A-Za-z]", text):  # a command within the command
        try:
            return shlex.join(hide_private(text))
        except ValueError:
            return HIDDEN
    variable, pair = VARIABLE.fullmatch(text), SECRET_PAIR.search(text)
    if pair:
        return hide_parts(text[: pair.end()]) + HIDDEN
    if variable and not variable[2].isdecimal():
        return f"{variable[1]}={HIDDEN}"
    return hide_parts(text)


def hide_json(value: Any) -> Any:
    """A JSON value without what is private."""
    if isinstance(value, dict):
        return {
            hide_value(name): HIDDEN if SECRET.search(name) else hide_json(content) for name, content in value.items()
        }
    if isinstance(value, list):
        return [hide_json(content) for content in value]
    return hide_value(value) if isinstance(value, str) else value


def hide_parts(text: str) -> str:
    return "".join(map(hide_part, PARTS.split(text)))


def hide_part(text: str) -> str:
    """One of PARTS: a URL as its scheme, a login as nothing, a path as its last part."""
    if re.fullmatch(URL, text):
        return hide_url(text)
    if re.fullmatch(LOGIN, text):
        return HIDDEN
    folder = FOLDER.search(text)
    return text[: folder.start()] + shorten_path(text[folder.start() :]) if folder else text


def hide_url(url: str) -> str:
    return url.partition("://")[0] + "://" + HIDDEN


def shorten_path(path: str) -> str:
    """The last part of a path; HIDDEN for a home."""
    stripped = path.rstrip("/")
    return HIDDEN if HOME.fullmatch(stripped) else stripped.rpartition("/")[2] or path


def shorten_name(name: str) -> str:
    """The name of a model without the folder that it stands in."""
    return Path(name).name if hub.is_folder(name) or not hub.is_hub_name(name) else name


def hide_places(text: str, servers: Mapping[str, str] | None = None) -> str:
    """A sentence with the names of servers in place of their URLs, and without other addresses and folders.

    servers: name by URL, as the user typed it
    """
    bases = {url.strip().rstrip("/").removesuffix("/v1"): name for url, name in (servers or {}).items()}
    bases |= {re.sub(r"//[^/]*@", "//", url): name for url, name in bases.items()}
    for url in sorted(bases, key=len, reverse=True):
        text = re.sub(rf"{re.escape(url)}(?:/v1)?/?(?![\w-]|[.:]\w)", bases[url], text)
    text = re.sub(URL, lambda match: hide_url(match[0]), re.sub(r"NO_PROXY=[^\s)]+", f"NO_PROXY={HIDDEN}", text))
    text = QUOTED_PATH.sub(lambda match: match[1] + shorten_path(match[2]) + match[1], text)
    return PATH.sub(lambda match: shorten_path(match[0]), text)
