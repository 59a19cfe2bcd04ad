"""The names and values of weights in files, for models of all families: read, exported and published.

An export has the files that transformers writes for the model. The class that its config.json names reads them, and
so do AutoModel and a server that takes published weights.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from kit import slow
from kit.causal_families import CAUSAL, build, poisoned_memory
from kit.loading_memory import export_under
from kit.runs import session_of, write_run
from kit.shard_ranks import on_ranks
from kit.tensors import tensors_in
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel

from stillhouse.checkpoint.export_weights import save_from_checkpoint
from stillhouse.engine.state_folder import WEIGHT, write_tensors
from stillhouse.models import Decoder
from stillhouse.models.families import HEAD_NAMES
from stillhouse.parallel import Degrees, empty_decoder, load_weights, single_process_runner
from stillhouse.parallel.ranks import ONE_PROCESS
from stillhouse.rollout.publish import publish
from stillhouse.rollout.published_folder import AdapterBase
from stillhouse.serving.server.weight_updates import WeightUpdates

CPU, IDS = torch.device("cpu"), torch.arange(3, 20)[None]
#: why a family is left out
LEFT_OUT = {
    "emu3": "no class for its text configuration",
    "mllama": "no class for its text configuration",
    "modernbert-decoder": "refused: a layer between the last hidden states and the head",
    "youtu": "transformers sets the embedding of the padding token to zero when it loads the model",
}
#: the language models of files that also have a vision tower
WHOLE = ("qwen3_5", "llama4")
#: other names than the model's: experts one by one or joined, blocks that layers share, a tied head, joined matrices
QUICK = ("gemma3", "mistral3", "kimi_k25", "zamba2", "lfm3", "gpt_neo", "mixtral", "deepseek_v4", "gpt_oss")
CASES = [
    *((family, True) for family in WHOLE),
    *((family, False) for family in QUICK),
    *(slow(family, False) for family in CAUSAL if family not in {*QUICK, *LEFT_OUT}),
]


def require_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


def require_readable(folder: Path, student: Decoder) -> None:
    """Require that transformers reads an export: the class that it names, and AutoModel, which has no head."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, report = getattr(transformers, name).from_pretrained(folder, **options)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(model), logits(student.pretrained))
    if student.config.model_type == "deepseek_v4":
        return  # transformers does not find a backbone's norm in its own files (5.23)
    _, report = AutoModel.from_pretrained(folder, trust_remote_code=False, **options)
    assert not report["missing_keys"]
    heads = (*HEAD_NAMES, "output", "head")  # the last ones are GIT's and RWKV's
    assert not [name for name in report["unexpected_keys"] if not name.rpartition(".")[0].endswith(heads)]


@pytest.mark.parametrize(("family", "whole"), CASES)
def test_weights_are_read_and_written_as_by_transformers(tmp_path: Path, family: str, whole: bool) -> None:
    model, export = tmp_path / "model", tmp_path / "export"
    build(family, whole=whole).save_pretrained(model)
    for dtype in ("bfloat16", "float32"):
        loaded, sharded = Decoder.from_pretrained(model, dtype=dtype, verify=False), empty_decoder(model, dtype=dtype)
        with poisoned_memory():
            load_weights(sharded, model, CPU)
        require_same(sharded.state_dict(), loaded.state_dict())
        require_same(dict(sharded.named_buffers()), dict(loaded.named_buffers()))

    loaded.save_pretrained(export)
    if not whole:
        require_same(tensors_in(export), tensors_in(model))
    require_readable(export, loaded)
    (tmp_path / "resume").mkdir()
    weights = {WEIGHT + key: value for key, value in loaded.state_dict().items()}
    write_tensors(tmp_path / "resume", weights, ONE_PROCESS)
    save_from_checkpoint(tmp_path, sharded, tmp_path / "resume")
    require_same(tensors_in(tmp_path), tensors_in(export))

    published = publish(single_process_runner(loaded, None), tmp_path / "weights", 1)
    require_same(tensors_in(published), tensors_in(export))
    for name in ("config.json", "generation_config.json"):
        assert (published / name).read_bytes() == (export / name).read_bytes() == (tmp_path / name).read_bytes()

    server = Decoder.from_pretrained(model, dtype="float32", verify=False)
    for parameter in server.parameters():
        torch.nn.init.zeros_(parameter)
    updates = WeightUpdates(server, AdapterBase(fingerprint="", dtype="float32", quantize=None))
    updates.submit(updates.read(published), "1")
    updates.apply()
    require_same(server.state_dict(), loaded.state_dict())


@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_trained_on_text_is_saved_as_a_language_model(tmp_path: Path, family: str) -> None:
    """Without a processor or without images, and a warning says that the saved student has no vision tower."""
    write_run(tmp_path)
    tokenizer = toy_tokenizer()
    build(family, whole=True, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    alone = {"teacher": None, "objective.loss": "cross_entropy"}
    session = session_of(tmp_path, **alone, **{"student.model": str(tmp_path / "whole")})
    assert any("The saved student has no vision tower" in warning for warning in session.warnings)
    session.models.student.save_pretrained(tmp_path / "saved")
    require_readable(tmp_path / "saved", session.models.student)
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*TextConfig"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    session = session_of(tmp_path, **alone)
    assert not any("vision tower" in warning for warning in session.warnings)


@pytest.mark.parametrize(("family", "whole"), [("qwen3_5", True), ("zamba2", False), slow("kimi_k25", False)])
def test_two_processes_write_the_files_of_one(tmp_path: Path, family: str, whole: bool) -> None:
    build(family, whole=whole).save_pretrained(tmp_path / "model")
    Decoder.from_pretrained(tmp_path / "model", dtype="float32", verify=False).save_pretrained(tmp_path / "one")
    on_ranks(export_under, 2, (tmp_path / "model", tmp_path / "two", Degrees(fsdp=2)))
    expected = tensors_in(tmp_path / "one")
    for folder in ("export", "weights/version-00000007"):
        require_same(tensors_in(tmp_path / "two" / folder), expected)
        for name in ("config.json", "generation_config.json"):
            assert (tmp_path / "two" / folder / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
