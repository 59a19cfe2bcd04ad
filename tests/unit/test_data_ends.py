"""Where a text begins and ends: special tokens that it has already, and those with which a student learns to stop."""

from pathlib import Path
from typing import Any

import pytest
from kit.documents import load_records
from kit.families import build
from kit.template_messages import add, chat_templates
from kit.toy_tokenizer import SPECIAL, TEXT, toy_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from stillhouse.agents.reply_format import ReplyFormat
from stillhouse.agents.tool_format import ToolFormat
from stillhouse.data import Documents
from stillhouse.data.render.tokenizers import is_rendered
from stillhouse.models import Decoder, add_end_ids, eos_ids, read_end_ids

USER = {"role": "user", "content": "two and two?"}
FOUR = {"role": "assistant", "content": "four"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ADD = get_json_schema(add)
REPLY = {"role": "tool", "content": "4"}
THINKS = {"role": "assistant", "content": "four", "reasoning_content": "two more than two"}
QUOTES = {"role": "assistant", "content": "four or <|user|>"}
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
OF_GLM = (*ENDS, "<|assistant|>", "<|system|>", "[gMASK]", "<sop>")
OF_GPT_OSS = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")


def glm_tokenizer(name: str, special: tuple[str, ...] = OF_GLM) -> PreTrainedTokenizerFast:
    """A tokenizer with a template of TRL, such as GLM's: the original, or the one that TRL trains with."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options: dict[str, Any] = {"vocab_size": 320, "special_tokens": list(special), "show_progress": False}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(**options, initial_alphabet=alphabet))
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
    tokenizer.chat_template = chat_templates()[name]
    return tokenizer


def texts(documents: Documents, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    ids, targets = documents.tokens(0), documents.targets(0)
    return tokenizer.decode(ids), tokenizer.decode(ids[targets])


@pytest.mark.parametrize(
    "messages",
    [
        *([USER, FOUR], [USER, FOUR, USER, THINKS], [USER, THINKS, USER, FOUR], [USER, CALLS]),
        *([USER, CALLS, REPLY, FOUR, USER, CALLS], [USER, FOUR, USER]),
        *([USER, QUOTES], [USER, QUOTES, USER, FOUR]),  # the last token of the text is no end of the turn
    ],
)
def test_the_next_header_ends_a_turn_without_a_marker(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    """The expected tokens and targets are those of the template that TRL trains GLM with."""
    original, training = map(glm_tokenizer, ("glm4moe", "glm4moe_training"))
    ends = original.convert_tokens_to_ids(list(ENDS))
    record = {"messages": messages}
    documents = load_records(tmp_path, [record], original, max_tokens=512, end_ids=ends)
    expected = load_records(tmp_path, [record], training, max_tokens=512)
    assert texts(documents, original) == texts(expected, training)
    last = "<|observation|>" if messages[-1] is CALLS else "<|user|>"
    assert original.convert_tokens_to_ids(last) in documents.report.trained_ends
    assert not [line for line in documents.report.warnings if "end-of-sequence" in line]
    whole = load_records(tmp_path, [record], original, max_tokens=512, end_ids=ends, tokens="all")
    assert whole.tokens(0).tolist() == documents.tokens(0).tolist()
    assert whole.targets(0)[1:].all()


@pytest.mark.parametrize("turn", [FOUR, CALLS], ids=["answer", "call"])
def test_a_reply_follows_the_header_that_ended_the_turn(turn: dict[str, Any]) -> None:
    """As the template writes the whole conversation: the student has generated `<|user|>` or `<|observation|>`."""
    tokenizer = glm_tokenizer("glm4moe")
    reply = USER if turn is FOUR else REPLY
    text = tokenizer.apply_chat_template([USER, turn, reply], tools=[ADD], tokenize=False, add_generation_prompt=True)
    if turn is FOUR:
        of_turns: Any = ReplyFormat(tokenizer, "user")
        ids = of_turns.reply_ids(reply["content"])
    else:
        of_turns = ToolFormat(tokenizer, [ADD])
        ids = of_turns.reply_ids(["add"], [reply["content"]])
    head = text.removesuffix(tokenizer.decode(ids))
    assert head.endswith("four<|user|>" if turn is FOUR else "</tool_call><|observation|>")
    assert of_turns.marker_id == tokenizer(head)["input_ids"][-1]
    assert tokenizer(head)["input_ids"] + ids == tokenizer(text)["input_ids"]


def test_a_header_that_is_no_end_of_sequence_ends_no_turn(tmp_path: Path) -> None:
    tokenizer = glm_tokenizer("glm4moe")
    documents = load_records(tmp_path, [{"messages": [USER, FOUR, USER, CALLS]}], tokenizer, max_tokens=512)
    (warning,) = documents.report.warnings
    assert "no end-of-sequence token of the student (<|endoftext|>) is a target" in warning
    assert documents.report.trained_ends == []
    assert "<|user|>" not in texts(documents, tokenizer)[1]


def test_a_marker_is_followed_by_no_header(tmp_path: Path) -> None:
    """A student whose end-of-sequence ids also have the header of a turn, as Phi-3's do."""
    tokenizer = toy_tokenizer(chat="plain")
    start, end = (SPECIAL.index(token) for token in ("<|im_start|>", "<|im_end|>"))
    record = {"messages": [USER, FOUR, USER, FOUR]}
    documents = load_records(tmp_path, [record], tokenizer, max_tokens=256, end_ids=[start, end])
    assert texts(documents, tokenizer)[1] == "four<|im_end|>" * 2
    assert documents.report.trained_ends == [end]


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        *(({"messages": [USER, FOUR]}, ["<|im_end|>"]), ({"messages": [USER, FOUR, USER]}, ["<|im_end|>"])),
        ({"messages": [USER, FOUR, REPLY]}, ["<|im_end|>"]),
        ({"prompt": [USER], "completion": [FOUR, USER]}, ["<|im_end|>"]),
        *(({"prompt": [USER], "completion": [FOUR]}, ["<|im_end|>"]), ({"text": "two"}, ["</s>"])),
        ({"prompt": "two", "completion": "four"}, ["</s>"]),
    ],
)
def test_the_report_has_what_teaches_to_stop(tmp_path: Path, fields: dict[str, Any], ends: list[str]) -> None:
    for tokens in ("completion", "all"):
        tokenizer = toy_tokenizer(chat="plain")
        report = load_records(tmp_path, [fields], tokenizer, tokens=tokens).report
        assert tokenizer.convert_ids_to_tokens(report.trained_ends) == ends
        assert bool(report.warnings) == (not ends)
    cut = load_records(tmp_path, [fields, {**fields}], toy_tokenizer(chat="plain"), max_tokens=4, tokens="all")
    assert cut.report.trained_ends == ([EOS] if "text" in fields else [])  # a text is split, not cut


