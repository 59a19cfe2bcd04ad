"""vLLM and SGLang as teachers: recorded answers of a real vLLM, and servers that answer in the same forms."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit.faulty_proxy import busy, proxy_to, reset
from kit.runs import save_model, session_of, write_run
from kit.stub_engines import Engine, Handler, Sglang, Vllm, serving
from kit.teacher_gradients import assert_close, gradients, gradients_of_signals, log_probs_TV
from torch import Tensor
from torch.nn.functional import normalize

from stillhouse.config import ConfigError
from stillhouse.data import MicroBatch
from stillhouse.objective import Chosen, TopK
from stillhouse.run.run import distill
from stillhouse.run.session import Session
from stillhouse.serving.client import signal_proof
from stillhouse.serving.engines.api import ServerInfo
from stillhouse.serving.engines.vllm import VllmApi
from stillhouse.signals import SignalsLostError
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

RECORDED = Path(__file__).parents[1] / "kit" / "engines"
TOKENS = np.array([5, 17, 250, 999, 3, 42])
KINDS: dict[str, type[Handler]] = {"vllm": Vllm, "sglang": Sglang}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder / "teacher")


def test_a_recorded_answer_of_vllms_pooling_is_read() -> None:
    document = DocumentRows(TOKENS, range(2, 6))
    [(_, call)] = VllmApi().calls(ServerInfo("", "t"), SignalSpec("hidden", "bfloat16"), 128, [document])
    headers = json.loads((RECORDED / "pool_bytes.headers.json").read_text())
    headers["metadata"] = headers["metadata"].replace('"native"', '"little"')  # what the client asks for
    content = (RECORDED / "pool_bytes.bin").read_bytes()
    [found] = call.parse(httpx2.Response(200, headers={"metadata": headers["metadata"]}, content=content))
    whole_SE = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(6, 128)
    assert torch.equal(found["hidden"], whole_SE[2:6])
    for damaged in (content[:-2], content[:-2] + b"\xff\x7f"):
        with pytest.raises(ValueError, match=r"bytes for|not finite"):
            call.parse(httpx2.Response(200, headers={"metadata": headers["metadata"]}, content=damaged))


def test_a_recorded_answer_of_vllms_prompt_logprobs_is_read() -> None:
    recorded = json.loads((RECORDED / "compl_prompt_logprobs.json").read_text())
    spec = SignalSpec("top_k", "float32", 2, 1.0)
    document = DocumentRows(TOKENS, range(1, 5))
    [(_, call)] = VllmApi().calls(ServerInfo("", "t"), spec, 0, [document])
    answer = httpx2.Response(200, content=json.dumps(recorded["response"]).encode())
    [found] = call.parse(answer)
    # row 1 is the distribution of token 2, which is entry 2 of the answer; the actual token 250 is not among the best
    assert found["ids"][0].tolist() == [130, 276]
    assert found["log_probs"][0].tolist() == pytest.approx([-2.802788734436035, -2.859649181365967])
    tail = np.log(1 - np.exp(-2.802788734436035) - np.exp(-2.859649181365967))
    assert found["tail_log_prob"][0].item() == pytest.approx(tail, abs=1e-6)
    shifted = DocumentRows(np.roll(TOKENS, 1), range(1, 5))
    [(_, call)] = VllmApi().calls(ServerInfo("", "t"), spec, 0, [shifted])
    with pytest.raises(ValueError, match="row 1 lacks token 17, which follows it: the rows are shifted"):
        call.parse(answer)


def test_the_stub_answers_in_the_recorded_forms(engine: Engine) -> None:
    def names(value: Any) -> Any:
        """The structure of what the client reads."""
        choice = value["choices"][0]
        return [None if row is None else sorted(next(iter(row.values()))) for row in choice["prompt_logprobs"][:2]]

    with serving(Vllm, engine) as url:
        body = {"prompt": TOKENS.clip(max=200).tolist(), "prompt_logprobs": 2}
        completion = httpx2.post(f"{url}/v1/completions", json=body).json()
        recorded = json.loads((RECORDED / "compl_prompt_logprobs.json").read_text())["response"]
        assert names(completion) == names(recorded)
        model = httpx2.get(f"{url}/v1/models").json()["data"][0]
        assert model.keys() <= json.loads((RECORDED / "models.json").read_text())["response"]["data"][0].keys()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_hidden_states_give_the_gradients_of_the_teacher_in_the_job(
    folder: Path, engine: Engine, kind: str, temperature: float
) -> None:
    with serving(KINDS[kind], engine) as url:
        served = {"teacher.url": url, "teacher.model": str(folder / "teacher")}
        found = gradients(folder, **served, **{"objective.temperature": temperature})
    assert_close(found, gradients(folder, **{"objective.temperature": temperature}))


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_likeliest_ids_give_the_gradients_of_the_teachers_own(folder: Path, engine: Engine, kind: str) -> None:
    with serving(KINDS[kind], engine) as url:
        served = {"teacher.url": url, "teacher.signal": "top_k", "teacher.top_k": 7}
        if kind == "sglang":
            served["teacher.model"] = str(folder / "teacher")
        found = gradients(folder, **served)

    def likeliest(session: Session, micro_batch: MicroBatch) -> TopK:
        log_p_TV = log_probs_TV(session, micro_batch, 1.0)
        best_TK, ids_TK = log_p_TV.topk(7)
        outside_T = log_p_TV.scatter(1, ids_TK, -torch.inf).logsumexp(1)
        return TopK(ids_TK, best_TK.float(), "bucket", outside_T.float(), 1.0)

    assert_close(found, gradients_of_signals(folder, likeliest))


def test_ids_that_the_student_chooses_give_the_gradients_of_the_teachers_own(folder: Path, engine: Engine) -> None:
    with serving(Vllm, engine) as url:
        served = {"teacher.url": url, "teacher.model": str(folder / "teacher")}
        found = gradients(folder, **served, **{"teacher.signal": "chosen", "teacher.top_k": 7})

    def chosen(session: Session, micro_batch: MicroBatch) -> Chosen:
        log_p_TV = log_probs_TV(session, micro_batch, 1.0)
        with torch.no_grad():
            ids_TK = session.student(**micro_batch.inputs).flatten(0, 1).topk(7).indices
        outside_T = log_p_TV.scatter(1, ids_TK, -torch.inf).logsumexp(1)
        return Chosen(ids_TK, log_p_TV.gather(1, ids_TK).float(), "bucket", outside_T.float(), 1.0)

    assert_close(found, gradients_of_signals(folder, chosen))


def test_a_vllm_that_scores_no_chosen_ids_is_refused_in_its_own_words(folder: Path) -> None:
    with serving(Vllm, Engine(folder / "teacher", scores_ids=False)) as url:
        settings = {"teacher.url": url, "teacher.model": str(folder / "teacher"), "teacher.signal": "chosen"}
        with pytest.raises(ConfigError, match=r"teacher.url: .* requires the V2 model runner"):
            session_of(folder, cached=True, **settings, **{"teacher.top_k": 7})


@pytest.mark.parametrize("wrong", ["shifted", "few", "pickle", "above one"])
def test_wrong_scores_of_chosen_ids_are_refused(
    folder: Path, engine: Engine, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(file: Any, array: np.ndarray, **_: Any) -> None:
        changed = {
            "shifted": lambda: np.roll(array, 1, 0),
            "few": lambda: array[:, 1:],
            "pickle": lambda: array.astype(object),
            "above one": lambda: array * 0,
        }[wrong]()
        save(file, changed, allow_pickle=True)

    save = np.save
    monkeypatch.setattr(np, "save", saved)
    message = {"shifted": "scores chosen ids otherwise than", "few": "expected one number for each"}.get(wrong, "")
    with serving(Vllm, engine) as url:
        settings = {"teacher.url": url, "teacher.model": str(folder / "teacher"), "teacher.signal": "chosen"}
        with pytest.raises(ConfigError, match=f"teacher.url: .*{message}"):
            session_of(folder, cached=True, **settings, **{"teacher.top_k": 7, "teacher.timeout": 1.0})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a temperature that the engine ignores": (
        {"teacher.signal": "top_k", "objective.temperature": 2.0},
        "gives top_k only at temperature 1, whatever it is asked for; the objective has temperature 2",
    ),
    "a cap below K": ({"teacher.signal": "top_k", "teacher.top_k": 65}, "greater than max allowed: 64"),
    "hidden states without the head": (
        {},
        "teacher.model: is missing: hidden states from vllm need",
    ),
    "draws": ({"teacher.signal": "sampled"}, "(vllm) cannot give the signal sampled: expected chosen or hidden or"),
    "chosen ids without the size of the vocabulary": (
        {"teacher.signal": "chosen", "teacher.top_k": 7},
        "teacher.model: is missing: ids that the student chooses for vllm need",
    ),
    "another engine than is said": ({"teacher.api": "stillhouse"}, "/v1/info answers 404"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_vllm_cannot_give_is_refused(folder: Path, engine: Engine, case: str) -> None:
    settings, message = REFUSED[case]
    with serving(Vllm, engine) as url, pytest.raises(ConfigError, match=re.escape(message)):
        session_of(folder, cached=True, **{"teacher.url": url, "teacher.timeout": 5.0}, **settings)


def test_an_engine_without_a_tokenizer_needs_the_model(folder: Path) -> None:
    with serving(Vllm, Engine(folder / "teacher", has_tokenizer=False)) as url:
        settings = {"teacher.url": url, "teacher.signal": "top_k", "teacher.top_k": 7}
        with pytest.raises(ConfigError, match=r"teacher.model: is missing: .* does not tell its tokenizer"):
            session_of(folder, cached=True, **settings)
        session_of(folder, cached=True, **settings, **{"teacher.model": str(folder / "teacher")}).close()


def test_an_engine_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "qwen3", text=["zebra quagga zebra quagga okapi okapi"] * 9)
    with serving(Vllm, Engine(other)) as url:
        settings = {"teacher.url": url, "teacher.signal": "top_k", "teacher.top_k": 7}
        with pytest.raises(ConfigError, match="has another tokenizer than the student"):
            session_of(folder, cached=True, **settings)


WRONG_STATES: dict[str, tuple[Callable[[Engine, list[int]], Tensor], str]] = {
    "normalised": (
        lambda engine, tokens: normalize(Engine.hidden_SE(engine, tokens), dim=1),
        "hidden states of length 1: expected a server that does not normalise them",
    ),
    "no layers": (
        lambda engine, tokens: engine.model.model.norm(
            engine.model.model.embed_tokens(torch.tensor(tokens))
        ).detach(),
        "no row depends on an earlier token: the server has lost the teacher's layers",
    ),
}


@pytest.mark.parametrize("case", list(WRONG_STATES))
def test_wrong_hidden_states_are_refused_without_the_teachers_weights(
    folder: Path, engine: Engine, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, message = WRONG_STATES[case]
    monkeypatch.setattr(engine, "hidden_SE", partial(states, engine))
    settings = {"teacher.model": str(folder / "teacher"), "teacher.prove": "never"}
    with serving(Vllm, engine) as url, pytest.raises(ConfigError, match=message):
        session_of(folder, cached=True, **{"teacher.url": url}, **settings)


def test_a_run_is_not_resumed_with_another_teacher(folder: Path, tmp_path: Path) -> None:
    """vLLM does not tell who its teacher is, so the run's folder has what it answered at the start."""
    save_model(tmp_path / "other", "qwen3", seed=9)
    out = tmp_path / "out"
    settings = {"teacher.model": str(folder / "teacher"), "teacher.prove": "never", "out": str(out)}
    with serving(Vllm, Engine(folder / "teacher")) as url:
        distill(write_run(folder, cached=True, **settings, **{"teacher.url": url}))
    shutil.rmtree(out / "model")
    with serving(Vllm, Engine(tmp_path / "other")) as url:
        config = write_run(folder, cached=True, **settings, **{"teacher.url": url})
        with pytest.raises(ValueError, match="does not give the signals that it gave when this run began"):
            distill(config)
        (out / "served_teacher.safetensors").unlink()
        with pytest.raises(ValueError, match=r"served_teacher\.safetensors is missing"):
            distill(config)


