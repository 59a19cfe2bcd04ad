"""Finds out, before models are read, whether the hub can be reached: the libraries try for most of a minute.

If it cannot, they are told to use only what was downloaded before, which then is found or refused at once.
"""

import os
import socket
import urllib.request
from collections.abc import Iterable
from urllib.parse import urlsplit

import click

SECONDS = 4.0
_ADDRESSES = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PORTS = {"http": 80, "": 80, "https": 443}  # others are those of SOCKS
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def settle_offline(names: Iterable[str | None]) -> None:
    """Set HF_HUB_OFFLINE=1 if one of the names is none of a file or folder, and the hub cannot be reached.

    names: of models. Must be called before huggingface_hub is imported, which reads the variable once. Raises
    ValueError if the hub's or the proxy's address in the environment is none.
    """
    on_hub = [name for name in names if name and not os.path.exists(name)]
    if not on_hub or any(os.environ.get(name) for name in _OFFLINE):
        return
    host = "the hub"
    try:
        host, port = _address()
        socket.create_connection((host, port), timeout=SECONDS).close()
    except ValueError as error:  # also of a name that cannot be the name of a machine
        variables = " and ".join(name for name in os.environ if name.upper() in _ADDRESSES)  # a proxy's may be secret
        raise ValueError(
            f"{variables}: the hub's address is not readable ({error}); expected a URL such as https://huggingface.co"
        ) from error
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if os.environ.get("RANK", "0") == "0":
            click.echo(
                f"warning: {host} cannot be reached ({error.strerror or error}): only models and data that were "
                "downloaded before can be used",
                err=True,
            )


def _address() -> tuple[str, int]:
    """Host and port of the hub, or of the proxy before it."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return endpoint.hostname or "", endpoint.port or _PORTS.get(endpoint.scheme, 1080)
