"""Gives the student's weights to servers that generate completions, and proves after each update that the servers use
these weights.

The version that a server reports proves nothing: a server can report it even if loading changed nothing, loaded only
a part of the weights, or loaded the files of another version. So each server completes a few of the run's prompts
after an update, and its log-probabilities of these completions are compared with the trainer's.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from stillhouse.config import RolloutConfig
from stillhouse.config.servers import ServerError, server_kinds
from stillhouse.data import Documents
from stillhouse.loops.session import Data, Models
from stillhouse.models import model_fingerprint
from stillhouse.models.processors import cross_entropy
from stillhouse.objective.metrics import OLD_LOG_PROBS
from stillhouse.output.disk import explained_write_errors
from stillhouse.output.folder import RunFolder
from stillhouse.parallel import ShardedMicroBatches, local_folder, watchdog
from stillhouse.rollout import Completion, Sample
from stillhouse.rollout.documents import StepPacker, TargetRules, step_documents
from stillhouse.rollout.engines import PROBES, ROUNDED, RemoteEngine
from stillhouse.rollout.publish import publish
from stillhouse.rollout.published_folder import AdapterBase
from stillhouse.rollout.rollout import ERRORS, errors_of_signals
from stillhouse.signals import SignalsLostError
from stillhouse.signals.signal_store import SECONDS_BETWEEN_LOOKS, SignalWatch

#: the largest rounding difference, in nats, if server and trainer compute in the same way in float32
_EXACT = 1e-3
#: the probes are the shortest among this number of first prompts
_CHOICE = 256


class WeightsOnServers:
    """The weights of a run's student on servers. Its methods are collectives of all processes.

    engine: the servers, on rank 0.
    run: the run's identity in published weights.
    """

    def __init__(
        self,
        models: Models,
        data: Data,
        config: RolloutConfig,
        engine: RemoteEngine | None,
        packer: StepPacker,
        folder: RunFolder,
        run: str,
    ):
        self._models, self._data, self._config, self._engine = models, data, config, engine
        self._packer, self._run = packer, run
        weights = self._config.weights
        # each run has a subfolder, because several runs may share rollout.weights
        self.folder = Path(weights) / run if weights else folder.path / "weights"
        self._published = self.folder
        self._base: AdapterBase | None = None
        student = models.student_config
        if student.adapter is not None:
            with models.ranks.shared(*ERRORS) as shared:
                if models.ranks.is_first:
                    fingerprint = model_fingerprint(local_folder(student.model, student.revision))
                    shared.value = {"fingerprint": fingerprint, "dtype": student.dtype, "quantize": student.quantize}
            self._base = AdapterBase(**shared.value)

    def publish(self, version: int) -> None:
        """Write the weights to a folder. During this, the servers still generate with the previous weights."""
        with explained_write_errors(self.folder):
            self._published = publish(
                self._models.engine.student,
                self.folder,
                version,
                run=self._run,
                tokenizer=self._data.tokenizer,
                base=self._base,
            )

    def update(self, version: int) -> None:
        """Make the servers load the published weights, and prove that the servers use these weights.

        Raises SignalsLostError on all ranks if a server generates with other weights than the student's, or if
        SIGTERM or another signal of the operating system comes before all servers have loaded the weights.
        """
        models, prompts = self._models, self._data.train.documents
        with errors_of_signals(), models.ranks.shared(*ERRORS) as shared:
            if self._engine is not None:
                # an update can take minutes; a signal ends the wait for it, but not its thread
                require_no_signal = ServerWatch()
                threads = ThreadPoolExecutor(1)
                try:
                    update = threads.submit(self._engine.update_weights, version, self._published)
                    while not wait([update], SECONDS_BETWEEN_LOOKS).done:
                        require_no_signal()
                    update.result()
                finally:
                    threads.shutdown(wait=False)
                probed = self._engine.weights.probed.items()
                shared.value = {url: [one.as_json() for one in completions] for url, completions in probed}
        urls, numbers = list(shared.value), probe_prompts(prompts)
        if not urls:  # all servers have just been restarted, and will get the weights again
            return
        completions = [Completion.from_json(values) for contents in shared.value.values() for values in contents]
        assert len(completions) == len(urls) * len(numbers)
        pairs = zip(numbers * len(urls), completions, strict=True)
        probes = [Sample(at, number, completion) for at, (number, completion) in enumerate(pairs)]
        micro_batches = self._packer.sharded(models.engine.student, step_documents(prompts, probes, TargetRules()))
        with watchdog.nested(f"the proof that servers generate with version {version}"):
            rounding = self._require_in_use(version, urls, micro_batches, len(numbers))
        if self._engine is not None:
            self._engine.weights.set_proved(urls[0], rounding)

    def _require_in_use(
        self, version: int, urls: Sequence[str], micro_batches: ShardedMicroBatches, probes: int
    ) -> float:
        """Raise SignalsLostError if a server's log-probabilities come from other weights. A collective.

        Returns the largest difference in nats that rounding can cause.

        probes: the number of probes of each server.
        """
        models, gaps_by_server = self._models, dict[int, list[float]]()
        # only Stillhouse's own servers are known to round in the same way as the trainer
        is_exact = (
            server_kinds()[self._config.engine].rounds_as_here
            and models.autocast is None
            and next(models.student.parameters()).dtype == torch.float32
            and torch.get_float32_matmul_precision() == "highest"
        )
        rounding, entries = _EXACT if is_exact else ROUNDED, list[list[float]]()
        outputs = models.engine.process(cross_entropy(), micro_batches, [{}] * len(micro_batches))
        for micro_batch, output in zip(micro_batches, outputs, strict=False):
            rows = micro_batch.valid_index
            gaps_T = (-output.per_token["cross_entropy"] - micro_batch.per_token[OLD_LOG_PROBS])[rows].abs()
            servers_T = (micro_batch.document_T[rows] // probes).to(gaps_T.dtype)
            entries += torch.stack([servers_T, gaps_T], 1).tolist()
        for server, gap in chain.from_iterable(models.ranks.gather(entries)):
            gaps_by_server.setdefault(int(server), []).append(gap)
        for number, url in enumerate(urls):
            if not (gaps := gaps_by_server.get(number)):
                raise SignalsLostError(f"{url} has generated no token for the probes of its weights: expected tokens")
            median = statistics.median(gaps)
            if not median <= rounding:  # also true for NaN
                raise SignalsLostError(
                    f"{url} says that it generates with version {version}, and its log-probabilities are those of "
                    f"other weights: they differ from the trainer's by {median:.3g} nats (the median of {len(gaps)} "
                    f"tokens), and rounding can explain at most {rounding:g}: expected a server that loads all "
                    "weights of the published folder, and computes the same model"
                )
        return rounding


class ServerWatch(SignalWatch):
    """A `SignalWatch` for answers of servers, which also reports to the watchdog that this process is alive."""

    def __init__(self) -> None:
        super().__init__(ServerError("a signal came while the run waited for completions"))

    def __call__(self) -> None:
        watchdog.progress()
        super().__call__()


def probe_prompts(prompts: Documents) -> list[int]:
    """Return the numbers of the prompts for the probes. If some prompts have media, only those are chosen."""
    numbers = np.arange(len(prompts))
    if prompts.has_media:
        assert prompts.media is not None
        numbers = np.flatnonzero(np.diff(prompts.media.offsets))
    numbers = numbers[:_CHOICE]
    return numbers[np.argsort(prompts.lengths_D[numbers], kind="stable")[:PROBES]].tolist()
