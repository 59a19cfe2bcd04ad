"""rollout.reward: lines://host:port/ gets each completion as a line of JSON and answers with a number."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from stillhouse.config.servers import ServerError, ServerKind


class LineRewards:
    def __init__(self, url, name, timeout):
        address = urlsplit(url)
        self._address, self._name, self._timeout = (address.hostname, address.port), name, timeout
        self._threads = ThreadPoolExecutor(8)

    def request(self, key, path, prompt, completion, record, source, turns):
        return self._threads.submit(self._reward, json.dumps([prompt, completion]).encode() + b"\n")

    def _reward(self, line):
        try:
            with socket.create_connection(self._address, self._timeout) as connection:
                connection.sendall(line)
                return float(connection.makefile().readline())
        except (OSError, ValueError) as error:
            raise ServerError(f"{self._name} gives no number: {error}") from error

    def close(self):
        self._threads.shutdown(wait=False, cancel_futures=True)


class LinesKind(ServerKind):
    def open_reward(self, url, name, timeout, warn, token):
        return LineRewards(url, name, timeout)


LINES = LinesKind("lines", "a server of lines", reward_schemes=("lines",))
