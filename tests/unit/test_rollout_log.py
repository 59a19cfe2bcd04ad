"""timeline.jsonl and samples.jsonl: their lines, what a resumed run removes from them, and the share of waiting."""

import json
import math
from pathlib import Path
from threading import Thread

import pytest

from stillhouse.output.folder import RunFolder
from stillhouse.output.records import CHARACTERS, SampleRecord, SampleToken
from stillhouse.output.rollout_log import TOKENS, RolloutLog


def sample(**changes) -> SampleRecord:
    values = {
        "step": 4, "prompt": "1+1=", "completion": "2", "length": 1,
        "tokens": [SampleToken("2", 0.25, 3, True)], "reward": 1.0,
        "advantage": -0.5, "finish": "stop", "source": "student", "staleness": 1,
    }  # fmt: skip
    return SampleRecord(**values | changes)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(folder: Path | None, step: int = 0, *seconds: float) -> RolloutLog:
    times = iter(seconds)
    return RolloutLog(folder and RunFolder(folder), step, lambda: next(times, 0.0))


def test_the_lines_of_both_files(tmp_path):
    with opened(tmp_path) as log:
        log.add(4, "trainer", "update", 1.0, 2.5)
        assert lines(tmp_path / "timeline.jsonl") == []
        log.write([sample()])
        span = {"step": 4, "lane": "trainer", "what": "update", "start": 1.0, "stop": 2.5}
        assert lines(tmp_path / "timeline.jsonl") == [span]
    assert lines(tmp_path / "samples.jsonl") == [
        {
            "step": 4, "prompt": "1+1=", "completion": "2", "length": 1, "reward": 1.0, "advantage": -0.5,
            "tokens": [{"text": "2", "divergence": 0.25, "version": 3, "target": True}],
            "finish": "stop", "source": "student", "staleness": 1, "reward_parts": {},
                "prompt_source": None,
        }
    ]  # fmt: skip


def test_samples_are_bounded_and_without_nan(tmp_path):
    token = SampleToken("a", math.nan, None, True)
    long = sample(prompt="p" * 5000 + "end", completion="c" * 5000, tokens=[token] * 600, length=600, reward=math.inf)
    with opened(tmp_path) as log:
        log.write([long] * 7)
    samples = lines(tmp_path / "samples.jsonl")
    assert len(samples) == 7
    assert (len(samples[0]["tokens"]), samples[0]["length"]) == (TOKENS, 600)
    assert len(samples[0]["prompt"]) == len(samples[0]["completion"]) == CHARACTERS
    assert samples[0]["prompt"].endswith("end")
    assert samples[0]["reward"] is samples[0]["tokens"][0]["divergence"] is None


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2, 2]), (3, [1, 3, 2, 2]), (9, [1, 3, 2, 4, 2])])
@pytest.mark.parametrize("half", ["", '{"step": 1, "la'])
def test_a_resumed_run_removes_the_lines_of_later_steps(tmp_path, step, kept, half):
    for name in ("timeline.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"step": n}) + "\n" for n in (1, 3, 2, 4, 2)) + half)
    with opened(tmp_path, step) as log:
        log.add(7, "teacher", "score", 1, 2)
        log.write([sample(step=7)])
    for name in ("timeline.jsonl", "samples.jsonl"):
        assert [line["step"] for line in lines(tmp_path / name)] == [*kept, 7]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("bad", [b"{", b"[]", b"5", b'{"step": "1"}', b'{"lane": 1}', b"\0\0\0", b"\xff"])
def test_a_damaged_line_is_refused_with_its_place_and_left(tmp_path, bad):
    path = tmp_path / "timeline.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"timeline\.jsonl:2 is damaged"):
        opened(tmp_path, 1)
    assert path.read_bytes() == before


def test_a_file_that_is_removed_meanwhile_is_an_error(tmp_path):
    with opened(tmp_path) as log:
        log.add(1, "trainer", "update", 0, 1)
        (tmp_path / "timeline.jsonl").unlink()
        with pytest.raises(ValueError, match=r"timeline\.jsonl cannot be written"):
            log.write()


def test_the_trainers_spans_add_up_to_its_step(tmp_path):
    with opened(tmp_path, 0, 10, 10, 11, 11, 13.5, 14, 14.5, 15) as log:
        log.begin_step(5)
        with log.trainer("wait for completions"):
            pass
        with log.trainer("train"):
            pass
        log.add(5, "teacher", "wait", 0, 100)
        log.add(6, "rollout", "generate", 0, 100)
        with log.trainer("wait for the teacher"):
            pass
        assert log.end_step() == (5.0, 1.5)
    spans = [line for line in lines(tmp_path / "timeline.jsonl") if line["lane"] == "trainer"]
    spans.sort(key=lambda line: line["start"])
    expected = [("wait for completions", 10, 11), ("train", 11, 13.5), ("other work", 13.5, 14)]
    expected += [("wait for the teacher", 14, 14.5), ("other work", 14.5, 15)]
    assert [(line["what"], line["start"], line["stop"]) for line in spans] == expected
    assert {line["step"] for line in spans} == {5}


def test_a_block_that_fails_is_no_span(tmp_path):
    with opened(tmp_path) as log:
        with pytest.raises(RuntimeError), log.trainer("publish", 1, "weights"):
            raise RuntimeError
        log.write()
    assert not lines(tmp_path / "timeline.jsonl")


def test_threads_lose_no_span(tmp_path):
    with opened(tmp_path) as log:

        def add(number: int) -> None:
            for index in range(300):
                log.add(index, "rollout", f"{number}", 0, 1)
                if index % 50 == 0:
                    log.write()

        threads = [Thread(target=add, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = lines(tmp_path / "timeline.jsonl")
    every = [(str(n), i) for n in range(4) for i in range(300)]
    assert sorted((line["what"], line["step"]) for line in spans) == every


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    """As on all ranks except rank 0."""
    monkeypatch.chdir(tmp_path)
    with opened(None) as log:
        log.begin_step(1)
        with log.trainer("wait"):
            pass
        log.write([sample()])
        assert log.end_step() == (0.0, 0.0)
    assert not list(tmp_path.iterdir())
