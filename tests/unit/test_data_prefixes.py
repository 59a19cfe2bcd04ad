"""Columns to keep, prefixes (how they are read, tokenized, cut, selected and refused), and the gaps for prefixes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.config_cases import refused_calls
from kit.documents import ANSWER, BOS, EOS, QUESTION, documents_of, load_records, plain, random_documents
from kit.families import FAMILIES, build
from kit.toy_tokenizer import PLAIN_TEMPLATE, toy_tokenizer
from torch import Tensor

from stillhouse.data import DataError, Documents, MicroBatch, PackedSequences, StepMicroBatches

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = {"messages": [QUESTION, ANSWER], "answer": "four"}
LISTS = {"prompt": [QUESTION], "completion": [ANSWER], "answer": "four"}
STRINGS = {"prompt": "two and two?", "completion": "four", "answer": "four"}
KNOWS = "You know the answer: {answer}. "
KNOWS_FOUR = {"role": "system", "content": "You know the answer: four. "}
TURN = "<|im_start|>system\nYou know the answer: four. <|im_end|>\n"


def prefix_of(documents: Documents, teacher: str = "one") -> list[int]:
    return [token for item in documents.substitutions[teacher].items(0) for token in item.ids.tolist()]


def read_by(documents: Documents, teacher: str, document: int = 0) -> list[int]:
    return documents.substitutions[teacher].tokens(document, documents.tokens(document)).tolist()


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("record", [{"text": "the heads", "answer": "four"}, STRINGS])
def test_a_prefix_is_put_behind_the_bos(tmp_path: Path, adds_bos: bool, record: dict[str, str]) -> None:
    tokenizer = toy_tokenizer(adds_bos=adds_bos)
    documents = load_records(tmp_path, [record], tokenizer, prefixes={"one": KNOWS, "two": "{answer}"})
    bodies = [record[column] for column in ("text", "prompt", "completion") if column in record]
    body = [token for text in bodies for token in plain(tokenizer, text)]
    knows, four = plain(tokenizer, "You know the answer: four. "), plain(tokenizer, "four")
    assert documents.tokens(0).tolist() == [BOS] * adds_bos + body + [EOS]
    assert read_by(documents, "one") == [BOS] * adds_bos + knows + body + [EOS]
    assert read_by(documents, "two") == [BOS] * adds_bos + four + body + [EOS]
    assert [prefix_of(documents, name) for name in ("one", "two")] == [knows, four]
    assert documents.substitutions["one"].tokens_N.dtype == np.int32
    assert documents.columns == {}


def test_a_bos_that_the_text_has_and_the_tokenizer_does_not_add_is_text(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(adds_bos=False)
    documents = load_records(tmp_path, [{"text": "<s>the heads"}], tokenizer, prefixes={"one": "<s>a"})
    assert read_by(documents, "one") == [BOS, *plain(tokenizer, "a"), BOS, *plain(tokenizer, "the heads"), EOS]


@pytest.mark.parametrize("chat", ["plain", "generation", "reasoning"])
@pytest.mark.parametrize("record", [CHAT, LISTS])
def test_in_a_chat_the_prefix_is_a_system_turn_in_front(tmp_path: Path, chat: Any, record: dict[str, Any]) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    with_tools = record | {"tools": [{"name": "add"}]}
    documents = load_records(tmp_path, [with_tools], tokenizer, max_tokens=128, prefixes={"one": KNOWS})
    assert prefix_of(documents) == plain(tokenizer, TURN)
    ids = tokenizer.apply_chat_template([KNOWS_FOUR, QUESTION, ANSWER], return_dict=True)["input_ids"]
    assert read_by(documents, "one") == ids


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("chat", ["plain", "generation", "reasoning"])
@pytest.mark.parametrize("record", [CHAT, LISTS, {"messages": [SYSTEM, QUESTION], "answer": "four"}])
def test_a_prefix_before_a_prompt(tmp_path: Path, chat: Any, record: dict[str, Any], bos: str) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    tokenizer.chat_template = bos + tokenizer.chat_template
    documents = load_records(tmp_path, [record], tokenizer, max_tokens=96, prompts=True, prefixes={"one": KNOWS})
    messages = record.get("prompt") or [turn for turn in record["messages"] if turn["role"] != "assistant"]
    ids = tokenizer.apply_chat_template([KNOWS_FOUR, *messages], add_generation_prompt=True, return_dict=True)
    assert read_by(documents, "one") == ids["input_ids"]


@pytest.mark.parametrize("prompts", [True, False])
def test_a_template_that_drops_a_system_turn_is_refused(tmp_path: Path, prompts: bool) -> None:
    """As Llama 2's, Gemma 3's and Mistral's: the teacher would read what the student reads."""
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
        "{% for message in messages if message.role != 'system' %}{{ message.role + ': ' }}"
        "{{ system if loop.first else '' }}{{ message.content }}{% endfor %}"
    )
    reason = r"train\.jsonl:1: the prefix of teacher 'one': the chat template writes a single system turn as ''"
    with pytest.raises(DataError, match=reason):
        load_records(tmp_path, [CHAT], tokenizer, prefixes={"one": KNOWS}, prompts=prompts)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_template_that_writes_a_bos_writes_it_once(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = toy_tokenizer(chat="plain", adds_bos=adds_bos)
    tokenizer.chat_template = "{{ bos_token }}" + PLAIN_TEMPLATE
    documents = load_records(tmp_path, [CHAT], tokenizer, prefixes={"one": KNOWS, "none": ""})
    turn = plain(tokenizer, TURN)
    document = documents.tokens(0).tolist()
    assert document[0] == BOS
    assert prefix_of(documents) == turn
    assert read_by(documents, "one") == [BOS, *turn, *document[1:]]
    assert read_by(documents, "none") == document


def test_a_bos_that_only_one_of_both_texts_begins_with_stays_where_it_is(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(chat="plain")
    for first in ("system", "user"):
        tokenizer.chat_template = f"{{% if messages[0].role == '{first}' %}}<s>{{% endif %}}" + PLAIN_TEMPLATE
        documents = load_records(tmp_path, [CHAT], tokenizer, prefixes={"one": KNOWS})
        prefix, document = prefix_of(documents), documents.tokens(0).tolist()
        assert (prefix[0] == BOS, document[0] == BOS) == (first == "system", first == "user")
        assert read_by(documents, "one") == prefix + document


@pytest.mark.parametrize(
    ("template", "text"),
    [
        *(("{a}{b}", "x3"), ("{b} {c} {d} {e}", "3 0.5 true false"), ("{{{a}}} {{a}} }}{{", "{x} {a} }{")),
        *(("{spaced name}", "ü\n"), ("", ""), ("{empty}", ""), ("constant", "constant")),
    ],
)
def test_a_template_is_filled_with_the_records_values(tmp_path: Path, template: str, text: str) -> None:
    values = {"a": "x", "b": 3, "c": 0.5, "d": True, "e": False, "spaced name": "ü\n", "empty": ""}
    tokenizer = toy_tokenizer()
    documents = load_records(tmp_path, [{"text": "the heads"} | values], tokenizer, prefixes={"one": template})
    assert prefix_of(documents) == plain(tokenizer, text)


@pytest.mark.parametrize(("call", "reason"), refused_calls("templates of prefixes"))
def test_nothing_else_of_format_strings_is_allowed(tmp_path: Path, call: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        load_records(tmp_path, [STRINGS], prefixes={"math": eval(call)})
    assert str(caught.value).startswith(f"the prefix of teacher 'math' {eval(call)!r} ")
    assert "expected a text with {column} for the value of" in str(caught.value)


@pytest.mark.parametrize(("call", "reason"), refused_calls("records for prefixes"))
def test_a_record_without_what_is_needed_stops_with_file_and_line(tmp_path: Path, call: str, reason: str) -> None:
    good = STRINGS | {"subject": "law"}
    options: dict[str, Any] = {"columns": ["subject"], "prefixes": {"none": "", "one": KNOWS}}
    bad = {name: value for name, value in (good | eval(call)).items() if value is not ...}
    records = [good, good, bad, good | {"subject": "math"}]
    with pytest.raises(DataError) as caught:
        load_records(tmp_path, records, **options)
    assert str(caught.value).startswith(f"{tmp_path}/train.jsonl:3: {reason}")
    kept = load_records(tmp_path, records, on_error="skip", **options)
    assert kept.columns == {"subject": ["law", "law", "math"]}
    assert [kept.report.read, kept.report.kept, kept.report.skipped] == [4, 3, 1]
    assert kept.report.reasons == [str(caught.value)]
    assert [len(of_teacher.gains_D) for of_teacher in kept.substitutions.values()] == [3, 3]


def test_a_chat_template_that_refuses_the_system_turn_gives_its_reason(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(chat="plain")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refuses + PLAIN_TEMPLATE
    empty = CHAT | {"answer": ""}
    reason = r"train\.jsonl:2: the prefix of teacher 'one': the chat template refuses the messages: no system role"
    with pytest.raises(DataError, match=reason):
        load_records(tmp_path, [empty, CHAT], tokenizer, prefixes={"one": "{answer}"})
    documents = load_records(tmp_path, [empty, CHAT], tokenizer, prefixes={"one": "{answer}"}, on_error="skip")
    assert (len(documents), documents.report.skipped) == (1, 1)
    assert read_by(documents, "one") == documents.tokens(0).tolist()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_every_piece_of_a_long_text_has_the_prefix(tmp_path: Path, adds_bos: bool) -> None:
    record = {"text": "0" * (24 - adds_bos), "subject": {"field": "law"}, "answer": "12"}  # one token per digit
    tokenizer = toy_tokenizer(adds_bos=adds_bos)
    prefixes = {"one": "{answer}", "two": "123", "none": ""}
    documents = load_records(tmp_path, [record], tokenizer, max_tokens=12, prefixes=prefixes, columns=["subject"])
    assert documents.lengths_D.tolist() == [9, 9, 9]  # 12 minus the longest prefix; one token is in two pieces
    assert documents.report.split_documents == 1
    assert documents.columns == {"subject": [{"field": "law"}] * 3}
    for name, digits in (("one", "12"), ("two", "123"), ("none", "")):
        prefix = plain(tokenizer, digits)
        first, *others = (documents.tokens(piece).tolist() for piece in range(3))
        assert read_by(documents, name, 0) == first[:adds_bos] + prefix + first[adds_bos:]
        assert [read_by(documents, name, piece) for piece in (1, 2)] == [prefix + body for body in others]
    for teachers, gap in ((["one", "none"], 2), (["two", "one"], 3), ([], 0), (["unknown"], 0)):
        assert (documents.widths(teachers, np.arange(3)) - documents.lengths_D).tolist() == [gap] * 3


def test_a_completion_is_cut_where_prefix_and_document_reach_the_limit(tmp_path: Path) -> None:
    records = [
        {"prompt": "000", "completion": "1" * 5, "answer": "2" * 2},  # bos + 3 + 5 + eos = 10: fits exactly
        {"prompt": "000", "completion": "1" * 5, "answer": "2" * 5},
        {"prompt": "000", "completion": "1" * 5, "answer": "2" * 10},  # 2 tokens are left, without a target
    ]
    documents = load_records(tmp_path, records, max_tokens=12, prefixes={"one": "{answer}"})
    assert documents.lengths_D.tolist() == [10, 7]
    assert documents.targets(1).tolist() == [False] * 4 + [True] * 3
    assert [len(read_by(documents, "one", document)) for document in range(2)] == [12, 12]
    report = documents.report
    assert (report.cut_documents, report.cut_tokens, report.without_target) == (2, 3 + 8, 1)
    with pytest.raises(DataError, match="has 11 tokens, so that fewer than 2 of max_tokens=12"):
        load_records(tmp_path, [records[0] | {"answer": "2" * 11}], max_tokens=12, prefixes={"one": "{answer}"})


def subjects(count: int, **changes: Any) -> list[dict[str, Any]]:
    texts = (f"number {number}" for number in range(count))
    return [{"text": text, "subject": f"subject {at}", "answer": at} | changes for at, text in enumerate(texts)]


OPTIONS: dict[str, Any] = {"columns": ["subject"], "prefixes": {"one": "{answer} of", "none": ""}}


def test_selected_and_held_out_documents_keep_their_columns_and_prefixes(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    documents = load_records(tmp_path, subjects(600), tokenizer, **OPTIONS)
    train, held_out = documents.split(0.3)
    without_prefixes = load_records(tmp_path, subjects(600), tokenizer).split(0.3)
    for part, same in zip((train, held_out, documents.select([7, 3, 7])), (*without_prefixes, None), strict=True):
        for number in range(len(part)):
            line = int(part.sources[number].rpartition(":")[2]) - 1
            assert part.columns["subject"][number] == f"subject {line}"
            body = plain(tokenizer, f"number {line}")
            assert read_by(part, "one", number) == [BOS, *plain(tokenizer, f"{line} of"), *body, EOS]
            assert read_by(part, "none", number) == [BOS, *body, EOS]
        if same is not None:
            assert part.sources == same.sources
    assert documents.select([7, 3, 7]).columns == {"subject": ["subject 7", "subject 3", "subject 7"]}
    # the student would read a held-out document in training, whatever a teacher reads before it
    other = load_records(tmp_path, subjects(600, subject="another", answer="another"), tokenizer, **OPTIONS)
    assert held_out.overlap(other) == len(held_out)


def test_the_fingerprint_covers_columns_and_prefixes(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()

    def fingerprint(records: list[dict[str, Any]], **options: Any) -> str:
        return load_records(tmp_path, records, tokenizer, **options).fingerprint()

    alone = fingerprint(subjects(5))
    # from before there were columns and prefixes: runs of that time must still resume
    assert alone == "17c7a16c3c134326d199e1182a10f02759c684be3260ca556e2179d354bb0faa"
    last = subjects(5)[:4]
    prints = [
        alone,
        fingerprint(subjects(5), **OPTIONS),
        fingerprint([*last, subjects(5)[4] | {"subject": "law"}], **OPTIONS),
        fingerprint([*last, subjects(5)[4] | {"answer": 5}], **OPTIONS),
        fingerprint(subjects(5), columns=["answer"], prefixes=OPTIONS["prefixes"]),
        fingerprint(subjects(5), columns=["subject"], prefixes={"other": "{answer} of", "none": ""}),
        fingerprint(subjects(5), columns=["subject"]),
        fingerprint(subjects(5), prefixes=OPTIONS["prefixes"]),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(subjects(5, unused=1), **OPTIONS) == prints[1]


EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True)


def by_hand() -> Documents:
    """Return three documents, the first with a BOS, and two teachers with prefixes of different lengths."""
    return documents_of(
        [[BOS, 5, 6, 2], [7, 8, 2], [9, 2]],
        [[0, 0, 1, 1], [0, 1, 1], [0, 1]],
        {"a": [[20, 21], [30], [50, 51]], "b": [[40, 41, 42], [], []]},
        [True, False, False],
    )


def packed_by_hand(gaps: tuple[str, ...]) -> tuple[PackedSequences, StepMicroBatches]:
    packed = PackedSequences(by_hand(), max_tokens=11, seed=0, shuffle=False, gaps=gaps)
    return packed, packed.micro_batches([np.arange(len(packed))])


def test_micro_batches_of_a_teacher_are_built_when_they_are_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = packed_by_hand(("a", "unknown"))
    assert step.for_teacher("unknown") is step
    assert step.for_teacher("b") is step  # it has prefixes, but reads them outside of the job
    assert step.for_teacher("a") is not step
    plain = StepMicroBatches([step[0]])
    assert plain.for_teacher("a") is plain
    ids, rows = plain.teacher_tokens(1, "a")
    assert (ids.tolist(), rows.tolist()) == ([7, 8, 2], [0, 1, 2])
    _, step = packed_by_hand(("a", "b"))

    def refuse(*_: Any) -> MicroBatch:
        raise AssertionError("a micro-batch was built")

    monkeypatch.setattr(PackedSequences, "micro_batch", refuse)
    its = step.for_teacher("a")
    assert (len(its), its.shapes_BS, its.tokens) == (1, [(2, 11)], 9)
    with pytest.raises(AssertionError, match="was built"):
        its[0]


@pytest.mark.parametrize("gaps", [(), ("a",), ("a", "b")])
def test_what_a_teacher_outside_of_the_job_reads(gaps: tuple[str, ...]) -> None:
    _, step = packed_by_hand(gaps)
    expected = {
        "a": [([1, 20, 21, 5, 6, 2], 2), ([30, 7, 8, 2], 1), ([50, 51, 9, 2], 2)],
        "b": [([1, 40, 41, 42, 5, 6, 2], 3), ([7, 8, 2], 0), ([9, 2], 0)],
        "unknown": [([1, 5, 6, 2], 0), ([7, 8, 2], 0), ([9, 2], 0)],
    }
    for name, documents in expected.items():
        for number, (ids, shift) in enumerate(documents):
            teacher_ids, rows = step.teacher_tokens(number, name)
            length = packed_by_hand(())[0].documents.lengths_D[number]
            assert (teacher_ids.tolist(), rows.tolist()) == (ids, list(range(shift, shift + length)))


def test_the_fingerprint_covers_where_a_bos_stays() -> None:
    documents = by_hand()
    given = documents.substitutions
    changed = {name: replace(texts, spans_P2=1 - texts.spans_P2) for name, texts in given.items()}
    assert replace(documents, substitutions=changed).fingerprint() != documents.fingerprint()


def test_documents_that_do_not_fit_with_their_gaps_are_refused() -> None:
    needed = "documents of at most 6 tokens for every teacher to pack, got 3 documents of at most 7"
    with pytest.raises(ValueError, match=needed):
        PackedSequences(by_hand(), max_tokens=6, seed=0, gaps=["a", "b"])
    assert len(PackedSequences(by_hand(), max_tokens=6, seed=0, gaps=["a"])) == 3


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], dict[str, list[int]]]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    one = st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))
    return lengths, {"a": draw(one), "b": draw(one)}


@EXAMPLES
@given(case=cases(), gaps=st.sampled_from([("a",), ("a", "b"), ("b", "unknown")]), seed=st.integers(0, 3))
def test_rows_line_up(case: tuple[list[int], dict[str, list[int]]], gaps: tuple[str, ...], seed: int) -> None:
    documents = random_documents(*case, seed)
    packed = PackedSequences(documents, max_tokens=24, seed=seed, gaps=gaps)
    plain = PackedSequences(documents, max_tokens=24, seed=seed)
    step = packed.micro_batches([np.arange(start, min(start + 3, len(packed))) for start in range(0, len(packed), 3)])
    assert [batch.shape_BS for batch in step] == step.shapes_BS
    assert max(columns for _, columns in step.shapes_BS) <= 24
    assert step.tokens == len(documents.tokens_N)
    assert step.normalizer == plain.micro_batches([np.arange(len(plain))]).normalizer
    rows = torch.cat([batch.document_T for batch in step])
    assert torch.bincount(rows[rows >= 0]).tolist() == documents.lengths_D.tolist()
    for name in set(gaps) - {"unknown"}:
        for batch in step.for_teacher(name):
            assert batch.teacher_inputs is not None
            ids_T, positions_T = (batch.teacher_inputs[key].flatten() for key in ("input_ids", "position_ids"))
            for row in batch.valid_index.tolist():
                assert ids_T[row + 1] == batch.labels_T[row]
                assert positions_T[row + 1] == positions_T[row] + 1
            for document in batch.document_T[batch.document_T >= 0].unique().tolist():
                read, rows = step.teacher_tokens(document, name)
                stop = int((batch.document_T == document).nonzero().max()) + 1
                assert ids_T[stop - len(read) : stop].tolist() == read.tolist()
                assert positions_T[stop - len(read) : stop].tolist() == list(range(len(read)))
                assert rows[0] == len(read) - documents.lengths_D[document]


def hidden(model: Any, ids_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        outputs = model.base_model(ids_BS, position_ids=positions_BS, use_cache=False)
    return outputs.last_hidden_state.flatten(0, 1)


def distance(actual_TD: Tensor, expected_TD: Tensor) -> float:
    return float((actual_TD - expected_TD).abs().max() / expected_TD.abs().max())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_states_equal_those_of_each_document_alone(family: str) -> None:
    prefixes = {"a": [3, 4, 0, 1, 8, 2, 0, 6], "b": [1, 0, 0, 5, 9, 6, 0, 2]}
    documents = random_documents([9, 1, 7, 12, 3, 16, 5, 2], prefixes)
    packed = PackedSequences(documents, max_tokens=29, seed=0, gaps=("a", "b"))
    step = packed.micro_batches([np.arange(len(packed))])
    model = build(family, dtype=torch.float64)
    # Gemma 2 computes the softmax of its capped attention in float32, whatever the dtype of the model is.
    tolerance = 1e-6 if family == "gemma2" else 1e-12
    for name in ("a", "b"):
        (batch,) = step.for_teacher(name)
        batch = batch.padded(batch.shape_BS[0] + 1, batch.shape_BS[1] + 3)
        assert batch.teacher_inputs is not None
        student_TD = hidden(model, batch.input_ids_BS, batch.position_ids_BS)
        teacher_TD = hidden(model, batch.teacher_inputs["input_ids"], batch.teacher_inputs["position_ids"])
        for document in range(len(documents)):
            rows_T = batch.document_T == document
            alone_SD = hidden(model, torch.from_numpy(documents.tokens(document).astype(np.int64))[None])
            assert distance(student_TD[rows_T], alone_SD) <= tolerance
            ids, rows = step.teacher_tokens(document, name)
            shift = int(rows[0])
            full_SD = hidden(model, torch.from_numpy(ids.astype(np.int64))[None])
            assert distance(teacher_TD[rows_T], full_SD[shift:]) <= tolerance
            if shift and len(alone_SD) > 1:
                assert distance(full_SD[shift:], alone_SD) > 1e-3  # the prefix is read
