"""Tests before models are loaded whether the hub can be reached: the libraries would retry for most of a minute.

In offline mode, the libraries use only files that were downloaded before, and fail at once if there are none.
"""

import os
import socket
import urllib.request
from collections.abc import Iterable
from urllib.parse import urlsplit

from stillhouse.display import print_escaped

SECONDS = 4.0
_ADDRESSES = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PORTS = {"http": 80, "": 80, "https": 443}  # any other scheme is SOCKS
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def settle_offline(names: Iterable[str | None]) -> None:
    """Set HF_HUB_OFFLINE=1 if the hub cannot be reached. Does nothing if all `names` of models are local paths.

    This must be called before huggingface_hub is imported, because the library reads the variable on import. Raises
    ValueError if the environment has an invalid address of the hub or of a proxy.
    """
    on_hub = [name for name in names if name and not os.path.exists(name)]
    if not on_hub or any(os.environ.get(name) for name in _OFFLINE):
        return
    host = "the hub"
    try:
        host, port = _address()
        socket.create_connection((host, port), timeout=SECONDS).close()
    except ValueError as error:  # also for an invalid host name
        variables = " and ".join(name for name in os.environ if name.upper() in _ADDRESSES)  # a proxy's may be secret
        raise ValueError(
            f"{variables}: the hub's address is not readable ({error}); expected a URL such as https://huggingface.co"
        ) from error
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if os.environ.get("RANK", "0") == "0":
            print_escaped(
                f"warning: {host} cannot be reached ({error.strerror or error}): only models and data that were "
                "downloaded before can be used",
                err=True,
            )


def _address() -> tuple[str, int]:
    """Host and port of the hub, or of the proxy to it."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return endpoint.hostname or "", endpoint.port or _PORTS.get(endpoint.scheme, 1080)
