"""`stillhouse generate`: a model's completions of prompts as a data set, for sequence-level distillation.

A line of the file is a record that `data.train` reads, with the origin of its completion. The completions are
generated in batches of fixed membership, and each completion has its own seed. So a command that was killed and
started again writes the same bytes as an undisturbed command. `FILE.settings` has the settings that determine the
completions; a file that was begun with other settings is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from stillhouse.config import TeacherConfig
from stillhouse.config.servers import server_kinds, server_token
from stillhouse.data import Documents, LoadOptions, load_documents, load_tokenizer
from stillhouse.data.read.foreign_columns import foreign_columns, own_forms
from stillhouse.data.read.messages import messages_of, tools_of
from stillhouse.data.record import RecordError
from stillhouse.data.render.record_forms import template_for
from stillhouse.data.render.templates import Template
from stillhouse.display import escaped, print_escaped
from stillhouse.hashing import json_hash
from stillhouse.loops.rollouts import known_ids
from stillhouse.models import eos_ids, read_end_ids
from stillhouse.models.families import ModelFacts, text_config
from stillhouse.models.pretrained import read_configuration
from stillhouse.output.disk import explained_write_errors, flush, replace_text
from stillhouse.output.json_lines import append, parse_object, read_object, validated
from stillhouse.parallel import choose_device
from stillhouse.rollout import Completion, GenerationRequest, Sampling
from stillhouse.rollout.engines import RemoteEngine, same_weights
from stillhouse.rollout.generate import Generator, check_generation
from stillhouse.rollout.plan import PromptSeeds
from stillhouse.run.models import load_model, teacher_fingerprint

#: the suffix of the file with the settings
SETTINGS = ".settings"
#: the number of prompts with which a server's tokenizer is compared
_PROBES = 16


@dataclass(frozen=True)
class GenerationSettings:
    """The settings that determine the completions.

    prompts: a source of records, as in `data.train`.
    samples: the number of completions of each prompt. batch_size: the number of completions of a batch.
    keep_cut: whether completions that were cut at max_new_tokens are kept.
    """

    prompts: str
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1
    batch_size: int = 16
    keep_cut: bool = False

    def __post_init__(self) -> None:
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"--samples: got {self.samples} with --temperature 0, which would give {self.samples} equal "
                "completions of each prompt: expected --samples 1, or a temperature above 0"
            )


def write_data(
    section: TeacherConfig, settings: GenerationSettings, out: Path, engine: str, urls: Sequence[str], device: str
) -> "DataFile":
    """Write the completions of a model to a new file, or continue a file that the same command has begun.

    section: the model. With servers, only its tokenizer and configuration are read here.
    engine, urls: the kind and the addresses of the servers; without addresses, this process generates.

    Raises ValueError for prompts that cannot be read or are too long, and for a file of another command.
    """
    name, code = str(section.model), section.trust_remote_code
    tokenizer = load_tokenizer(name, section.revision, code)
    config = read_configuration(name, section.revision, trust_remote_code=code)
    positions = ModelFacts(config).max_positions or 2**31 - 1
    if settings.max_new_tokens + 2 > positions:
        raise ValueError(
            f"--max-new-tokens: got {settings.max_new_tokens:,}, expected at most {positions - 2:,}, because {name} "
            f"has {positions:,} positions"
        )
    options = LoadOptions(positions - settings.max_new_tokens, prompts=True, keep_records=True)
    prompts = load_documents(settings.prompts, tokenizer, options)
    ends = {*read_end_ids(name, section.revision, trust_remote_code=code), tokenizer.eos_token_id} - {None}
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, eos_ids=tuple(sorted(ends)))
    with _locked(out), ExitStack() as stack:
        if urls:
            vocabulary = min(known_ids(tokenizer), text_config(config).vocab_size)
            server = _open_servers(engine, urls, sampling, vocabulary, prompts, tokenizer)
            stack.callback(server.close)
            weights: dict[str, Any] = {"servers": engine, "top_tokens": [*map(list, server.weights.top_tokens)]}
        else:
            weights = {"files": teacher_fingerprint(section), "device": choose_device(device).type}
        identity = _begin(out, name, prompts, settings, weights)
        form = _RecordForm(prompts.records[0], tokenizer, sampling.eos_ids)
        file = DataFile(out, settings, prompts, form, {"model": name, "model_identity": identity})
        batches = [*file.missing_batches()]
        if not urls and batches:
            generator = load_generator(section, tokenizer, device, sampling)
        for numbers in tqdm(batches, desc="batches", disable=None):
            requests = [file.request(number) for number in numbers]
            if urls:
                completions = [future.result() for future in server.generate(requests)]
            else:
                completions = generator.generate(requests, 0)
            file.append(numbers, completions)
        return file


def load_generator(
    section: TeacherConfig, tokenizer: PreTrainedTokenizerBase, device: str, sampling: Sampling
) -> Generator:
    """Load a model, and prove that it generates what its forward pass predicts. On a CPU, the dtype auto is float32.

    The end-of-sequence ids of `sampling` are replaced by those of the model and the tokenizer.
    """
    place = choose_device(device)
    if place.type == "cpu" and section.dtype == "auto" and section.quantize is None:
        section = section.model_copy(update={"dtype": "float32"})
    decoder = load_model("model", section, place).requires_grad_(False)
    check_generation(decoder, place)
    sampling = Sampling(**asdict(sampling) | {"eos_ids": eos_ids(tokenizer, decoder)})
    # the caller chooses the batches, so no limit of tokens divides them
    vocabulary = known_ids(tokenizer)
    return Generator(decoder, sampling, place, batch_tokens=2**62, vocabulary=vocabulary, tokenizer=tokenizer)


class DataFile:
    """A file of records. When it is opened, an incomplete last line is removed. Completions are numbered prompt by
    prompt.

    origin: values that every record has, which name the model.
    records, completions: the numbers of records in the file, and of all completions when it is complete.
    differing: the number of appended records that `data.train` reads as other tokens than the model generated.
    refused: the errors of completions that got no record, because `data.train` would refuse it.
    """

    def __init__(
        self,
        path: Path,
        settings: GenerationSettings,
        prompts: Documents,
        form: "_RecordForm",
        origin: dict[str, str],
    ):
        self._path, self._settings, self._prompts, self._form, self._origin = path, settings, prompts, form, origin
        self._seeds, self.completions = PromptSeeds(settings.seed), len(prompts) * settings.samples
        self.differing, self.refused = 0, list[str]()
        self.records, self._next = self._complete_records()

    def missing_batches(self) -> Iterator[range]:
        """Yield the numbers of the completions of each batch in which one may lack a record."""
        size = self._settings.batch_size
        stop = self.completions if self._next < self.completions else 0
        for first in range(self._next // size * size, stop, size):
            yield range(first, min(first + size, stop))

    def request(self, number: int) -> GenerationRequest:
        ids_N = self._prompts.tokens(number // self._settings.samples)
        return GenerationRequest(number, ids_N, self._seeds.sample_seed(number, 0))

    def append(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Write the records of a batch, except those that the file has. Empty completions get no record, and cut ones
        only with `keep_cut`.

        Raises ValueError if the disk is full.
        """
        lines = list[str]()
        for number, completion in zip(numbers, completions, strict=True):
            text, prompt = self._form.text(completion), number // self._settings.samples
            if number < self._next or not text or (completion.finish == "length" and not self._settings.keep_cut):
                continue
            source, seed = self._prompts.sources[prompt], self.request(number).seed
            origin = {**self._origin, "number": number, "source": source, "seed": seed, "finish": completion.finish}
            record = self._form.record(self._prompts.records[prompt], text) | origin
            try:
                ids_N = self._form.ids(record)
            except RecordError as error:
                self.refused.append(f"{source}: {error}")
                continue
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            generated_N = np.concatenate([self._prompts.tokens(prompt), completion.ids_N])
            self.differing += not np.array_equal(ids_N[: len(generated_N)], generated_N)
        with explained_write_errors(self._path), self._path.open("ab", buffering=0) as file:
            append(self._path, file, "".join(lines).encode())
        flush(self._path)
        self.records += len(lines)

    def _complete_records(self) -> tuple[int, int]:
        """Cut off an incomplete last line. Return the number of complete lines, and the number after the last one."""
        if not self._path.exists():
            return 0, 0
        records, last, size = 0, -1, 0
        with explained_write_errors(self._path), self._path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(size)
                    break
                size, records = size + len(line), records + 1
                last = self._number(line, f"{self._path}:{records}", last)
        return records, last + 1

    def _number(self, line: bytes, where: str, before: int) -> int:
        """The number of a record. Raises ValueError unless it is this command's and follows the number `before`."""
        record = parse_object(line, where)
        number, origin = record.get("number"), {key: record.get(key) for key in self._origin}
        if type(number) is not int or not before < number < self.completions or origin != self._origin:
            raise ValueError(
                f"{where}: expected a record of this command, with a number from {before + 1:,} to "
                f"{self.completions - 1:,} and the model's identity: restore the file, or give another --out"
            )
        return number


