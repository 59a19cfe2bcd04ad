"""Real language models and tokenizers from the package registries: what GGUF files mean, and what is made of them."""

import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.gguf_files import gguf_log_probs, real_model
from kit.runs import metrics, write_records
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stillhouse.config import load_config
from stillhouse.data.render.alignment import Aligner
from stillhouse.fetch import PACKAGES
from stillhouse.fetch.archives import download, unpack
from stillhouse.gguf.tokenizer import gguf_tokenizer
from stillhouse.models import Decoder
from stillhouse.run.run import distill

pytestmark = pytest.mark.slow
#: nats; float32 in the forward against float64. Measured: 3.4e-5 (SmolLM2, 30 layers) and 7.1e-5 (Gemma 3, 18 layers)
BOUND = 5e-4
TEXTS = [*pydoc_data.topics.topics.values()][:60]
TEXTS += ["a" + " " * n + "b\n" + "\n" * n + " " * n + "x = 12345.678" for n in (1, 2, 3, 5, 30, 31, 32, 33, 70)]
TEXTS += ["Žluťoučký kůň, 你好世界, مرحبا, 😀, don't, I'LL, e\u0301 <b>x</b>\t\ty\r\n", "2024-12-01  1,000,000"]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The plain folder of a model, and its GGUF."""
    folder, package = real_model(request.param), PACKAGES[request.param]
    root = tmp_path_factory.mktemp("gguf")
    (root / "archives").mkdir()
    assert package.gguf is not None
    unpack(download(package, root / "archives", 600), package.files, root)
    yield folder, root / package.gguf.file
    (root / package.gguf.file).unlink()


def test_log_probs_are_those_of_the_file(model: tuple[Path, Path]) -> None:
    """In float64, in llama.cpp's order of operations, from the file alone. The greedy tokens are the same."""
    folder, path = model
    ids = AutoTokenizer.from_pretrained(folder)("The still is heated slowly, and what boils first leaves first.")
    decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        read = decoder(torch.tensor([ids["input_ids"]])).logits[0].log_softmax(-1).numpy()
    expected = gguf_log_probs(path, ids["input_ids"])
    print(f"{folder.name}: log-probabilities differ by at most {np.abs(read - expected).max():.2g}")
    assert np.abs(read - expected).max() < BOUND
    assert (read.argmax(-1) == expected.argmax(-1)).all()


def test_a_real_model_passes_our_own_proofs_and_answers() -> None:
    folder = real_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoder = Decoder.from_pretrained(folder, dtype="float32")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = decoder.pretrained.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The capital of France is Paris."


def test_gemma_splits_texts_as_its_own_tokenizer() -> None:
    ours, real = (AutoTokenizer.from_pretrained(real_model(name)) for name in ("gemma3-270m", "gemma3-tokenizer"))
    assert [ours(text)["input_ids"] for text in TEXTS] == [real(text)["input_ids"] for text in TEXTS]


def test_smollm2_splits_digits_and_spaces_as_it_was_trained() -> None:
    """transformers takes GPT-2's rule: "  12" would become Ġ Ġ 1 2, where SmolLM2's own rule keeps the two spaces."""
    tokenizer = AutoTokenizer.from_pretrained(real_model("smollm2"))
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS] == TEXTS


