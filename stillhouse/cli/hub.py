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
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def settle_offline(names: Iterable[str | None]) -> None:
    """Set HF_HUB_OFFLINE=1 if one of the names is none of a file or folder, and the hub cannot be reached.

    names: of models. Must be called before huggingface_hub is imported, which reads the variable once.
    """
    on_hub = [name for name in names if name and not os.path.exists(name)]
    if not on_hub or any(os.environ.get(name) for name in _OFFLINE):
        return
    host, port = _address()
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
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
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443)