class _RecordForm:
    """Makes records of prompts and completions: messages for conversations, otherwise prompt and completion.

    first: the first record with a prompt, whose columns decide the form.
    """

    def __init__(self, first: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]):
        self._tokenizer, self._ends = tokenizer, ends
        self._foreign = foreign_columns(dict(first), tokenizer, prompts=True)
        native = self._native(first)
        ((self._column, *_),) = own_forms(native, prompts=True)
        self._is_text = isinstance(native[self._column], str)
        self._template: Template | None = None

    def record(self, fields: Mapping[str, Any], text: str) -> dict[str, Any]:
        native = self._native(fields)
        if self._is_text:
            return {"prompt": native["prompt"], "completion": text}
        messages = messages_of(native, self._column)
        while messages[-1]["role"] == "assistant":  # the turns that the prompt leaves out, too
            messages.pop()
        tools = tools_of(native)
        record: dict[str, Any] = {"messages": [*messages, {"role": "assistant", "content": text}]}
        return record if tools is None else record | {"tools": tools}

    def _native(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return dict(fields) if self._foreign is None else self._foreign.convert(dict(fields))

    def text(self, completion: Completion) -> str:
        return self._tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True)

    def ids(self, record: dict[str, Any]) -> np.ndarray:
        """The tokens that `data.train` reads from a record. Raises RecordError for a record that it refuses."""
        if self._template is None:
            self._template = template_for(record, self._tokenizer, "completion", end_ids=self._ends)
        return self._template.encode([self._template.render(record)])[0].ids


