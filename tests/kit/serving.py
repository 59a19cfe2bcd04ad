"""A real `stillhouse serve` process for tests: `with Server(folder) as server`, and `server.client`."""

import pkgutil
import re
import signal
import time
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest
import torch
from kit.ranks import Ranks
from kit.runs import Command, save_model

from stillhouse.data import load_tokenizer
from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish
from stillhouse.serving import SAFETENSORS
from stillhouse.serving.wire import decode_answer, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to serve; modules about runs have a folder of their own."""
    return save_model(tmp_path_factory.mktemp("serve") / "model", "qwen3", seed=2)


class Server:
    """processes: more than one divides the model (tensor parallel). shared: options of their `Command`s.

    Ends when the block ends, with exit code 0.
    """

    def __init__(
        self,
        folder: Path,
        *options: str | int,
        processes: int = 1,
        headers: dict[str, str] | None = None,
        **shared: Any,
    ):
        arguments = ("serve", folder, "--port", 0, "--device", "cpu", *options)
        if processes == 1:
            self.commands = [Command(*arguments, **shared)]
        else:
            self._ranks = Ranks(processes, *arguments, **shared)
            self.commands = list(self._ranks)
        self._headers = headers

    @property
    def first(self) -> Command:
        return self.commands[0]

    def __enter__(self) -> Self:
        end = time.monotonic() + 90
        while (line := re.search(r"serving on (http://\S+)", self.first.out)) is None:
            assert time.monotonic() < end, f"not ready:\n{self.first.out}{self.first.err}"
            assert self.first.process.is_alive(), f"ended:\n{self.first.out}{self.first.err}"
            time.sleep(0.01)
        self.url = line[1]
        self.client = httpx2.Client(base_url=self.url, timeout=60, headers=self._headers)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.client.close()
        if kind is not None:
            for command in self.commands:
                command.process.kill()
            print(*(command.out + command.err for command in self.commands))
            return
        if self.commands and self.first.process.is_alive():
            self.end()
        for command in self.commands:
            assert command.wait(60) == 0, f"{command.out}{command.err}"
            assert "Traceback" not in command.err, command.err

    def end(self) -> None:
        for command in self.commands:
            command.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server of one process. The end of the block then expects nothing of it."""
        command = self.commands.pop()
        command.process.kill()
        command.process.join()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def info(self) -> dict[str, Any]:
        return self.client.get("/v1/info").json()

    def score(self, signal: SignalSpec, documents: list[DocumentRows]) -> list[dict[str, torch.Tensor]]:
        """The signals of documents, through the client's side of the wire."""
        content, kind = encode_request(signal, documents), {"content-type": SAFETENSORS}
        answer = self.client.post("/v1/score", content=content, headers=kind)
        assert answer.status_code == 200, answer.text
        info = self.info()
        teacher, signals = decode_answer(answer.content, signal, info["width"], documents)
        assert teacher == info["teacher"]
        return signals


# faults: hooks that a server's process calls before it starts


SCORING = "stillhouse.signals.scorer:Scorer.score"
GENERATION = "stillhouse.rollout.sampler:TokenSampler.__call__"


def slow_down(method: str, seconds: float) -> None:
    """Each call of a method takes longer: a batch of `SCORING`, a token of `GENERATION`."""
    kind, _, name = method.rpartition(".")
    owner, call = pkgutil.resolve_name(kind), pkgutil.resolve_name(method)

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments)

    setattr(owner, name, slowly)


def out_of_memory_above(tokens: int) -> None:
    """A forward pass of more tokens fails as it does on a full GPU."""
    from stillhouse.signals.scorer import Scorer

    score = Scorer.score

    def failing(scorer: Scorer, parts: Any) -> Any:
        if sum(part.tokens for part in parts) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return score(scorer, parts)

    Scorer.score = failing  # type: ignore[method-assign]


def nan_for_token(token: int) -> None:
    """The hidden states of documents that begin with this id become NaN, as after an overflow."""
    from stillhouse.models import Decoder

    forward = Decoder.forward

    def with_nan(decoder: Decoder, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        bad_BS1 = (input_ids == token)[..., None]
        norm = decoder.backbone.norm
        handle = norm.register_forward_hook(lambda _, __, hidden_BSE: hidden_BSE.masked_fill(bad_BS1, torch.nan))
        try:
            return forward(decoder, input_ids, *arguments, **options)
        finally:
            handle.remove()

    Decoder.forward = with_nan  # type: ignore[method-assign]


def load_nothing() -> None:
    """A load that is said to have succeeded, and has changed no tensor that the model had."""
    from stillhouse.serving.server.weight_updates import WeightUpdates

    apply = WeightUpdates.apply

    def saying(updates: WeightUpdates) -> None:
        values = {name: value.clone() for name, value in updates._decoder.state_dict().items()}
        apply(updates)
        with torch.no_grad():
            for name, value in updates._decoder.state_dict().items():
                value.copy_(values.get(name, value))

    WeightUpdates.apply = saying  # type: ignore[method-assign]


def publish_scaled(folder: Path, target: Path, version: int, factor: float) -> Path:
    """Publish the model of a folder with all weights times a factor."""
    decoder = Decoder.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(factor)
    return publish(single_process_runner(decoder, None), target, version, tokenizer=load_tokenizer(str(folder)))


def load_weights(server: Server, folder: Path | str, version: str) -> httpx2.Response:
    return server.client.post("/v1/weights", json={"folder": str(folder), "version": version})
