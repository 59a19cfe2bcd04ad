"""Recognises the form of records by their columns, and converts records with other columns to Stillhouse's forms:
columns that the configuration renames (`data.columns`), and the columns of ShareGPT and Alpaca.

    ShareGPT    conversations: [{from, value}, …], maybe system     becomes messages
    Alpaca      instruction, output, maybe input and system         become prompt and completion

If the first record has the columns of one of Stillhouse's forms, the columns of other projects are ignored. This file
does not import transformers, so that a command refuses data without usable columns before it imports torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stillhouse.data.read.messages import MASKS, OTHER_ROLES
from stillhouse.data.record import RecordError, string_value, value_in_words
from stillhouse.display import enumerated, name_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Fields = dict[str, Any]
EXPECTED_COLUMNS = "'messages', 'prompt' and 'completion', or 'text'"
#: roles by ShareGPT's value of `from`
ROLES = OTHER_ROLES | {role: role for role in ("system", "user", "assistant")}
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)


#: the columns that a record may lack
OPTIONAL = ("tools", "images", "image", "system", "input")


class ForeignColumns(NamedTuple):
    """Columns of another project. words: a description. convert: adds Stillhouse's columns; raises RecordError.
    columns: the columns that it reads.
    """

    words: str
    convert: Callable[[Fields], Fields]
    columns: tuple[str, ...]


def renamed(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """Return the fields of a record under the names that Stillhouse reads.

    columns: the names of the record's columns, by the names that Stillhouse reads.

    Raises RecordError if the record lacks one of these columns (unless it is one of `OPTIONAL`), or if it also has a
    column with the name that Stillhouse reads.
    """
    if not columns:
        return fields
    for name, column in columns.items():
        if column not in fields and name not in OPTIONAL:
            near = get_close_matches(column, fields, n=1) or [other for other in fields if other == name]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if isinstance(fields.get(column.partition(".")[0]), dict):
                hint = f": {column.partition('.')[0]!r} is an object, and only whole columns can be named"
            lacks = f"names a column that the record lacks (found {name_list(fields)})"
            raise RecordError(f"columns: {{{name}: {column}}} {lacks}{hint}")
        if name in fields and name not in columns.values():
            raise RecordError(
                f"columns: {{{name}: {column}}} reads {column!r} as {name!r}, but the record has {name!r}, too "
                f"(found {name_list(fields)}): expected records with one of the two, or no such name in columns"
            )
    moved = {name: fields[column] for name, column in columns.items() if column in fields}
    return {name: value for name, value in fields.items() if name not in columns.values()} | moved


def require_read(columns: Mapping[str, str], read: Collection[str], form: Sequence[str]) -> None:
    """Raise ValueError if records do not read one of the renamed columns. read: all columns that they read. form: the
    columns of their form.
    """
    for name, column in columns.items():
        if name not in read:
            raise ValueError(
                f"columns: {{{name}: {column}}} has no effect, because the records are read as "
                f"{enumerated(form, 'and')}: expected only names that these records read"
            )


def with_source_names(problem: str, columns: Mapping[str, str]) -> str:
    """The error of a record; if it quotes a name in `columns`, with the name of the record's column."""
    quoted = [f"{name}: {column}" for name, column in columns.items() if f"'{name}'" in problem and name != column]
    has_names = "columns: {" in problem or not quoted
    return problem if has_names else f"{problem}; columns: {{{', '.join(quoted)}}}"


def own_forms(fields: Fields, *, prompts: bool) -> list[tuple[str, ...]]:
    """The record forms of Stillhouse whose columns a record has. prompts: whether only prompts are read."""
    forms = (("messages",), ("prompt",)) if prompts else (("messages",), ("prompt", "completion"), ("text",))
    return [form for form in forms if set(form) <= set(fields)]


def form_of(fields: Fields, *, prompts: bool) -> tuple[str, ...]:
    """The columns of the only form that a record has. prompts: whether only prompts are read.

    Raises ValueError if the columns match none or several of the forms.
    """
    forms = own_forms(fields, prompts=prompts)
    if len(forms) == 1:
        return forms[0]
    kind = f"{'ambiguous' if forms else 'no usable'} columns: found {name_list(fields)}"
    if prompts:
        raise ValueError(f"{kind}; expected one of 'prompt' or 'messages'")
    if forms:
        raise ValueError(f"{kind}; expected only one of {EXPECTED_COLUMNS}")
    if "prompt" in fields:
        raise ValueError(
            f"prompts without completions: found {name_list(fields)}; expected a column 'completion'; prompts "
            "alone are enough only for eval.prompts.data, and for data.train of a run whose student writes all "
            "completions (section rollout with share=1)"
        )
    expected = f"expected {EXPECTED_COLUMNS} (or the columns of ShareGPT or Alpaca)"
    hint = "name your columns in data.columns, such as {prompt: question, completion: answer}"
    raise ValueError(f"{kind}; {expected}; {hint}")


def needed_columns(fields: Fields, *, prompts: bool) -> tuple[str, ...]:
    """The columns that all records must have if this is the first record: those of its form, or of another project's.

    Raises ValueError as `form_of` and `foreign_columns` do.
    """
    columns = () if own_forms(fields, prompts=prompts) else _columns_elsewhere(fields, prompts=prompts)
    return columns or form_of(fields, prompts=prompts)