def test_an_end_that_only_the_middle_of_a_conversation_has_does_not_teach_to_stop(tmp_path: Path) -> None:
    """gpt-oss ends a turn by `<|return|>`, and by `<|end|>` if messages follow: so end thoughts, too."""
    for name, tokens in (("gptoss_training", "completion"), ("gptoss", "all")):
        tokenizer = glm_tokenizer(name, OF_GPT_OSS)
        for messages, ends in (([USER, FOUR], ["<|return|>"]), ([USER, FOUR, USER], [])):
            options: dict[str, Any] = {"tokens": tokens, "max_tokens": 2048}
            report = load_records(tmp_path, [{"messages": messages}], tokenizer, **options).report
            assert tokenizer.convert_ids_to_tokens(report.trained_ends) == ends
            assert any("does not learn to stop" in line for line in report.warnings) == (not ends)


def test_a_cut_conversation_teaches_to_stop_by_its_earlier_turns(tmp_path: Path) -> None:
    tokenizer, record = toy_tokenizer(chat="plain"), {"messages": [USER, FOUR, USER, FOUR]}
    whole = load_records(tmp_path, [record], tokenizer, max_tokens=256)
    cut = load_records(tmp_path, [record], tokenizer, max_tokens=len(whole.tokens(0)) - 2).report
    assert (cut.cut_documents, cut.trained_ends, cut.warnings) == (1, whole.report.trained_ends, [])


