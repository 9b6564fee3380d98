"""Which servers are asked through a proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): never one on this machine."""

import ipaddress
import os
import urllib.parse
import urllib.request
from typing import Any


def is_local(url: str) -> bool:
    """Whether an address is one of this machine, whatever the environment says about proxies."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def make_client_options(*urls: str) -> dict[str, Any]:
    """Arguments of an httpx client for these servers. With local ones alone it reads nothing of the environment, so that a proxy that
    cannot be used does no harm."""
    local = [url for url in urls if is_local(url)]
    if len(local) == len(urls):
        return {"trust_env": False}
    hosts = [urllib.parse.urlsplit(url).hostname or "" for url in local]
    return {"mounts": {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in hosts}}


def describe_proxy(url: str) -> str:
    """(through NAME), where a variable of the environment names a proxy for this address; else nothing. Its value may hold a password."""
    address = urllib.parse.urlsplit(url)
    if is_local(url) or urllib.request.proxy_bypass(address.netloc):
        return ""
    variables = [f"{kind}_proxy" for kind in (address.scheme, "all")]
    name = next(
        (name for variable in variables for name, value in os.environ.items() if name.lower() == variable and value),
        None,
    )
    return f" (through the proxy of {name}; NO_PROXY={address.hostname} asks it directly)" if name else ""
