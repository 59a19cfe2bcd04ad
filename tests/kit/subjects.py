"""The inputs of the campaign, loaded by the package's functions: configurations, data, models and published weights.

A subject has its own folder. Called with a source of random numbers, it damages its input and loads it once.
"""

import base64
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import torch
from kit import mutations
from kit.engine_answers import METADATA, true_answers
from kit.image_models import picture, write_processor
from kit.runs import save_model, write_records, write_texts
from kit.template_messages import template_messages
from kit.toy_tokenizer import GENERATION_TEMPLATE, REASONING_TEMPLATE, toy_tokenizer

from docs.write_config import EXAMPLE
from stillhouse.config import RunConfig, dump_config, load_config
from stillhouse.config.schema import value_fields
from stillhouse.config.yaml_text import write_yaml
from stillhouse.data import (
    LoadOptions,
    PackedSequences,
    check_vocabulary,
    load_documents,
    load_tokenizer,
    make_micro_batch,
    tokenizer_fingerprint,
)
from stillhouse.data.media import MediaInputs
from stillhouse.data.render import chat_template
from stillhouse.images import IMAGES
from stillhouse.models import (
    Decoder,
    add_lora,
    check_document_length,
    check_finite_weights,
    initialize_lora,
    model_fingerprint,
)
from stillhouse.models.model_checks import check_saving
from stillhouse.parallel import single_process_runner
from stillhouse.parallel.sharded_loading import empty_decoder, load_weights
from stillhouse.rollout.publish import BUCKET_BYTES, publish, version_folder
from stillhouse.rollout.published_folder import MANIFEST, AdapterBase
from stillhouse.run.setup import RunSetup
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.server.weight_updates import WeightUpdates

Load = Callable[[random.Random], None]
TOKENS = 32
chat_template.TEMPLATE_SECONDS = 2.0  # the campaign loads thousands of templates


def configurations(folder: Path) -> Load:
    config = load_config(None, ["student.model=a", "teacher.model=b", "data.train=c", "out=d", "student.adapter.r=4"])
    texts = [EXAMPLE.encode(), dump_config(config).encode()]
    values = config.model_dump(mode="json")
    keys = list(value_fields(RunConfig))
    path = folder / "run.yaml"

    def load(draw: random.Random) -> None:
        match draw.randrange(4):
            case 0:
                text = write_yaml(
                    {str(key): value for key, value in mutations.damaged_value(draw, values).items()}
                ).encode("utf-8", "surrogatepass")
            case 1:
                text = mutations.damaged_bytes(draw, draw.choice(texts))
            case _:
                text = mutations.damaged_text(draw, draw.choice(texts))
        path.write_bytes(text if draw.random() < 0.7 else texts[0])
        odd = [
            str(draw.choice([draw.choice(mutations.ODD), draw.choice(mutations.PIECES)]))
            for _ in range(draw.choice([0, 0, 1, 2]))
        ]
        config = load_config(path, [f"{draw.choice(keys)}={text}" for text in odd])
        load_config(None, settings={"student": {}} | json.loads(config.model_dump_json()))
        dump_config(config)
        setup = RunSetup(config)
        setup.objective.in_words({})
        _ = setup.layout, setup.device

    return load


def data(folder: Path) -> Load:
    tokenizers = [toy_tokenizer(chat=chat) for chat in ("plain", "generation", "reasoning")]
    originals = folder / "originals"
    originals.mkdir()
    turns = [{"role": "user", "content": "What is four?"}, {"role": "assistant", "content": "Two and two is four."}]
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
    records = {
        "text": [{"text": f"{number} the heads, the heart"} for number in range(6)],
        "pair": [{"prompt": f"{number}?", "completion": "Paris"} for number in range(6)],
        "chat": [{"messages": turns * 2, "tools": [tool]} for _ in range(4)],
        "chat_pair": [{"prompt": turns[:1], "completion": turns[1:]} for _ in range(4)],
    }
    for name, rows in records.items():
        write_records(originals / f"{name}.jsonl", rows)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), originals / f"{name}.parquet")
        datasets.Dataset.from_list(rows).save_to_disk(originals / name)
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(originals / f"{name}_split")
    every = sorted(originals.iterdir())
    lines = [path for path in every if path.suffix == ".jsonl"]
    foreign = [path for path in originals.rglob("*") if path.is_file()]

    def load(draw: random.Random) -> None:
        source = draw.choice(draw.choice([lines, every]))
        target = folder / "given" / source.name
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        files = [path for path in target.parent.rglob("*") if path.is_file()]
        mutations.damage_files(draw, sorted(files), foreign)
        documents = load_documents(
            target,
            draw.choice(tokenizers),
            LoadOptions(TOKENS, tokens=draw.choice(["completion", "all"]), on_error=draw.choice(["raise", "skip"])),
        )
        documents.report.summary()
        packed = PackedSequences(documents, max_tokens=TOKENS, seed=0)
        packed.micro_batch(packed.order(0)[:2])
        documents.split(0.5)

    return load


