"""Writes a cache from the files of other projects: the command `stillhouse cache import`.

A file of another project names neither the model that wrote it nor the token of each row. So the teacher is run on
some documents, and ValueError is raised if its results differ from the files.

N tokens of a document, K ids per row, V vocabulary, E the teacher's width.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stillhouse.data import load_tokenizer
from stillhouse.models import Decoder, check_finite_weights, evaluating, model_fingerprint
from stillhouse.models.layer_hooks import hooked
from stillhouse.parallel.sharded_loading import local_folder
from stillhouse.signals.cache.files import Manifest, document_id
from stillhouse.signals.cache.formats.distillkit import Compression, DistillkitFiles
from stillhouse.signals.cache.formats.speculators import SpeculatorsFiles
from stillhouse.signals.signal_spec import DTYPES, SignalSpec
from stillhouse.tools.cache_folder import CacheTeacher, write_documents

#: the number of documents on which the teacher is run, spread over all documents
PROBES = 5
#: the largest allowed relative error of hidden states, and the largest mean error of log-probabilities in nats. Other
#: kernels and bfloat16 cause about a tenth of these errors; a wrong token, layer or model causes far larger errors
HIDDEN_ERROR, NATS = 0.1, 0.1

ForeignFiles = DistillkitFiles | SpeculatorsFiles


def import_distillkit(
    source: Path,
    compression: Compression,
    teacher: str,
    out: Path,
    *,
    temperature: float = 1.0,
    packed: bool = False,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    shard_bytes: int | None = None,
) -> Manifest:
    """Write a cache of top-k log-probabilities from DistillKit's Parquet files, or continue to write it.

    The mass outside the ids is not in the files. It is computed as 1 − Σp, which is inaccurate if Σp is nearly 1.

    teacher: a folder or hub id. The teacher is run on some documents to check the files.

    Raises ValueError with file and row for rows that are not valid distributions, and for files of another teacher.
    """
    files = DistillkitFiles(source, compression)
    model = _load_teacher(teacher, dtype, device)
    vocabulary = model.decoder.vocabulary_rows
    if compression.d < vocabulary and compression.d < len(model.tokenizer):
        raise ValueError(
            f"d = {compression.d}, but the teacher has {len(model.tokenizer)} tokens: expected its vocabulary"
        )
    spec = SignalSpec("top_k", compression.exact_dtype, compression.k, temperature)
    numbers, documents = _documents(files, vocabulary)

    def read(places: Sequence[int]) -> list[dict[str, Tensor]]:
        return [files.signal(numbers[place], len(documents[place][1]), vocabulary) for place in places]

    for place, tokens in _probes(files, numbers):
        error = _nats(model.decoder, tokens, read([place])[0], temperature)
        if not error <= NATS:
            raise ValueError(
                f"{files.where(numbers[place])}: its log-probabilities differ from the teacher's by {error:.2g} nats "
                f"on average, expected at most {NATS:g}: is {teacher} the model that wrote them, at temperature "
                f"{temperature:g}?"
            )
    description = model.describe(spec, packed=packed)
    return write_documents(out, description, documents, read, model.save, shard_bytes=shard_bytes)


def import_speculators(
    source: Path,
    teacher: str,
    out: Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    shard_bytes: int | None = None,
) -> Manifest:
    """Write a cache of hidden states from speculators' files, or continue to write it.

    teacher: a folder or hub id. The teacher is run on some documents to check the states. If they precede its last
        norm, the norm is applied to them.

    Raises ValueError with the file if the states are not those of this teacher's last layer.
    """
    files = SpeculatorsFiles(source)
    stored_dtype = next((name for name, dtype in DTYPES.items() if dtype == files.dtype()), None)
    if stored_dtype is None:
        raise ValueError(f"{files.where(0)}: hidden_states of {files.dtype()}: expected {', '.join(DTYPES)}")
    model = _load_teacher(teacher, dtype, device)
    decoder, width = model.decoder, model.decoder.width
    numbers, documents = _documents(files, decoder.vocabulary_rows)
    probes = _probes(files, numbers)
    norms: list[nn.Module | None] = []
    for place, tokens in probes:
        stored_NE = files.last_layer(numbers[place], len(tokens), width)
        norms.append(_needed_norm(decoder, tokens, stored_NE, files.where(numbers[place])))
        if norms[-1] is not norms[0]:
            first, other = files.where(numbers[probes[0][0]]), files.where(numbers[place])
            raise ValueError(f"{other} is normed otherwise than {first}")

    @torch.no_grad()
    def read(places: Sequence[int]) -> list[dict[str, Tensor]]:
        signals = []
        for place in places:
            rows = documents[place][1]
            hidden_NE = files.last_layer(numbers[place], len(rows) + 1, width)[: len(rows)]
            if hidden_NE.dtype != DTYPES[stored_dtype]:
                raise ValueError(
                    f"{files.where(numbers[place])}: {hidden_NE.dtype}, expected {stored_dtype} as in the first"
                )
            normed_NE = hidden_NE if norms[0] is None else _normed(norms[0], hidden_NE)
            signals.append({"hidden": normed_NE.to(DTYPES[stored_dtype])})
        return signals

    description = model.describe(SignalSpec("hidden", stored_dtype))
    return write_documents(out, description, documents, read, model.save, shard_bytes=shard_bytes)


def _load_teacher(name: str, dtype: str, device: torch.device | str) -> CacheTeacher:
    """Load the model that should have written the files. Its identity is a hash of its files, or its commit."""
    tokenizer = load_tokenizer(name)
    decoder = Decoder.from_pretrained(name, dtype=dtype, device=device).eval()
    check_finite_weights(decoder, "teacher")
    folder = Path(local_folder(name))
    return CacheTeacher(name, model_fingerprint(folder) if Path(name).is_dir() else folder.name, decoder, tokenizer)


def _documents(files: ForeignFiles, vocabulary: int) -> tuple[list[int], list[tuple[bytes, range]]]:
    """For each distinct document with two tokens or more: its number in the source, and its id and rows."""
    numbers: dict[bytes, int] = {}
    rows: dict[bytes, range] = {}
    for number, ids in enumerate(files.tokens()):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
            raise ValueError(f"{files.where(number)}: token ids from {ids.min()} to {ids.max()} of {vocabulary}")
        if len(ids) > 1:
            numbers.setdefault(document_id(ids), number)
            rows.setdefault(document_id(ids), range(len(ids) - 1))
    return list(numbers.values()), list(rows.items())


def _probes(files: ForeignFiles, numbers: Sequence[int]) -> list[tuple[int, np.ndarray]]:
    """For each document of the check: its position in `numbers`, and its tokens."""
    places = {numbers[round(at)]: round(at) for at in np.linspace(0, len(numbers) - 1, min(PROBES, len(numbers)))}
    return [(places[number], ids) for number, ids in enumerate(files.tokens()) if number in places]


@torch.no_grad()
def _nats(decoder: Decoder, tokens: np.ndarray, stored: dict[str, Tensor], temperature: float) -> float:
    """Mean over rows of Σ p·|log p − the teacher's log p| over the ids of the row."""
    device = decoder.output_weight.device
    with evaluating(decoder):
        logits_NV = decoder(torch.from_numpy(tokens)[None].to(device))[0, :-1].float() / temperature
    log_p_NK = logits_NV.log_softmax(1).cpu().gather(1, stored["ids"].long())
    stored_NK = stored["log_probs"].float()
    return float((stored_NK.exp() * (stored_NK - log_p_NK).abs()).sum(1).mean())