EOS = SPECIAL.index("</s>")


@pytest.mark.parametrize(
    ("named", "expected"), [(None, 5), (5, 5), (2, [2, 5]), ([7, 2], [2, 5, 7])], ids=["none", "same", "one", "list"]
)
def test_trained_ends_are_saved_beside_those_of_the_model(tmp_path: Path, named: Any, expected: Any) -> None:
    """Also if transformers would refuse to save the configuration after a change, for its unused temperature."""
    decoder = Decoder(build("qwen3"))
    GenerationConfig(eos_token_id=named, max_length=77).save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(path.read_text().replace("{", '{"temperature": 0.6, "top_p": 0.9, "do_sample": false,', 1))
    decoder.pretrained.generation_config = GenerationConfig.from_pretrained(tmp_path)
    add_end_ids(decoder, {5})
    decoder.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.eos_token_id == expected
    assert (saved.temperature, saved.max_length) == (0.6, 77)
    assert set(eos_ids(toy_tokenizer(), decoder)) == {2, *read_end_ids(str(tmp_path / "saved"))}
    (tmp_path / "saved" / "generation_config.json").unlink()
    without_end: Any = toy_tokenizer(eos_token=None)  # type: ignore[arg-type]
    assert read_end_ids(str(tmp_path / "saved")) == sorted(eos_ids(without_end, Decoder(build("qwen3"))))


RENDERED = "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>"


@pytest.mark.parametrize("adds_eos", [True, False])
@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("two", "<s>", "</s>"),
        ("<s>two", "", "</s>"),
        ("two</s>", "<s>", ""),
        ("<s>two</s>\n", "", ""),
        (f"<s>{RENDERED}", "", ""),
        (f"{RENDERED}\n", "<s>", ""),  # the line break of the template
        (f"{RENDERED} \t\n\n", "<s>", ""),
        (f"{RENDERED}a \n", "<s>", "</s>"),
        ("two <|im_start|>", "<s>", "</s>"),  # special, but no end
    ],
)
def test_no_special_token_is_added_twice(tmp_path: Path, text: str, begin: str, end: str, adds_eos: bool) -> None:
    tokenizer, options = toy_tokenizer(adds_eos=adds_eos), {"end_ids": [5], "max_tokens": 256}
    expected = f"{begin}{text}{end}"
    documents = load_records(tmp_path, [{"text": text}], tokenizer, **options)  # type: ignore[arg-type]
    assert tokenizer.decode(documents.tokens(0)) == expected
    prompt = text.rstrip() or "a"
    pairs = [{"prompt": prompt, "completion": text.removeprefix("<s>")}]
    documents = load_records(tmp_path, pairs, tokenizer, **options)  # type: ignore[arg-type]
    assert tokenizer.decode(documents.tokens(0)) == f"{begin}{prompt}{text.removeprefix('<s>')}{end}"
    prompts = load_records(tmp_path, [{"prompt": prompt}], tokenizer, prompts=True, **options)  # type: ignore[arg-type]
    assert tokenizer.decode(prompts.tokens(0)) == f"{begin}{prompt}"


def test_prefixes_are_put_before_a_text_once(tmp_path: Path) -> None:
    """GLM's tokenizers put `[gMASK]<sop>` before a text, and have no BOS."""
    tokenizer = glm_tokenizer("glm4moe")
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<sop>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=pairs
    )
    for text in ("two", "[gMASK]<sop>two"):
        ids = load_records(tmp_path, [{"text": text}], tokenizer).tokens(0)
        assert tokenizer.decode(ids) == "[gMASK]<sop>two<|endoftext|>"
    assert is_rendered(tokenizer, "[gMASK]<sop>two")
    assert not is_rendered(tokenizer, "two")
    tokenizer = toy_tokenizer()
    for text in ("two", "<s>two"):
        documents = load_records(tmp_path, [{"text": text}], tokenizer, prefixes={"one": "<s>Know."})
        ids = documents.substitutions["one"].tokens(0, documents.tokens(0)).tolist()
        assert tokenizer.decode(ids) == "<s>Know.two</s>"
