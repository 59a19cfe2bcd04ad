"""A teacher behind `stillhouse serve`: the live teacher's gradients; what is wrong with a server is refused."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import slow
from kit.faulty_proxy import proxy_to, shortened, silent, slow_answer, true, truncated, with_body
from kit.layout_runs import assert_same_weights
from kit.runs import edit_json, metrics, refused_changes, run, save_model, session_of, write_run
from kit.serving import Server
from kit.stub_servers import Fault, broken, busy, reset
from kit.teacher_gradients import assert_close, first_signals, gradients, gradients_of_signals, ids_signal
from safetensors.torch import load, save
from torch import Tensor

from stillhouse.config import ConfigError
from stillhouse.config.servers import ServerError
from stillhouse.data import MicroBatch
from stillhouse.loops.session import Session
from stillhouse.objective import TEACHER, Sampled
from stillhouse.run.run import distill
from stillhouse.serving.client.pool import ServerPool
from stillhouse.serving.client.stillhouse import StillhouseApi
from stillhouse.serving.wire import KEY, header_of
from stillhouse.signals import SignalsLostError
from stillhouse.signals.cache_files import document_id
from stillhouse.signals.extract import draw_ids, uniform_numbers
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: requests of the proof at the start of a run
PROOF = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with Server(folder / "teacher") as started:
        yield started.url


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_hidden_states_give_the_gradients_of_the_live_teacher(folder: Path, server: str, temperature: float) -> None:
    settings = {"objective.temperature": temperature}
    assert_close(gradients(folder, **{"teacher.url": server}, **settings), gradients(folder, **settings))


@pytest.mark.parametrize("kind", ["top_k", "chosen"])
def test_ids_give_the_gradients_of_a_signal_from_the_teachers_logits(folder: Path, server: str, kind: str) -> None:
    settings = {"objective.temperature": 2.0, "objective.loss": "reverse_kl"}
    served = {"teacher.url": server, "teacher.signal": kind, "teacher.top_k": 7}
    expected = gradients_of_signals(folder, ids_signal(kind, 2.0), **settings)
    assert_close(gradients(folder, **served, **settings), expected)


def test_samples_give_the_gradients_of_the_same_samples_here(folder: Path, server: str) -> None:
    settings = {"objective.temperature": 2.0, "objective.loss": "forward_kl"}
    served = {"teacher.url": server, "teacher.signal": "sampled", "teacher.top_k": 11}

    def sampled(session: Session, micro_batch: MicroBatch) -> Sampled:
        assert session.models.teacher is not None
        exact, position_T = session.models.teacher.signal(**micro_batch.inputs), micro_batch.position_ids_BS.flatten()
        uniform_TM = torch.zeros(len(position_T), 11, dtype=torch.float64)
        for document in micro_batch.document_T.unique().tolist():
            rows_C = (micro_batch.document_T == document).nonzero()[:, 0]
            if document >= 0:
                tokens = session.data.train.documents.tokens(document)
                numbers = uniform_numbers(document_id(tokens), range(len(tokens)), 11)
                uniform_TM[rows_C] = torch.from_numpy(numbers)[position_T[rows_C]]
        samples = draw_ids(exact.hidden_TE, exact.head, uniform_TM, 2.0)
        return Sampled(samples["ids"], samples["counts"] / 11)

    expected = gradients_of_signals(folder, sampled, **settings)
    assert_close(gradients(folder, **served, **settings), expected)


def test_half_precision_on_the_wire_changes_gradients_by_its_rounding(folder: Path, server: str) -> None:
    rounded = gradients(folder, **{"teacher.url": server, "teacher.dtype": "bfloat16"})[1]
    for name, exact in gradients(folder)[1].items():
        assert 0 < (rounded[name] - exact).norm() < 2e-2 * exact.norm(), name


def rewritten(change: Callable[[dict[str, Tensor]], None]) -> Callable[[bytes], bytes]:
    """Applies `change` to the tensors of an answer of /v1/score."""

    def body(content: bytes) -> bytes:
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}
        change(tensors)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return save(contiguous, {KEY: json.dumps(header_of(content, KEY))})

    return body


def shift_rows(tensors: dict[str, Tensor]) -> None:
    for name in tensors.keys() - {"offsets"}:
        tensors[name] = tensors[name].roll(1, 0)


def make_uniform(tensors: dict[str, Tensor]) -> None:
    if "hidden" in tensors:
        tensors["hidden"][:] = tensors["hidden"][0].clone()
    else:
        tensors["log_probs"].fill_(-5.99)
        tensors["tail_log_prob"].fill_(math.log(1 - tensors["log_probs"].shape[1] * math.exp(-5.99)))


def put_nan(tensors: dict[str, Tensor]) -> None:
    next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[3] = torch.nan


def fewer_ids(tensors: dict[str, Tensor]) -> None:
    tensors.update(ids=tensors["ids"][:, :5], log_probs=tensors["log_probs"][:, :5])


TOP_9 = {"teacher.signal": "top_k", "teacher.top_k": 9}


@pytest.mark.parametrize(("case", "message"), refused_changes("signals of a server"))
def test_a_server_with_wrong_signals_is_refused(folder: Path, server: str, case: str, message: str) -> None:
    change, settings = eval(case)
    with proxy_to(server) as (proxy, url):
        proxy.change = rewritten(change)
        with pytest.raises((ConfigError, OSError), match=message):
            session_of(folder, cached=True, **{"teacher.url": url, "teacher.timeout": 20.0}, **settings)


def test_a_server_that_ignores_the_temperature_is_refused(folder: Path, server: str) -> None:
    def with_temperature(content: bytes, temperature: float) -> bytes:
        return save(load(content), {KEY: json.dumps(header_of(content, KEY) | {"temperature": temperature})})

    def at_temperature_1(handler: Any, answer: Any) -> None:
        request = with_temperature(handler.body, 1.0)
        at_1 = handler.proxy.client.post(server + "/v1/score", content=request, headers=dict(handler.headers))
        claimed = header_of(handler.body, KEY)["temperature"]
        handler.answer(200, with_temperature(at_1.content, claimed), answer)

    settings = TOP_9 | {"objective.temperature": 2.0}
    with proxy_to(server) as (proxy, url):
        proxy.faults = [at_temperature_1] * 99
        with pytest.raises(ConfigError, match="ignores the temperature 2"):
            session_of(folder, cached=True, **{"teacher.url": url}, **settings)


def test_another_tokenizer_template_or_end_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "qwen3", text=("zebra quagga zebra quagga okapi okapi",) * 9)
    with Server(other) as started, pytest.raises(ValueError, match="student and teacher have different tokenizers"):
        session_of(folder, cached=True, **{"teacher.url": started.url})
    for name, key, value in (("eos", "eos_token", "<pad>"), ("chat_template", "chat_template", "{{ messages }}")):
        changed = save_model(tmp_path / name, "qwen3")
        edit_json(changed / "tokenizer_config.json", **{key: value})
        with Server(changed) as started:
            settings: dict[str, Any] = {"teacher.url": started.url}
            if name == "eos":
                with pytest.raises(ValueError, match=f"teacher.accept: .* {name} in this list"):
                    session_of(folder, cached=True, **settings)
            session_of(folder, cached=True, **settings, **{"teacher.accept": [name]}).close()


def test_a_wrong_token_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Authorization": "Bearer right"}
    with Server(folder / "teacher", environment={"STILLHOUSE_TOKEN": "right"}, headers=headers) as started:
        with pytest.raises(ConfigError, match=r"/v1/info answers 401: expected 200; check the bearer token"):
            session_of(folder, cached=True, **{"teacher.url": started.url})
        monkeypatch.setenv("STILLHOUSE_TOKEN", "right")
        session_of(folder, cached=True, **{"teacher.url": started.url}).close()


#: true answers are between the faults, because pauses become longer with each failure in a row
FAULTS: dict[str, list[Fault]] = {
    "errors and damaged answers": [
        fault
        for kind in (truncated, shortened, with_body(rewritten(put_nan)), reset, broken, slow_answer)
        for fault in (kind, true)
    ],
    "a storm of 429": [busy] * 30,
    "a silent server": [silent],
}


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The run with the teacher in the job. The server's batches differ from its, so the last bits may differ."""
    return distill(write_run(folder, out=str(folder / "undisturbed")))