def _begin(out: Path, model: str, prompts: Documents, settings: GenerationSettings, weights: dict[str, Any]) -> str:
    """Write the file of settings, or compare it with this command. Return the identity of the model's weights.

    weights: what identifies the model: the hash of its files, or the kind of servers and their top tokens.
    """
    path = out.with_name(out.name + SETTINGS)
    now = {"model": model, **asdict(settings), "prompts_hash": prompts.fingerprint(), "weights": weights}
    before = read_object(path) if out.exists() else None
    if before is None:
        if out.exists():
            raise ValueError(f"{out} exists, and {path.name} is not beside it: expected a new file, or both files")
        replace_text(path, json.dumps(now, indent=1) + "\n")
        return json_hash(weights)
    differing = [key for key in now if key != "weights" and before.get(key) != now[key]]
    if not _are_same_weights(before.get("weights"), weights, f"{path}: weights"):
        differing.append("weights")
    if differing:
        words = ", ".join(
            f"{key} {escaped(str(before.get(key)))[:80]}, now {escaped(str(now[key]))[:80]}" for key in differing
        )
        raise ValueError(f"{out} was begun with other settings ({words}): expected the same ones, or another --out")
    return json_hash(before["weights"])


def _are_same_weights(before: Any, now: dict[str, Any], where: str) -> bool:
    if "top_tokens" not in now or not isinstance(before, dict) or before.get("servers") != now["servers"]:
        return bool(before == now)
    top_tokens: list[tuple[int, float]] = validated(list[tuple[int, float]], before.get("top_tokens"), where)
    return same_weights(top_tokens, now["top_tokens"])


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Refuse a second process that writes to the same file."""
    try:
        lock = FileLock(out.with_name(f".{out.name}.lock")).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"--out: another process is writing to {out}: wait until it ends") from error
    except OSError as error:
        raise ValueError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    with lock:
        yield


def _open_servers(
    engine: str,
    urls: Sequence[str],
    sampling: Sampling,
    vocabulary: int,
    prompts: Documents,
    tokenizer: PreTrainedTokenizerBase,
) -> RemoteEngine:
    """Connect to servers that have the model's weights and its tokenizer. Raises ValueError for other servers."""
    servers: RemoteEngine = server_kinds()[engine].open_engine(
        list(urls),
        sampling,
        is_tied=False,
        vocabulary=vocabulary,
        timeout=600.0,
        warn=lambda line: print_escaped(f"warning: {line}", err=True),
        keep_weights=True,
        token=server_token("--url", None),
    )
    with ExitStack() as stack:
        stack.callback(servers.close)
        ids_N = np.concatenate([prompts.tokens(number) for number in range(min(len(prompts), _PROBES))])
        servers.require_tokenizer(tokenizer, tokenizer.decode(ids_N, skip_special_tokens=True))
        stack.pop_all()
    return servers