@pytest.mark.parametrize(("name", "rule"), [("qwen3-tokenizer", "qwen2"), ("llama3.1-tokenizer", "llama-bpe")])
def test_a_rule_splits_texts_as_the_models_own_tokenizer(name: str, rule: str) -> None:
    """A GGUF's metadata, written from a real tokenizer.json, give the ids of that tokenizer."""
    folder = real_model(name)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {number: token for token, number in content["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [
            1 if number not in added else 3 if added[number]["special"] else 4 for number in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]
        ],
    }
    made, real = gguf_tokenizer(Path("made.gguf"), metadata), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert made(text)["input_ids"] == real(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", [name for name, package in PACKAGES.items() if package.gguf is None])
def test_a_real_tokenizer_is_read(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model(name))
    assert (
        tokenizer.decode(tokenizer("Two and two is four.", add_special_tokens=False)["input_ids"])
        == "Two and two is four."
    )
    assert (tokenizer.chat_template is not None) == ("chat template of" in PACKAGES[name].about)


def test_a_part_of_a_real_model_learns_from_the_whole(tmp_path: Path) -> None:
    """The first step's loss and norm of the gradient are those of transformers in float64, and the KL falls."""
    teacher, text = real_model("smollm2"), TEXTS[0][:600]
    tokenizer, config = AutoTokenizer.from_pretrained(teacher), AutoConfig.from_pretrained(teacher)
    config.num_hidden_layers = 10
    config.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    write_records(tmp_path / "text.jsonl", [{"text": text}])
    settings = {
        "student": {"model": str(tmp_path / "student"), "init": {"from": "teacher", "layers": "every 3"}},
        "teacher": {"model": str(teacher)},
        "data": {"train": str(tmp_path / "text.jsonl"), "eval": 0, "max_tokens": 256},
        "train": {"steps": 6, "tokens_per_step": 256, "micro_batch_tokens": 256, "learning_rate": 3e-4, "warmup": 0},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "device": "cpu",
        "out": str(tmp_path / "run"),
    }
    distill(load_config(None, settings=settings))
    first, *_, last = metrics(tmp_path / "run")
    loss, norm = reference_step(teacher, [*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    assert first["loss/total_nats_per_token"] == pytest.approx(loss, rel=1e-4)
    assert first["train/gradient_norm"] == pytest.approx(norm, rel=1e-3)
    assert last["loss/total_nats_per_token"] < 0.8 * loss


def reference_step(teacher: Path, ids: list[int]) -> tuple[float, float]:
    """The forward KL in nats per token of SmolLM2 with every third layer, and the norm of its gradient.

    In float64, except for the norms of Llama's layers, which compute in float32.
    """
    whole, part = (AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64) for _ in range(2))
    part.model.layers = part.model.layers[::3]
    input_ids = torch.tensor([ids])
    with torch.no_grad():
        log_p = whole(input_ids).logits[0, :-1].log_softmax(-1)
    log_q = part(input_ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([weight.grad for weight in part.parameters()]).item()


@pytest.mark.parametrize("teacher", [name for name in PACKAGES if name != "smollm2"])
def test_real_tokenizers_are_aligned_in_both_directions(teacher: str) -> None:
    """Both sides of a span that is characters decode to the same text, and the spans are the whole text.

    Qwen's tokenizer composes letters with their accents, so a text with an accent of its own is refused.
    """
    names = "smollm2", teacher
    tokenizers = [AutoTokenizer.from_pretrained(real_model(name)) for name in names]
    for one, other in (tokenizers, tokenizers[::-1]):
        aligner = Aligner(one, other)
        for text in TEXTS[40:]:
            ids = np.array([*one(text, add_special_tokens=False)["input_ids"], one.eos_token_id], dtype=np.int32)
            if "qwen3" in other.name_or_path and "e\u0301" in text:
                with pytest.raises(ValueError, match="the teacher's tokenizer changes the text near"):
                    aligner.align([ids])
                continue
            (document,) = aligner.align([ids])
            sides = [
                [made.decode(side[span.start : span.stop]) for span in spans]
                for made, side, spans in (
                    (one, ids, [span.student for span in document.spans]),
                    (other, document.teacher_tokens, [span.teacher for span in document.spans]),
                )
            ]
            whole = [pair for pair in zip(*sides, strict=True) if "\N{REPLACEMENT CHARACTER}" not in "".join(pair)]
            assert all(student == taught for student, taught in whole[:-1])
            assert one.decode(ids[:-1]) == other.decode(document.teacher_tokens, skip_special_tokens=True)
            covered = [at for span in document.spans for at in span.student]
            assert covered == [*range(len(ids))]