@pytest.mark.parametrize("fault", [*list(FAULTS)[:1], *map(slow, [list(FAULTS)[1], "a silent server"])])
def test_a_run_survives_and_ends_with_the_same_weights(
    folder: Path, server: str, undisturbed: Path, fault: str, tmp_path: Path
) -> None:
    with proxy_to(server) as (proxy, url):
        settings = {"teacher.url": url, "teacher.timeout": 8.0, "out": str(tmp_path / "out")}
        proxy.after(PROOF, FAULTS[fault])
        distill(write_run(folder, cached=True, **settings))
        assert not proxy.faults
    assert_same_weights(tmp_path / "out", undisturbed, 1e-5)


@pytest.mark.parametrize("answered", [pytest.param(5, id="in a step"), slow(8, id="in the last evaluation")])
def test_without_any_server_a_run_saves_its_steps_and_stops(
    folder: Path, server: str, undisturbed: Path, tmp_path: Path, answered: int
) -> None:
    out = tmp_path / "out"
    with proxy_to(server) as (proxy, url):
        settings = {"teacher.timeout": 1.5, "out": str(out)}
        write_run(folder, cached=True, **settings, **{"teacher.url": url})
        proxy.after(PROOF + answered, [reset] * 10_000)
        shown = run("distill", folder / "run.yaml", code=1)
    assert "no server of the teacher has answered for 1.5 seconds" in shown.err
    [saved] = (out / "checkpoints").iterdir()
    assert f"the run has stopped after a checkpoint: {saved}" in shown.err
    assert 0 < int(saved.name.removeprefix("step-")) <= 6
    write_run(folder, cached=True, **settings, **{"teacher.url": server})
    assert f"resuming from {saved}" in run("distill", folder / "run.yaml").out
    assert_same_weights(out, undisturbed, 1e-5)
    assert [line["step"] for line in metrics(out) if "eval/cross_entropy" in line] == [0, 6]