def test_a_server_that_comes_back_with_another_teacher_is_found(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", "qwen3", seed=9)
    settings = {"teacher.model": str(folder / "teacher"), "teacher.prove": "never"}
    with (
        serving(Vllm, Engine(folder / "teacher")) as first,
        serving(Vllm, Engine(tmp_path / "other")) as second,
        proxy_to(first) as (proxy, url),
    ):
        session = session_of(folder, cached=True, **{"teacher.url": url}, **settings)
        own = session.shard(session.step_schedule.micro_batches(session.train, 0))
        session.source.request(own).result()
        proxy.upstream, proxy.faults = second, [reset]
        with pytest.raises(SignalsLostError, match="no longer gives the signals that it gave at the start"):
            session.source.request(own).result()
        session.close()


def test_no_answer_of_a_returned_server_is_used_before_it_is_proven(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers a step, and is then too busy for the proof."""
    monkeypatch.setattr(signal_proof, "REPEAT_SECONDS", 0.3)
    save_model(tmp_path / "other", "qwen3", seed=9)
    settings = {"teacher.model": str(folder / "teacher"), "teacher.prove": "never"}
    with (
        serving(Vllm, Engine(folder / "teacher")) as first,
        serving(Vllm, Engine(tmp_path / "other")) as second,
        proxy_to(first) as (proxy, url),
    ):
        session = session_of(folder, cached=True, **{"teacher.url": url}, **settings)
        own = session.shard(session.step_schedule.micro_batches(session.train, 0))
        before = proxy.scored
        session.source.request(own).result()
        requests = proxy.scored - before
        proxy.upstream = second
        proxy.after(requests, [busy] * 8)
        proxy.faults.insert(0, reset)
        with pytest.raises(SignalsLostError, match="no longer gives the signals that it gave at the start"):
            session.source.request(own).result()
        assert proxy.scored - before > 3 * requests
        session.close()


def test_another_model_than_the_named_one_is_refused(folder: Path, tmp_path: Path) -> None:
    """The weights of teacher.model are here, so the server is compared with them."""
    save_model(tmp_path / "other", "qwen3", seed=9)
    with serving(Vllm, Engine(tmp_path / "other")) as url:
        settings = {"teacher.url": url, "teacher.model": str(folder / "teacher")}
        with pytest.raises(ConfigError, match="and the model in this process give different signals"):
            session_of(folder, cached=True, **settings)
        session_of(folder, cached=True, **settings, **{"teacher.prove": "never"}).close()


@pytest.mark.parametrize("sharpness", [0.01, 3.0])
def test_the_cross_entropy_of_a_few_ids_is_near_that_of_all(sharpness: float) -> None:
    """A teacher that knows nothing must not look like one that knows everything, because its ids miss the tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(251, (400,), generator=draw)
    log_probs_NV = (sharpness * torch.randn(399, 251, generator=draw)).log_softmax(-1)
    top = log_probs_NV.topk(8)
    tail_N = torch.log1p(-top.values.exp().sum(-1))
    found = [{"ids": top.indices, "log_probs": top.values, "tail_log_prob": tail_N}]
    probes = [DocumentRows(tokens.numpy(), range(399))]
    exact = -float(log_probs_NV.gather(1, tokens[1:, None]).mean())
    (words,) = signal_proof._cross_entropy(probes, found, None, 251)
    assert words.startswith("cross-entropy about ")
    assert words.endswith(" nats per token, 5.53 if it knew nothing")
    estimate = float(words.split()[2])
    # the mean of log p over the other tokens is at most the log of their mean
    assert exact - 5 < estimate < exact + 0.01
    assert estimate == pytest.approx(exact, abs=0.01) or sharpness > 1
    (words,) = signal_proof._cross_entropy(probes, found, None, None)
    assert words.startswith("cross-entropy at least ")
