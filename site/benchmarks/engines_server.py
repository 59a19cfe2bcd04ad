"""Starts, kills and stops a real vLLM on a CPU, for the benchmarks of engines."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx2

SECONDS_TO_START = 600
#: a server that gives hidden states, and writes nothing
POOLER = '{"task":"token_embed","use_activation":false}'
HIDDEN_STATES = ("--runner", "pooling", "--convert", "embed", "--pooler-config", POOLER)
#: the environment of a vLLM that takes weights and adapters
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
#: a CPU build dies of a request with a seed whose prompt it computes in chunks ("CPU Generator does not use offset")
WRITING = ("--enable-scale-out", "--skip-tokenizer-init", "--max-logprobs", "8", "--max-num-batched-tokens", "8192")
#: log-probabilities are those of the draws, after the temperature
PROCESSED = ("--logprobs-mode", "processed_logprobs")
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmProcess:
    """A vLLM that has been started, with all its processes. It may not have loaded its model yet: see `wait`."""

    def __init__(self, python: str, model: Path, port: int, options: tuple[str, ...], settings: Mapping[str, str]):
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-num-seqs", "8", "--served-model-name", model.name, *options]
        self.url, self._arguments = f"http://127.0.0.1:{port}", (python, model, port, options, settings)
        self._log = model.parent.joinpath(f"vllm-{port}.log").open("a+")
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | QUIET | settings,
            start_new_session=True,  # its engine is a process of its own, which must be killed with it
        )

    def wait(self) -> Self:
        """Wait until it answers. Raises RuntimeError with the end of its log if it does not."""
        end = time.monotonic() + SECONDS_TO_START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self._log.seek(0)
                raise RuntimeError(f"vLLM has not started:\n{self._log.read()[-3000:]}")
            time.sleep(0.5)
        return self

    def kill(self) -> None:
        """End all its processes with SIGKILL."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def start_again(self) -> "VllmProcess":
        """Another process with the same model and options at the same address."""
        return VllmProcess(*self._arguments)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/v1/models", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False


@contextmanager
def vllm(python: str, model: Path, *options: str, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """The URL of a server that has started. python: of an environment with vLLM. settings: environment variables."""
    process = start(python, model, *options, settings=settings)
    try:
        yield process.wait().url
    finally:
        process.stop()


def start(python: str, model: Path, *options: str, settings: Mapping[str, str] | None = None) -> VllmProcess:
    """Start a server at a free port of loopback; returns at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return VllmProcess(python, model, port, options, settings or {})
