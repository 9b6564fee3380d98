"""Proxies of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY). A server on this machine never needs one."""

import ipaddress
import os
import urllib.parse
import urllib.request
from typing import Any


def is_local(url: str) -> bool:
    """Whether a URL is on this machine, whatever the environment says about proxies."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def make_client_options(*urls: str) -> dict[str, Any]:
    """Arguments of an httpx client for these servers.

    For local servers alone it reads nothing of the environment, so that a broken proxy does no harm.
    """
    local = [url for url in urls if is_local(url)]
    if len(local) == len(urls):
        return {"trust_env": False}
    hosts = [urllib.parse.urlsplit(url).hostname or "" for url in local]
    return {"mounts": {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in hosts}}


def describe_proxy(url: str) -> str:
    """A clause with the variable whose proxy is used for this URL; else nothing. Its value may hold a password."""
    address = urllib.parse.urlsplit(url)
    if is_local(url) or urllib.request.proxy_bypass(address.netloc):
        return ""
    set_names = {name.lower(): name for name, value in os.environ.items() if value}
    name = set_names.get(f"{address.scheme}_proxy") or set_names.get("all_proxy")
    return f" (through the proxy of {name}; NO_PROXY={address.hostname} asks it directly)" if name else ""