@pytest.mark.slow
def test_a_server_that_always_fails_does_not_end_the_run(folder: Path, server: str) -> None:
    """Its errors come faster than the other server's answers."""
    with proxy_to(server) as (first, one), proxy_to(server) as (second, two):
        session = session_of(folder, cached=True, **{"teacher.url": [one, two], "teacher.prove_every": 2})
        expected = [signals[TEACHER].hidden_TE for signals in first_signals(session)]
        first.faults, second.faults = [broken] * 10_000, [slow_answer] * 10_000
        for _ in range(3):
            again = [signals[TEACHER].hidden_TE for signals in first_signals(session)]
            for hidden_TE, expected_TE in zip(again, expected, strict=True):
                torch.testing.assert_close(hidden_TE, expected_TE)
        session.close()


def test_closing_ends_whatever_is_under_way(server: str) -> None:
    for seed in range(20):
        pool = ServerPool([server], 30.0)
        document = DocumentRows(np.arange(5, 30), range(24))
        info = StillhouseApi().describe(pool.asker(server), server)
        [call] = StillhouseApi().calls(info, SignalSpec("hidden", "float32"), info.width or 0, [document])

        def ask(pool: ServerPool = pool, call: Any = call) -> None:
            with contextlib.suppress(ServerError):
                while True:
                    pool.score([call])

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(seed / 500)
        pool.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_limits_of_the_server_are_kept(folder: Path) -> None:
    """Requests of at most its tokens, and a proof with at most its ids."""
    with Server(folder / "teacher", "--batch-tokens", 40, "--queue-tokens", 160, "--max-top-k", 9) as started:
        for settings in ({}, {"teacher.signal": "chosen", "teacher.top_k": 9}):
            gradients(folder, **{"teacher.url": started.url, "data.max_tokens": 32}, **settings)
        with pytest.raises(ConfigError, match="gives at most 9 ids per token, got top_k=10"):
            session_of(folder, cached=True, **TOP_9 | {"teacher.url": started.url, "teacher.top_k": 10})


def test_of_two_servers_one_may_die(folder: Path, server: str, undisturbed: Path, tmp_path: Path) -> None:
    others_share: list[int] = []

    def dead(*request: Any) -> None:
        others_share.append(other.scored)
        reset(*request)

    with proxy_to(server) as (other, url), proxy_to(server) as (dying, dying_url):
        dying.after(PROOF + 1, [dead] * 10_000)
        settings = {"teacher.url": [url, dying_url], "teacher.timeout": 20.0, "out": str(tmp_path / "out")}
        distill(write_run(folder, cached=True, **settings))
        assert others_share[0] > PROOF
    assert_same_weights(tmp_path / "out", undisturbed, 1e-5)


def test_another_teacher_behind_the_same_address_stops_the_run(folder: Path, server: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "qwen3", seed=9)
    with Server(other) as second, proxy_to(server) as (proxy, url):
        session = session_of(folder, cached=True, **{"teacher.url": url})
        proxy.upstream = second.url
        with pytest.raises(SignalsLostError, match="serves another teacher now"):
            first_signals(session)
        session.close()
        with pytest.raises(ConfigError, match="serve different teachers"):
            session_of(folder, cached=True, **{"teacher.url": [server, second.url]})


def test_weights_that_change_unnoticed_are_found_by_the_repeated_proof(folder: Path, server: str) -> None:
    def rotate(tensors: dict[str, Tensor]) -> None:
        tensors["hidden"] = tensors["hidden"].flip(1)

    with proxy_to(server) as (proxy, url):
        session = session_of(folder, cached=True, **{"teacher.url": url, "teacher.prove_every": 2})
        first_signals(session)
        proxy.change = rewritten(rotate)
        with pytest.raises(SignalsLostError, match="no longer gives the signals that it gave at the start"):
            first_signals(session)
        session.close()


@pytest.mark.parametrize("signal", ["hidden", "sampled"])
def test_a_cache_of_a_served_teacher_has_its_signals(folder: Path, server: str, signal: str, tmp_path: Path) -> None:
    """A server is asked once, and any number of runs train from what it said."""
    settings = {"objective.loss": "forward_kl"}
    write_run(folder, cached=True, **settings, **{"teacher.url": server})
    options = ("--signal", signal, *(("--top-k", "11") if signal == "sampled" else ()))
    shown = run("cache", folder / "run.yaml", "--out", tmp_path / "cache", *options).out
    assert f"of {folder / 'teacher'} for" in shown
    run("cache", "verify", tmp_path / "cache")
    live = {"teacher.url": server, "teacher.signal": signal, "teacher.top_k": 11 if signal == "sampled" else 64}
    cached = {"teacher.cache": str(tmp_path / "cache")}
    assert_close(gradients(folder, **settings, **cached), gradients(folder, **settings, **live))
