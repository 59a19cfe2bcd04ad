"""Servers of the user that compute rewards: one POST request with JSON for every completion.

request     {"prompt": "2 + 2 =", "completion": " 4", "record": {…}, "turns": [{"role": "student", "text": " 4"}]}
answer      {"reward": 1.0}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from stillhouse.config.servers import ServerError
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.pool import RefusedError, ServerPool, ServerRequest
from stillhouse.user_code.functions import Turn, UserFunctionError, about_completion, finite_number, shown

MOST_BYTES = 65536
_EXPECTED = 'expected {"reward": a finite number}'


class RewardServer:
    """The user's server at `url`.

    name: the name of the reward in error messages.
    timeout: the future of a reward raises ServerError if the server has not answered for this number of seconds. A
    single answer has the same limit.
    warn: prints a line when the server fails, or answers again after a failure. token: the server's bearer token.
    """

    def __init__(self, url: str, name: str, timeout: float, warn: Callable[[str], None], token: str | None = None):
        parts = urlsplit(url)
        self._path, self._name = url.removeprefix(root := f"{parts.scheme}://{parts.netloc}"), name
        self._pool = ServerPool(
            [root], timeout, warn, model="reward", key="rollout.timeout", token=token, answer_seconds=timeout
        )

    def request(
        self,
        key: str,
        path: str,
        prompt: str,
        completion: str,
        record: Mapping[str, Any],
        source: str,
        turns: Sequence[Turn],
    ) -> Future[Any]:
        """Request the reward of a completion, and return at once. source: `file:line` of the record.

        The future raises UserFunctionError, which names the server and the completion, if the server refuses the
        request or gives no finite number, or if JSON cannot represent the record. It raises ServerError if the server
        does not answer in time.
        """
        about, named = about_completion(completion, source), Future[Any]()

        def parse(response: HttpAnswer) -> float:
            answer = response.json()  # invalid JSON is a damaged answer, after which the request is repeated
            value = answer.get("reward", answer) if isinstance(answer, dict) else answer
            number = finite_number(value)
            if number is None or value is answer:
                raise RefusedError(f"{self._name} gives {shown(value)}{about}: {_EXPECTED}")
            return number

        def resolve(answer: "Future[float]") -> None:
            if answer.cancelled():
                named.set_exception(ServerError(f"the request to {self._name} was given up, because the run ends"))
                return
            error = answer.exception()
            if isinstance(error, RefusedError):
                refused = str(error) if about in str(error) else f"{self._name} refuses the request{about}: {error}"
                error = UserFunctionError(refused)
            if error is None:
                named.set_result(answer.result())
            else:
                named.set_exception(error)

        try:
            request = {"prompt": prompt, "completion": completion, "record": record, "turns": turns}
            content = json.dumps(request, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            named.set_exception(
                UserFunctionError(f"{self._name}: the record of {source} cannot be sent as JSON ({error})")
            )
            return named
        call = ServerRequest(self._path, content.encode(), "application/json", parse, tokens=1, most_bytes=MOST_BYTES)
        self._pool.submit(call).add_done_callback(resolve)
        return named

    def close(self) -> None:
        """End the requests in progress."""
        self._pool.close()
