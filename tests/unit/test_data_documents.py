"""Documents: limits and their report, skipped records, empty datasets, the held-out share."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.documents import ANSWER, EOS, QUESTION, load_records
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError, Documents
from stillhouse.data.read.messages import has_empty_answer

CHAT = [QUESTION, ANSWER]


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"number {index}"} for index in range(count)]


def test_documents_lie_one_after_another(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    documents = load_records(tmp_path, numbered(1200))  # more than two batches of the tokenizer
    assert len(documents) == 1200
    for index in (0, 1, 511, 512, 1199):
        expected = [*tokenizer(f"number {index}")["input_ids"], EOS]
        assert documents.tokens(index).tolist() == expected
        assert documents.targets(index).tolist() == [False] + [True] * (len(expected) - 1)
        assert documents.sources[index] == f"{tmp_path}/train.jsonl:{index + 1}"
    assert documents.tokens_N.dtype == np.int32
    report = documents.report
    assert (report.read, report.kept, report.documents, report.skipped) == (1200, 1200, 1200, 0)
    assert report.tokens == len(documents.tokens_N) == documents.offsets[-1]
    assert report.target_tokens == report.tokens - 1200
    assert report.warnings == []


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [(10, [10, 10, 7]), (9, [9, 9, 9]), (8, [8, 8, 8, 4]), (24, [24, 2]), (25, [25]), (2, [2] * 24)],
)
def test_long_texts_are_cut_and_lose_no_prediction(tmp_path: Path, max_tokens: int, sizes: list[int]) -> None:
    records = [{"text": "0123456789" * 2 + "012"}]  # one token per digit, with bos and eos 25 tokens
    uncut, pieces = load_records(tmp_path, records), load_records(tmp_path, records, max_tokens=max_tokens)
    assert pieces.lengths_D.tolist() == sizes
    predicted = np.concatenate([pieces.tokens(piece)[pieces.targets(piece)] for piece in range(len(pieces))])
    assert predicted.tolist() == uncut.tokens_N[1:].tolist()
    for piece, size in enumerate(sizes):
        assert pieces.targets(piece).tolist() == [False] + [True] * (size - 1)
        assert piece == 0 or pieces.tokens(piece)[0] == pieces.tokens(piece - 1)[-1]
    assert len(set(pieces.keys_D.tolist())) == 1
    report = pieces.report
    assert (report.kept, report.documents, report.cut_tokens) == (1, len(sizes), 0)
    assert report.split_documents == (len(sizes) > 1)
    if len(sizes) > 1:
        assert pieces.sources[1] == f"{tmp_path}/train.jsonl:1 (piece 2 of {len(sizes)})"
        start = f"{tmp_path}/train.jsonl: 1 documents in {len(sizes)} pieces, {sum(sizes)} tokens"
        assert report.summary().startswith(start)
    assert report.records == pieces.select([0]).report.records == 1


def test_a_turn_that_begins_within_a_token_of_its_prompt_is_counted(tmp_path: Path) -> None:
    # the template ends the prompt with a line break, which the tokenizer joins with the spaces of the answer
    records = [
        {"messages": [{"role": "user", "content": "kl?"}, {"role": "assistant", "content": f"{indent}return sum"}]}
        for indent in ("    ", "")
    ]
    report = load_records(tmp_path, records, chat="plain").report
    assert report.joined_turns == 1
    assert report.summary().endswith(", 1 turns whose first token also has text of the prompt")


def test_long_completions_are_cut_and_counted(tmp_path: Path) -> None:
    records = [
        {"prompt": "000", "completion": "1" * 10},  # bos + 3 + 10 + eos = 15
        {"prompt": "0" * 20, "completion": "1"},  # the whole completion is beyond the limit
        {"prompt": "0", "completion": "1"},
    ]
    documents = load_records(tmp_path, records, max_tokens=12)
    assert documents.lengths_D.tolist() == [12, 4]
    assert documents.targets(0).tolist() == [False] * 4 + [True] * 8
    report = documents.report
    assert (report.read, report.kept, report.without_target) == (3, 2, 1)
    assert (report.cut_documents, report.cut_tokens) == (2, 3 + 11)
    assert report.summary() == (
        f"{tmp_path}/train.jsonl: 2 documents, 16 tokens, 10 to predict, "
        "2 cut at the limit (14 tokens lost), 1 dropped without a token to predict"
    )


def test_duplicates_and_empty_answers_are_counted_with_their_first_place(tmp_path: Path) -> None:
    """A long text in pieces is no duplicate of itself; its copy counts once."""
    long, path = {"text": "0123456789" * 3}, f"{tmp_path}/train.jsonl"
    documents = load_records(tmp_path, [*numbered(2), long, numbered(2)[1], long, numbered(2)[1]], max_tokens=12)
    report = documents.report
    assert (report.kept, report.duplicates, report.empty_answers) == (6, 3, 0)
    same = "it has the same content as {}, so this content counts more than once (such records: 3)"
    assert report.warnings == [f"{path}:4: {same.format(f'{path}:2')}"]
    assert ", 3 duplicates" in report.summary()
    answers = [{"prompt": "0", "completion": text} for text in ("1", " ", "\n")]
    spaces = load_records(tmp_path, answers).report
    assert (spaces.kept, spaces.empty_answers) == (3, 2)
    (warning,) = (line for line in spaces.warnings if "an answer has no text" in line)
    assert warning.startswith(f"{path}:2: ")
    assert warning.endswith("(such records: 2)")


def test_an_empty_turn_of_the_assistant_is_counted_but_a_call_of_a_tool_is_no_empty_answer(tmp_path: Path) -> None:
    question, call = {"role": "user", "content": "kl?"}, {"function": {"name": "f", "arguments": {}}}
    turns = [{"content": "sum"}, {"content": ""}, {"content": None, "tool_calls": [call]}]
    records = [{"messages": [question, {"role": "assistant", **turn}]} for turn in turns]
    assert [has_empty_answer(record) for record in records] == [False, True, False]
    report = load_records(tmp_path, records[:2], chat="plain").report
    assert (report.kept, report.empty_answers) == (2, 1)
    assert load_records(tmp_path, records[:2], chat="plain", prompts=True).report.empty_answers == 0


def test_bad_records_stop_with_file_and_line_or_are_counted(tmp_path: Path) -> None:
    bad = ['{"text": ', [1], {"body": "a"}, {"text": 5}, {"text": ""}]
    reasons = ("not valid JSON", "expected a JSON object", "column 'text' is missing", "'text' must be", "'text' is")
    for record, reason in zip(bad, reasons, strict=True):
        with pytest.raises(DataError) as caught:
            load_records(tmp_path, [*numbered(3), record, *numbered(3)])
        assert caught.value.where == f"{tmp_path}/train.jsonl:4"
        assert str(caught.value).startswith(f"{caught.value.where}: {reason}")
    report = load_records(tmp_path, [bad[0], *numbered(3), *bad, *bad], on_error="skip").report
    assert (report.read, report.kept, report.skipped) == (14, 3, 11)
    assert len(report.reasons) == 5
    assert report.reasons[0].startswith(f"{tmp_path}/train.jsonl:1: not valid JSON")
    assert report.reasons[2].startswith(f"{tmp_path}/train.jsonl:6: expected a JSON object")
    assert "11 skipped, the first: " in report.summary()
    assert json.loads(json.dumps(asdict(report)))["skipped"] == 11


@pytest.mark.parametrize(("call", "message"), refused_calls("datasets without a document"))
def test_datasets_without_a_document_say_why(tmp_path: Path, call: str, message: str) -> None:
    records, options = eval(call)
    with pytest.raises(ValueError, match=message):
        load_records(tmp_path, records, **options)


def test_warnings_of_a_source(tmp_path: Path) -> None:
    whole = load_records(tmp_path, [{"messages": CHAT}], chat="plain")
    assert whole.report.warnings == []
    cut = load_records(tmp_path, [{"messages": CHAT}], chat="plain", max_tokens=whole.report.tokens - 2)
    assert cut.report.target_tokens
    (warning,) = cut.report.warnings
    assert "no end-of-sequence token of the student (</s>) is a target, so the student does not learn" in warning
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    )
    assert load_records(tmp_path, [{"messages": CHAT}], tokenizer).report.warnings
    records = [{"text": "a"}, {"text": "b <image> c"}, {"text": "<image> d"}]
    (warning,) = load_records(tmp_path, records).report.warnings
    assert warning.startswith(f"{tmp_path}")
    assert ".jsonl:2: its text has <image>, but the record has no image, so <image> is read as ordinary" in warning
    assert "(such records: 2)" in warning


@pytest.mark.parametrize("column", ["text", "answer"])
def test_ids_beyond_a_head(tmp_path: Path, column: str) -> None:
    tokenizer = toy_tokenizer(adds_bos=False)
    tokenizer.add_tokens(["<image>"])
    records = [{"text": "a", "answer": ""}, {"text": "c", "answer": "b"} | {column: "b <image>"}]
    documents = load_records(tmp_path, records, tokenizer, prefixes={"one": "{answer}", "none": ""})
    documents.check_ids(401, "student", ["one"])
    reason = "token id 400 has no row in the student's head of 400 rows"
    if column == "answer":
        documents.check_ids(400, "student", ["none", "unknown"])
        reason = "token id 400 of the prefix of teacher 'one' has no row in the student's head of 400 rows"
    with pytest.raises(DataError, match=rf"train\.jsonl:2: {reason}"):
        documents.check_ids(400, "student", ["none", "one"])


def contents(documents: Documents) -> set[tuple[int, ...]]:
    return {tuple(documents.tokens(index).tolist()) for index in range(len(documents))}


def test_the_held_out_share_depends_on_the_content_alone(tmp_path: Path) -> None:
    """Neither on the order nor on the tokenizer. Seven texts occur twice; both copies are on the same side."""
    records = numbered(400)
    train, held_out = load_records(tmp_path, records).split(0.2)
    assert 50 < len(held_out) < 110
    assert len(train) + len(held_out) == 400
    assert not contents(train) & contents(held_out)
    reordered = load_records(tmp_path, records[::-1] + records[:7]).split(0.2)
    assert [contents(side) for side in reordered] == [contents(train), contents(held_out)]
    larger = load_records(tmp_path, records).split(0.3)[1]
    assert contents(held_out) < contents(larger)
    assert held_out.report.documents == len(held_out)
    assert held_out.report.tokens == len(held_out.tokens_N)
    assert held_out.report.target_tokens == held_out.targets_N.sum()
    assert load_records(tmp_path, records, toy_tokenizer(adds_bos=False)).split(0.2)[1].sources == held_out.sources
    records = [{"text": f"{index}" * 40} for index in range(100, 150)]
    sides = load_records(tmp_path, records, max_tokens=16).split(0.3)
    assert sum(len({source.split(" ")[0] for source in side.sources}) for side in sides) == 50


def test_each_side_of_a_split_gets_a_document(tmp_path: Path) -> None:
    two = load_records(tmp_path, numbered(2))
    for share in (1e-9, 0.02, 0.98, 1 - 1e-12):
        train, held_out = two.split(share)
        assert (len(train), len(held_out)) == (1, 1)
        assert held_out.keys_D[0] < train.keys_D[0]
    for records in (numbered(1), numbered(1) * 3):
        with pytest.raises(ValueError, match="all documents have the same content, so none can be held out"):
            load_records(tmp_path, records).split(0.5)
    for share in (0, 1, -0.1, 1.5):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            two.split(share)


def test_overlap_counts_the_documents_that_stand_in_both(tmp_path: Path) -> None:
    train = load_records(tmp_path, [*numbered(20), {"text": "number 3"}])
    other = [{"text": "number 3", "id": 1}, {"text": "another"}]
    held_out = load_records(tmp_path, other, toy_tokenizer(adds_bos=False))
    assert (train.overlap(held_out), held_out.overlap(train)) == (2, 1)
    assert train.overlap(train) == 21
    one, two = train.split(0.3)
    assert (one.overlap(two), two.overlap(one)) == (0, 0)


def test_the_hash_of_a_record_is_that_of_its_content(tmp_path: Path) -> None:
    documents = load_records(tmp_path, [{"text": "number 0", "id": 9}])
    assert documents.keys_D.tolist() == [2621323547625071727]  # sha256 of '["number 0"]', first 8 bytes
    add = {"name": "add"}
    tools: list[Any] = [None, [], [add | {"of": None}], [add], [{"name": "take"}]]
    records = [{"messages": CHAT}, *({"messages": CHAT, "tools": value} for value in tools)]
    keys = load_records(tmp_path, records, chat="plain").keys_D.tolist()
    assert keys[0] == keys[1] == keys[2]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 3


CALL = "{{ strftime_now('%d %b %Y, %f') }}"


@pytest.mark.parametrize(
    ("date", "chat", "prompts"),
    [
        (CALL, "plain", False),
        (CALL, "plain", True),
        (CALL, "generation", False),
        ('{%- set today = strftime_now( "%d %b %Y, %f" ) %}{{ today }}', "plain", False),
        (
            "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
            'strftime_now("%d %b %Y, %f") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
            "{%- endif %}{{ date_string }}",
            "plain",
            False,
        ),
    ],
)
def test_the_documents_are_the_same_on_every_day(tmp_path: Path, date: str, chat: Any, prompts: bool) -> None:
    """Templates such as Llama's write the date, here with its microseconds: it is always the same one."""
    tokenizer = toy_tokenizer(chat=chat)
    tokenizer.chat_template = date + tokenizer.chat_template
    documents = load_records(tmp_path, [{"messages": CHAT}], tokenizer, max_tokens=256, prompts=prompts)
    assert tokenizer.decode(documents.tokens_N).startswith("26 Jul 2024, 000000<|im_start|>user")