def models(folder: Path) -> Load:
    originals = folder / "originals"
    for name, family, template in (("plain", "llama", REASONING_TEMPLATE), ("shards", "qwen3", GENERATION_TEMPLATE)):
        made = save_model(originals / name, family)
        toy_tokenizer().save_pretrained(made)
        (made / "chat_template.jinja").write_text(template)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(originals / "shards")
    (originals / "shards" / "model.safetensors").unlink()
    model.save_pretrained(originals / "shards", max_shard_size=200_000)
    chats = write_records(
        folder / "chats.jsonl",
        [{"messages": [{"role": "user", "content": "Four?"}, {"role": "assistant", "content": "Four."}]}],
    )
    texts = write_texts(folder / "texts.jsonl", records=3)
    foreign = [path for path in originals.rglob("*") if path.is_file()]

    def load(draw: random.Random) -> None:
        source = originals / draw.choice(["plain", "shards"])
        target = folder / "given"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        changed = mutations.damage_files(draw, sorted(target.iterdir()), foreign)
        tokenizer = load_tokenizer(str(target))
        tokenizer_fingerprint(tokenizer)
        if any("token" in path.name or path.suffix == ".jinja" for path in changed):
            for records in (texts, chats):
                load_documents(records, tokenizer, LoadOptions(max_tokens=TOKENS))
        decoder = Decoder.from_pretrained(target)
        check(decoder, len(tokenizer))
        check_vocabulary(tokenizer, decoder.vocabulary_rows, "student")
        part = empty_decoder(target)
        load_weights(part, target, torch.device("cpu"))
        check(part, len(tokenizer))

    def check(decoder: Decoder, tokens: int) -> None:
        check_finite_weights(decoder, "student")
        check_document_length(decoder.pretrained, TOKENS, "student")
        check_saving(decoder.pretrained)

    return load


def published(folder: Path, *, lora: bool = False) -> Load:
    """What a server reads when it is told of new weights. After each refusal, it has the weights that it had.

    lora: of adapters, in place of whole models.
    """
    model = save_model(folder / "model", "qwen3_moe")
    student, decoder = Decoder.from_pretrained(model), Decoder.from_pretrained(model)
    if lora:
        add_lora(student, r=2, targets=["q_proj", "o_proj"])
        initialize_lora(student, 1, fresh=False)
    base = AdapterBase(fingerprint=model_fingerprint(model), dtype="float32", quantize=None)
    runner, tokenizer, weights = single_process_runner(student, None), load_tokenizer(str(model)), folder / "weights"
    options: dict[str, Any] = {"run": "a", "tokenizer": tokenizer, "base": base if lora else None}
    versions = [
        publish(runner, weights / str(size), number, bucket_bytes=size, **options)
        for number, size in enumerate((60_000, BUCKET_BYTES))
    ]
    updates = WeightUpdates(decoder, base)
    updates.submit(updates.read(versions[0]), "0")
    updates.apply()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    foreign = [path for version in versions for path in version.iterdir()]

    def load(draw: random.Random) -> None:
        target = folder / "given" / version_folder(folder, draw.choice([0, 0, 0, 1])).name
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(draw.choice(versions), target)
        if draw.random() < 0.6:
            mutations.damage_files(draw, sorted(target.iterdir()), foreign)
        if draw.random() < 0.6:
            odd_file(draw, draw.choice(sorted(target.iterdir())))
        try:
            updates.submit(updates.read(target), "1")
        finally:
            updates.apply()
            assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())

    return load


