"""Tests whether the Hugging Face hub can be reached, and whether it has the models, before models are loaded.

Without this test, an error would come only after the libraries have been imported and have retried for most of a
minute. In offline mode, the libraries use only files that were downloaded before, and fail at once if a file is
missing.
"""

import os
import socket
import urllib.request
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from stillhouse.display import print_escaped

SECONDS = 4.0
#: a file that every model has
CONFIG = "config.json"
_ADDRESSES = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PORTS = {"http": 80, "": 80, "https": 443}  # every other scheme is SOCKS, with port 1080
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def settle_offline(names: Iterable[str | None]) -> None:
    """Set HF_HUB_OFFLINE=1 if the hub cannot be reached. Does nothing if all `names` are local paths, or if the
    environment already sets offline mode.

    This must be called before huggingface_hub is imported, because the library reads the variable on import. Raises
    ValueError if the environment has an invalid address of the hub or of a proxy.
    """
    on_hub = [name for name in names if name and not os.path.exists(name)]
    if not on_hub or any(os.environ.get(name) for name in _OFFLINE):
        return
    host = "the hub"
    try:
        endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        proxies = urllib.request.getproxies()
        proxy = proxies.get(endpoint.scheme) or proxies.get("all")
        if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
            endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = endpoint.hostname or "", endpoint.port or _PORTS.get(endpoint.scheme, 1080)
        socket.create_connection((host, port), timeout=SECONDS).close()
    except ValueError as error:  # an invalid host name also raises ValueError
        # only the names of the variables are shown, because addresses can contain passwords
        variables = " and ".join(name for name in os.environ if name.upper() in _ADDRESSES)
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


def require_on_hub(models: Mapping[str, tuple[str, str | None]]) -> None:
    """Raise ConfigError for a model that the hub lacks or refuses to give. In offline mode, raise it for a model that
    was not downloaded before.

    This function requests config.json, which every run needs, unless it was downloaded before. It must be called
    after `settle_offline`. It ignores all other failures, because the libraries retry.

    models: names and revisions of models, by configuration key.
    """
    on_hub = {key: model for key, model in models.items() if not os.path.exists(model[0])}
    if not on_hub or os.environ.get("RANK", "0") != "0":
        return
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    from stillhouse.config import ConfigError
    from stillhouse.libraries import reading

    refusals: tuple[type[Exception], ...] = RepositoryNotFoundError, RevisionNotFoundError
    expected = "the hub has no such model, or gives it only with a token (HF_TOKEN)"
    if constants.HF_HUB_OFFLINE:
        refusals = (LocalEntryNotFoundError,)
        expected = "no such model was downloaded before (offline mode: the hub is not used)"
    for key, (name, revision) in on_hub.items():
        if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str):
            continue
        try:
            with reading(name):
                hf_hub_download(name, CONFIG, revision=revision)
        except ValueError as error:
            if isinstance(error.__cause__, refusals):
                at_revision = "" if revision is None else f" with revision {revision}"
                near = get_close_matches(Path(name).name, [path.name for path in Path(name).parent.glob("*/")], n=1)
                hint = f"; did you mean {Path(name).with_name(near[0])}?" if near else ""
                problem = f"got {name}{at_revision}: there is no such folder, and {expected}{hint}"
                raise ConfigError(key, problem) from error
