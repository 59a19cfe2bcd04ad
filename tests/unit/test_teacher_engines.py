"""vLLM and SGLang as teachers: recorded answers of a real vLLM, and servers that answer in the same forms."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit import first_is_quick
from kit.config_cases import refused_calls
from kit.faulty_proxy import proxy_to
from kit.runs import save_model, session_of, write_run
from kit.stub_servers import StubHandler, StubModel, StubServer, busy, reset, stub_server
from kit.stub_sglang import Sglang
from kit.stub_vllm import Vllm
from kit.teacher_gradients import assert_close, first_signals, gradients, gradients_of_signals, ids_signal
from torch import Tensor
from torch.nn.functional import normalize

from stillhouse.config import ConfigError
from stillhouse.run.run import distill
from stillhouse.serving.client import signal_proof
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.server_api import ServerInfo
from stillhouse.serving.client.vllm import VllmApi
from stillhouse.signals import SignalsLostError
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

RECORDED = Path(__file__).parents[1] / "kit" / "engines"
TOKENS = np.array([5, 17, 250, 999, 3, 42])
CHOSEN = {"teacher.signal": "chosen", "teacher.top_k": 7}
TOP_K = {"teacher.signal": "top_k", "teacher.top_k": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_run(folder)
    save_model(folder / "other", "qwen3", seed=9)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[StubServer]:
    with stub_server(Vllm, folder / "teacher") as running:
        yield running


@pytest.fixture
def other(folder: Path) -> Iterator[StubServer]:
    with stub_server(Vllm, folder / "other") as running:
        yield running


@pytest.fixture
def settings(folder: Path, server: StubServer) -> dict[str, Any]:
    return {"teacher.url": server.url, "teacher.model": str(folder / "teacher"), "teacher.timeout": 5.0}


def test_recorded_answers_of_vllm_are_read() -> None:
    document = DocumentRows(TOKENS, range(2, 6))
    [call] = VllmApi().calls(ServerInfo("", "t"), SignalSpec("hidden", "bfloat16"), 128, [document])
    headers = json.loads((RECORDED / "pool_bytes.headers.json").read_text())
    headers["metadata"] = headers["metadata"].replace('"native"', '"little"')  # what the client asks for
    content = (RECORDED / "pool_bytes.bin").read_bytes()
    [signal] = call.parse(HttpAnswer(200, content, {"metadata": headers["metadata"]}))
    hidden_SE = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(6, 128)
    assert torch.equal(signal["hidden"], hidden_SE[2:6])
    with pytest.raises(ValueError, match="bytes for"):
        call.parse(HttpAnswer(200, content[:-2], {"metadata": headers["metadata"]}))
    recorded = json.loads((RECORDED / "compl_prompt_logprobs.json").read_text())
    spec = SignalSpec("top_k", "float32", 2, 1.0)
    document = DocumentRows(TOKENS, range(1, 5))
    [call] = VllmApi().calls(ServerInfo("", "t"), spec, 0, [document])
    answer = HttpAnswer(200, json.dumps(recorded["response"]).encode())
    [signal] = call.parse(answer)
    # row 1 is the distribution of token 2, which is entry 2 of the answer; the actual token 250 is not among the best
    assert signal["ids"][0].tolist() == [130, 276]
    assert signal["log_probs"][0].tolist() == pytest.approx([-2.802788734436035, -2.859649181365967])
    tail = np.log(1 - np.exp(-2.802788734436035) - np.exp(-2.859649181365967))
    assert signal["tail_log_prob"][0].item() == pytest.approx(tail, abs=1e-6)
    shifted = DocumentRows(np.roll(TOKENS, 1), range(1, 5))
    [call] = VllmApi().calls(ServerInfo("", "t"), spec, 0, [shifted])
    with pytest.raises(ValueError, match="row 1 lacks token 17, which follows it: the rows are shifted"):
        call.parse(answer)


def test_the_stub_answers_in_the_recorded_forms(server: StubServer) -> None:
    def names(value: Any) -> Any:
        choice = value["choices"][0]
        return [None if row is None else sorted(next(iter(row.values()))) for row in choice["prompt_logprobs"][:2]]

    body = {"prompt": TOKENS.clip(max=200).tolist(), "prompt_logprobs": 2}
    completion = httpx2.post(f"{server.url}/v1/completions", json=body).json()
    recorded = json.loads((RECORDED / "compl_prompt_logprobs.json").read_text())["response"]
    assert names(completion) == names(recorded)
    model = httpx2.get(f"{server.url}/v1/models").json()["data"][0]
    assert model.keys() <= json.loads((RECORDED / "models.json").read_text())["response"]["data"][0].keys()


@pytest.mark.parametrize(
    ("kind", "signal", "temperature"),
    [
        *((Vllm, "hidden", 2.0), (Sglang, "hidden", 1.0), (Vllm, "top_k", 1.0), (Sglang, "top_k", 1.0)),
        (Vllm, "chosen", 1.0),
    ],
)
def test_signals_give_the_gradients(folder: Path, kind: type[StubHandler], signal: str, temperature: float) -> None:
    here = {"objective.temperature": temperature}
    with stub_server(kind, folder / "teacher") as server:
        served = here | {"teacher.url": server.url, "teacher.signal": signal, "teacher.top_k": 7}
        if (kind, signal) != (Vllm, "top_k"):
            served["teacher.model"] = str(folder / "teacher")
        from_engine = gradients(folder, **served)
    if signal == "hidden":
        assert_close(from_engine, gradients(folder, **here))
    else:
        assert_close(from_engine, gradients_of_signals(folder, ids_signal(signal, temperature)))


@pytest.mark.parametrize("wrong", first_is_quick(["shifted", "few", "pickle", "above one"]))
def test_wrong_scores(folder: Path, settings: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(file: Any, array: np.ndarray, **_: Any) -> None:
        changed = {
            **{"shifted": lambda: np.roll(array, 1, 0), "few": lambda: array[:, 1:]},
            **{"pickle": lambda: array.astype(object), "above one": lambda: array * 0},
        }[wrong]()
        save(file, changed, allow_pickle=True)

    save = np.save
    monkeypatch.setattr(np, "save", saved)
    messages = {"shifted": "gives chosen ids other log-probabilities than", "few": "expected one number for each"}
    message = messages.get(wrong, "")
    with pytest.raises(ConfigError, match=f"teacher.url: .*{message}"):
        session_of(folder, cached=True, **settings | CHOSEN)


@pytest.mark.parametrize(("call", "message"), refused_calls("engines of teachers"))
def test_what_vllm_cannot_give_is_refused(folder: Path, call: str, message: str) -> None:
    options, settings = eval(call)
    if "teacher.model" in settings:
        settings = settings | {"teacher.model": str(folder / "teacher")}
    with (
        stub_server(Vllm, folder / "teacher", **options) as server,
        pytest.raises(ConfigError, match=re.escape(message)),
    ):
        session_of(folder, cached=True, **{"teacher.url": server.url, "teacher.timeout": 5.0}, **settings)


def test_an_engine_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    foreign = save_model(tmp_path / "other", "qwen3", text=("zebra quagga zebra quagga okapi okapi",) * 9)
    message = r"has another tokenizer than the student: it makes \d+ ids of a text that has \d+"
    with stub_server(Vllm, foreign) as server, pytest.raises(ConfigError, match=message):
        session_of(folder, cached=True, **{"teacher.url": server.url}, **TOP_K)


WRONG_STATES: dict[str, tuple[Callable[[StubModel, list[int]], Tensor], str]] = {
    "normalised": (
        lambda model, tokens: normalize(StubModel.hidden_SE(model, tokens), dim=1),
        "hidden states of length 1: expected a server that does not normalise them",
    ),
    "no layers": (
        lambda model, tokens: model.model.model.norm(model.model.model.embed_tokens(torch.tensor(tokens))).detach(),
        "no row depends on an earlier token: the server has lost the teacher's layers",
    ),
}


@pytest.mark.parametrize("case", list(WRONG_STATES))
def test_wrong_hidden_states(folder: Path, server: StubServer, settings: dict[str, Any], case: str) -> None:
    states, message = WRONG_STATES[case]
    server.model.change(hidden_SE=partial(states, server.model))
    with pytest.raises(ConfigError, match=message):
        session_of(folder, cached=True, **settings | {"teacher.prove": "never"})


def test_a_run_keeps_its_teacher(folder: Path, settings: dict[str, Any], other: StubServer, tmp_path: Path) -> None:
    """vLLM does not tell who its teacher is, so the run's folder has what it answered at the start."""
    out = tmp_path / "out"
    settings |= {"teacher.prove": "never", "out": str(out)}
    distill(write_run(folder, cached=True, **settings))
    shutil.rmtree(out / "model")
    config = write_run(folder, cached=True, **settings | {"teacher.url": other.url})
    with pytest.raises(ValueError, match="does not give the signals that it gave when this run began"):
        distill(config)
    (out / "served_teacher.safetensors").unlink()
    with pytest.raises(ValueError, match=r"served_teacher\.safetensors is missing"):
        distill(config)