def _columns_elsewhere(fields: Fields, *, prompts: bool) -> tuple[str, ...]:
    """The columns of ShareGPT or Alpaca that a record has; () if it has neither. Raises ValueError if it has both."""
    alpaca = ("instruction",) if prompts else ("instruction", "output")
    is_alpaca = set(alpaca) <= set(fields)
    if "conversations" not in fields:
        return alpaca if is_alpaca else ()
    if is_alpaca:
        raise ValueError(
            f"ambiguous columns: found {name_list(fields)}; expected either 'conversations' (ShareGPT) or "
            "'instruction' and 'output' (Alpaca)"
        )
    return ("conversations",)


def foreign_columns(fields: Fields, tokenizer: "PreTrainedTokenizerBase", *, prompts: bool) -> ForeignColumns | None:
    """The conversion for a dataset, chosen by the fields of its first record; None if no conversion is known.

    prompts: whether only prompts are read. Raises ValueError if the record has the columns of ShareGPT and of Alpaca.
    """
    if own_forms(fields, prompts=prompts) or not (columns := _columns_elsewhere(fields, prompts=prompts)):
        return None
    if columns == ("conversations",):
        return ForeignColumns("ShareGPT columns read as messages", _from_sharegpt, ("conversations", "system"))
    as_chat = bool(tokenizer.chat_template)
    form = "a user's message and its answer" if as_chat else "prompt and completion, in Alpaca's own template"
    convert = partial(_from_alpaca, as_chat=as_chat, prompts=prompts)
    return ForeignColumns(f"Alpaca columns read as {form}", convert, ("instruction", "input", "output", "system"))


def _from_sharegpt(fields: Fields) -> Fields:
    turns = fields.get("conversations")
    if not isinstance(turns, list):
        raise RecordError(
            f"'conversations' must be a list of turns with 'from' and 'value', got {value_in_words(turns)}"
        )
    _require_absent(fields, "messages", "prompt", "text")
    messages = [_turn(number, turn) for number, turn in enumerate(turns, start=1)]
    system = _system(fields)
    if system and any(message["role"] == "system" for message in messages):
        raise RecordError("'system' is not empty, and 'conversations' has a system turn, too: expected one of them")
    return fields | {"messages": system + messages}


def _turn(number: int, turn: Any) -> Fields:
    where = f"turn {number} of 'conversations'"
    if not isinstance(turn, dict):
        raise RecordError(f"{where} must have 'from' and 'value', found {value_in_words(turn)}")
    if not {"from", "value"} <= set(turn):
        hint = "; 'role' and 'content' belong in a column 'messages'" if "role" in turn else ""
        raise RecordError(f"{where} must have 'from' and 'value', found {name_list(turn)}{hint}")
    if not isinstance(turn["from"], str) or turn["from"] not in ROLES:
        raise RecordError(f"'from' of {where} is {value_in_words(turn['from'])}: expected one of {name_list(ROLES)}")
    if not isinstance(turn["value"], str):
        raise RecordError(f"'value' of {where} must be a string, got {value_in_words(turn['value'])}")
    role = ROLES[turn["from"]]
    # these keys are kept, so that `require_targets` raises an error for them
    masks = {key: turn[key] for key in MASKS if turn.get(key) not in (None, 1)} if role == "assistant" else {}
    return {"role": role, "content": turn["value"], **masks}


def _system(fields: Fields) -> list[Fields]:
    text = string_value({"system": fields.get("system") or ""}, "system", may_be_empty=True)
    return [{"role": "system", "content": text}] if text else []


def _from_alpaca(fields: Fields, *, as_chat: bool, prompts: bool) -> Fields:
    _require_absent(fields, "conversations", "messages", "prompt", "text")
    if fields.get("history"):
        raise RecordError("'history' is not empty: expected a conversation of several turns in a column 'messages'")
    instruction = string_value(fields, "instruction")
    input_text = string_value({"input": fields.get("input") or ""}, "input", may_be_empty=True)
    output = fields.get("output")
    # if only prompts are read, the output is not used: it can be absent, but it must not be empty
    if not prompts or ("output" in fields and not (isinstance(output, str) and output)):
        output = string_value(fields, "output")
    system = _system(fields)
    if as_chat:
        question = f"{instruction}\n\n{input_text}" if input_text else instruction
        ours: Fields = {"prompt": [*system, {"role": "user", "content": question}]}
        completion: Any = [{"role": "assistant", "content": output}]
    elif system:
        raise RecordError(
            "'system' is not empty, and Alpaca's template has no place for it: expected a student with a chat "
            "template"
        )
    else:
        template = _WITH_INPUT if input_text else _WITHOUT_INPUT
        ours, completion = {"prompt": template.format(instruction, input_text)}, output
    return fields | ours | ({} if output is None else {"completion": completion})


def _require_absent(fields: Fields, *columns: str) -> None:
    ours = [column for column in columns if fields.get(column) is not None]
    if ours:
        raise RecordError(
            f"ambiguous columns: found {name_list(fields)}; expected the columns of the first record, without "
            f"{name_list(ours)}"
        )
