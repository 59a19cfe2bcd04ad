"""The loss between hidden states (`models/hidden_states.py`) as a part of the step's loss."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

from stillhouse.config import StudentConfig, TeacherConfig, as_config_error
from stillhouse.data import MicroBatch
from stillhouse.engine.losses.loss_part import LayerTerm, LossPart, LossSections
from stillhouse.models import Decoder, HiddenMatchLoss, HiddenPair, match_hidden, recorded
from stillhouse.models.families import text_config
from stillhouse.models.hidden_states import HiddenMatch
from stillhouse.models.pretrained import read_configuration
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss import HookedLoss


@dataclass(frozen=True)
class HiddenStates(LossPart):
    """The loss between hidden states of student and teacher. pairs: the layer pairs of all pipeline stages. Negative
    layer numbers count from the last layer; `distributed` replaces them.
    """

    pairs: tuple[HiddenPair, ...] = ()

    key = "objective.hidden"
    needs_teacher = True

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        pairs = tuple(HiddenPair(one.student, one.teacher, one.loss, one.scale) for one in sections.objective.hidden)
        return cls(pairs) if pairs else None

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        pairs = sections.objective.hidden
        return "".join(f" + {one.scale:g}*{one.loss} of layers {one.student} and {one.teacher}" for one in pairs)

    def prepare(self, decoder: Decoder, student: StudentConfig, teacher: TeacherConfig | None) -> None:
        assert teacher is not None
        trusted = teacher.trust_remote_code
        config = text_config(read_configuration(str(teacher.model), teacher.revision, trust_remote_code=trusted))
        with as_config_error(self.key):
            match_hidden(decoder, self.pairs, config.num_hidden_layers, config.hidden_size)

    def distributed(self, student: DistributedStudent) -> Self:
        return replace(self, pairs=student.decoders[0].layer_loss(HiddenMatch).all_pairs)

    @property
    def terms(self) -> Mapping[str, LayerTerm]:
        return {pair.name: LayerTerm(pair.scale, f"loss/{pair.name}_per_token") for pair in self.pairs}

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> "_LayersOfStage":
        return _LayersOfStage(student.layer_loss(HiddenMatch), HiddenMatchLoss(micro_batch.weights_T, normalizer))


class _LayersOfStage(HookedLoss):
    module: HiddenMatch

    def during_teacher(self, teacher: Decoder) -> AbstractContextManager[None]:
        return recorded(teacher, {pair.teacher for pair in self.module.pairs}, self.loss.teacher_BSE)