@pytest.mark.parametrize("is_busy", [False, True], ids=["", "too busy for the proof at first"])
def test_no_answer_of_a_returned_server_is_used_before_it_is_proven(
    folder: Path, settings: dict[str, Any], other: StubServer, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """It comes back with another teacher."""
    monkeypatch.setattr(signal_proof, "REPEAT_SECONDS", 0.3)
    settings |= {"teacher.prove": "never", "teacher.timeout": 60.0}
    with proxy_to(settings["teacher.url"]) as (proxy, url):
        session = session_of(folder, cached=True, **settings | {"teacher.url": url})
        before = proxy.scored
        first_signals(session)
        requests = proxy.scored - before
        proxy.upstream = other.url
        if is_busy:
            proxy.after(requests, [busy] * 8)
        proxy.faults.insert(0, reset)
        with pytest.raises(SignalsLostError, match="no longer gives the signals that it gave at the start"):
            first_signals(session)
        assert proxy.scored - before > (3 if is_busy else 1) * requests
        session.close()


def test_another_model_than_named_is_refused(folder: Path, settings: dict[str, Any], other: StubServer) -> None:
    """The weights of teacher.model are here, so the server is compared with them."""
    settings |= {"teacher.url": other.url}
    with pytest.raises(ConfigError, match="and the model in this process give different signals"):
        session_of(folder, cached=True, **settings)
    session_of(folder, cached=True, **settings | {"teacher.prove": "never"}).close()


@pytest.mark.parametrize("sharpness", [0.01, 3.0])
def test_the_cross_entropy_of_a_few_ids_is_near_that_of_all(sharpness: float) -> None:
    """A teacher that knows nothing must not look like one that knows everything, because its ids miss the tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(251, (400,), generator=draw)
    log_probs_NV = (sharpness * torch.randn(399, 251, generator=draw)).log_softmax(-1)
    top = log_probs_NV.topk(8)
    tail_N = torch.log1p(-top.values.exp().sum(-1))
    answers = [{"ids": top.indices, "log_probs": top.values, "tail_log_prob": tail_N}]
    probes = [DocumentRows(tokens.numpy(), range(399))]
    exact = -float(log_probs_NV.gather(1, tokens[1:, None]).mean())
    (words,) = signal_proof._cross_entropy(probes, answers, None, 251)
    assert words.startswith("cross-entropy about ")
    assert words.endswith(" nats per token, 5.53 if it were uniform")
    estimate = float(words.split()[2])
    # the mean of log p over the other tokens is at most the log of their mean
    assert exact - 5 < estimate < exact + 0.01
    assert estimate == pytest.approx(exact, abs=0.01) or sharpness > 1
    (words,) = signal_proof._cross_entropy(probes, answers, None, None)
    assert words.startswith("cross-entropy at least ")
