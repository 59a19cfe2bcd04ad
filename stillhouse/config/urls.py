"""Checks the addresses of servers."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from stillhouse.config.errors import ConfigError


def require_urls(key: str, urls: Sequence[str]) -> None:
    """Raise ConfigError unless there is an address, and each is http://host:port without a path."""
    for url in urls or [""]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ConfigError(key, f"got {url!r}, expected http://host:port without a path, such as /v1")