def odd_file(draw: random.Random, path: Path) -> None:
    """Put something else than a regular file in the place of a file, or make the manifest name it elsewhere."""
    manifest, moved = path.parent / MANIFEST, path.with_name(f"own {path.name}")
    match draw.randrange(9):
        case 0:
            path.unlink()
            os.mkfifo(path)
        case 1:
            path.unlink()
            path.symlink_to(draw.choice(["/dev/zero", "/dev/stdin", path, "/", "/etc/passwd", "nowhere"]))
        case 2:
            path.rename(moved)
            path.symlink_to(moved)
        case 3:
            path.rename(moved)
            os.link(moved, path)
        case 4:
            path.unlink()
            path.mkdir()
        case 5:
            os.truncate(path, draw.choice([0, 2**30, 2**42]))
        case 6 if path != manifest and manifest.exists():
            place = json.dumps(draw.choice(["/", "../", "./", "a/", "", "\0"]))[1:-1] + draw.choice([path.name, ""])
            manifest.write_bytes(manifest.read_bytes().replace(path.name.encode(), place.encode()))
        case 7:
            shutil.copy(path, path.with_name(f"more{draw.choice(['.json', '.safetensors'])}"))
        case _:
            path.chmod(0)


def crashing(folder: Path) -> Load:
    """A subject for the test of the campaign: every third input ends the process."""

    def load(draw: random.Random) -> None:
        if draw.getstate() in fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    fatal = [random.Random(f"crashing 0 {number}").getstate() for number in (2, 5, 8)]
    return load


def images(folder: Path) -> Load:
    """Damaged files of images, and damaged records with images in all forms."""
    write_processor("qwen3_vl", folder)
    tokenizer = load_tokenizer(str(folder))
    processor = IMAGES.find_processor(str(folder), tokenizer, most_pixels=500)
    assert processor is not None
    given = folder / "given"
    given.mkdir()
    originals: dict[str, bytes] = {}
    for kind in ("png", "jpeg", "gif", "webp", "tiff", "bmp"):
        file = io.BytesIO()
        picture(1, 20, 16).save(file, kind)
        originals[f"a.{kind}"] = file.getvalue()
    answer = {"role": "assistant", "content": "four"}
    url = f"data:image/png;base64,{base64.b64encode(originals['a.png']).decode()}"
    question = {"role": "user", "content": [{"type": "text", "text": "see"}]}

    def load(draw: random.Random) -> None:
        name = draw.choice([*originals])
        value = draw.choice([name, url, {"bytes": None, "path": name}])
        part = draw.choice([{"type": "image", "image": value}, {"type": "image_url", "image_url": {"url": name}}])
        forms = [
            {"messages": [question | {"content": [part, *question["content"]]}, answer]},
            {"messages": [question | {"content": "<image> see"}, answer], "images": [value]},
            {"image": name, "conversations": [{"from": "human", "value": "see"}, {"from": "gpt", "value": "four"}]},
        ]
        lines = json.dumps(draw.choice(forms)).encode()
        if draw.random() < 0.5:
            lines = mutations.damaged_lines(draw, lines)
            (given / name).write_bytes(originals[name])
        else:
            (given / name).write_bytes(mutations.damaged_bytes(draw, originals[name]))
        (given / "a.jsonl").write_bytes(lines)
        options = LoadOptions(max_tokens=TOKENS * 4, on_error=draw.choice(["raise", "skip"]))
        documents = load_documents(given / "a.jsonl", tokenizer, options, processor=processor)
        make_micro_batch(documents, [[0]], media_inputs=MediaInputs(processor))

    return load


def answers(folder: Path) -> Load:
    """Answers of every kind of server, read as the client reads them."""
    true = true_answers()

    def load(draw: random.Random) -> None:
        name = draw.choice(sorted(true))
        content, read = true[name]
        damages = [mutations.damaged_json] if content.startswith(b"{") else [mutations.damaged_bytes]
        damage = draw.choice(damages + [mutations.damaged_safetensors] * (b"__metadata__" in content))
        read(HttpAnswer(200, damage(draw, content), {"metadata": METADATA}))

    return load


SUBJECTS: dict[str, Callable[[Path], Load]] = {
    "configurations": configurations,
    "data": data,
    "images": images,
    "messages": template_messages,
    "models": models,
    "published": published,
    "adapters": partial(published, lora=True),
    "answers": answers,
}