def _needed_norm(decoder: Decoder, tokens: np.ndarray, stored_NE: Tensor, where: str) -> nn.Module | None:
    """The last norm if the stored states are its input; None if they are already the teacher's hidden states."""
    before_NE, after_NE, norm = _around_last_norm(decoder, tokens)
    errors = [float((stored_NE.float() - hidden_NE).norm() / hidden_NE.norm()) for hidden_NE in (before_NE, after_NE)]
    fits = [error <= HIDDEN_ERROR for error in errors]
    if fits == [True, False]:
        return norm
    if fits == [False, True]:
        return None
    raise ValueError(
        f"{where}: its last layer differs from the teacher's by {errors[0]:.2g} before the last norm and by "
        f"{errors[1]:.2g} after it, relative to their norm; expected at most {HIDDEN_ERROR:g} at one of them: is it "
        "the last layer of this teacher, with row t of token t?"
    )


@torch.no_grad()
def _around_last_norm(decoder: Decoder, tokens: np.ndarray) -> tuple[Tensor, Tensor, nn.Module]:
    """The input and the output [N, E] of the teacher's last norm, and the norm. The output is the hidden states."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(output, Tensor) and arguments and isinstance(arguments[0], Tensor):
            calls.append((module, arguments[0], output))

    inner = (module for module in decoder.backbone.modules() if module is not decoder.backbone)
    with hooked(*(module.register_forward_hook(note) for module in inner)), evaluating(decoder):
        hidden_BNE = decoder(torch.from_numpy(tokens)[None].to(decoder.output_weight.device), head=False)
    for module, before_BNE, after_BNE in reversed(calls):
        if after_BNE is hidden_BNE and before_BNE.shape == hidden_BNE.shape:
            return before_BNE[0].float().cpu(), hidden_BNE[0].float().cpu(), module
    raise ValueError(
        f"the last norm of {decoder.config.model_type} was not found: its hidden states cannot be imported"
    )


def _normed(norm: nn.Module, hidden_NE: Tensor) -> Tensor:
    weight = next(norm.parameters())
    normed: Tensor = norm(hidden_NE.to(weight.device, weight.dtype))
    return normed.cpu()
