"""The objective of a run: parses its expressions, checks them against other sections, and describes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stillhouse.config import (
    ConfigError,
    NamedTeacherConfig,
    ObjectiveConfig,
    RolloutConfig,
    StudentConfig,
    TeacherConfig,
    TeachersConfig,
    sampling_temperatures,
)
from stillhouse.engine.losses import LossPart, LossSections
from stillhouse.objective.sampled_terms import Correction
from stillhouse.objective.sampled_tokens import DATASET, STUDENT
from stillhouse.objective.spec import ObjectiveSpec, TeacherShare, read_objective
from stillhouse.registry import load_all
from stillhouse.signals import SignalStore

BY_ORIGIN = "objective.by_origin"


@dataclass(frozen=True)
class RunObjective:
    """The sections that determine the loss of a run.

    rollouts: the section rollout for each source of prompts; empty without rollouts.
    rollout_key: returns the full key that sets a key of rollout for a source of prompts.
    """

    objective: ObjectiveConfig
    student: StudentConfig
    teacher: TeacherConfig | None
    teachers: TeachersConfig | None
    rollouts: Sequence[RolloutConfig] = ()
    rollout_key: Callable[[int, str], str] = lambda source, name: f"rollout.{name}"

    @cached_property
    def spec(self) -> ObjectiveSpec:
        """The parsed objective. Raises ConfigError if a loss contradicts another section."""
        objective = self.objective
        specs = {key: self._parsed(key, loss) for key, loss in objective.losses.items()}
        if objective.by_origin is None:
            (spec,) = specs.values()
        else:
            spec = ObjectiveSpec.from_origins(dict(zip(objective.by_origin.losses, specs.values(), strict=True)))
        if (teachers := self.teachers) is not None:
            # without a route, the weights are divided by their sum
            total = sum(teacher.weight for teacher in teachers.named.values()) if teachers.route is None else 1.0
            shares = {name: TeacherShare(one.weight / total, one.temperature) for name, one in teachers.named.items()}
            spec = replace(spec, teachers=shares, is_mixture=teachers.sum == "distributions")
            if spec.policy.kl_scale and teachers.route is None and not spec.is_mixture:
                raise ConfigError(
                    "objective.loss",
                    f"got '{objective.loss}' with a divergence from each of several teachers: the penalty kl_scale "
                    "has one; expected sampled_kl(k3) in its place, teachers.route or teachers.sum=distributions",
                )
        elif self.teacher is None and spec.needs_teacher:
            key = next(key for key, part in specs.items() if part.needs_teacher)
            reference = (
                f"; for a penalty to the initial weights, this is the student's model: {self.student.model}"
                if specs[key].policy.kl_scale
                else ""
            )
            raise ConfigError(
                "teacher", f"{key} '{objective.losses[key]}' needs a teacher: set teacher.model{reference}"
            )
        self._parts(spec)  # raises ConfigError
        return spec

    @property
    def parts(self) -> list[LossPart]:
        """The additional losses (`engine/losses`)."""
        return self._parts(self.spec)

    def temperature_of(self, teacher: TeacherConfig) -> float:
        """The temperature of a teacher's divergence, from its section or, by default, the objective."""
        if isinstance(teacher, NamedTeacherConfig) and teacher.temperature is not None:
            return teacher.temperature
        return self.objective.temperature

    def in_words(self, stores: Mapping[str, SignalStore]) -> str:
        """Return the resolved objective as a sentence, for records.

        stores: the signal stores, by the keys of the teachers' sections.
        """
        teachers, over = self._teachers_in_words(stores)
        return (
            f"{self.loss_in_words()}, {over}temperature {self.spec.temperature:g}, "
            f"mean over the target tokens of each step ({self._targets_in_words()}): {self.student.model}"
            f"{teachers and f' ← {teachers}'}"
        )

    def in_lines(self, stores: Mapping[str, SignalStore]) -> list[str]:
        """Return the resolved objective as the lines that a run prints first. stores: see `in_words`."""
        teachers, over = self._teachers_in_words(stores)
        if not teachers and (self.teacher is not None or self.teachers is not None):
            teachers = "not in the loss, only in evaluations"
        elif not teachers and not self.rollouts:
            teachers = "none (supervised fine-tuning)"
        return [
            f"{self.loss_in_words()}, {over}temperature {self.spec.temperature:g}",
            f"student: {self.student.model}",
            *([f"teacher: {teachers}"] if teachers else []),
            f"target tokens: {self._targets_in_words()}; the loss is their mean in each step",
        ]

    def _teachers_in_words(self, stores: Mapping[str, SignalStore]) -> tuple[str, str]:
        """Return the teachers of the loss, and the part of the vocabulary that their signals cover; "" and "" if the
        loss needs no teacher.
        """
        teachers, over = "", ""
        if self.teacher is not None and (self.spec.needs_teacher or any(part.needs_teacher for part in self.parts)):
            store = stores.get("teacher")
            source = self.teacher.source_in_words if store is None else store.name
            teachers, over = source, f"{_over(self.teacher, store)}, "
        elif self.teachers is not None and self.spec.needs_teacher:
            parts = []
            for name, teacher in self.teachers.named.items():
                share, store = self.spec.teachers[name], stores.get(f"teachers.{name}")
                source = teacher.source_in_words if store is None else store.name
                details = _over(teacher, store)
                if teacher.prefix is not None:
                    details += ", behind a prefix"
                if share.temperature is not None:
                    details += f", temperature {share.temperature:g}"
                factor = "" if share.weight == 1 else f"{share.weight:.3g} × "
                parts.append(f"{factor}{name}: {source} ({details})")
            route = self.teachers.route
            how = f"one by column '{route}'" if route else f"sum of {self.teachers.sum}"
            teachers = f"{how} of {'; '.join(parts)}"
        return teachers, over

    def loss_in_words(self) -> str:
        """Return the part of the sentence of `in_words` that does not depend on the stores."""
        sections = self._sections(self.spec)
        return f"minimise {self.spec.in_words()}{''.join(kind.in_words(sections) for kind in _part_types())}"

    def _targets_in_words(self) -> str:
        if not self.rollouts:
            if self.objective.tokens == "all":
                return "all tokens, also those of prompts"
            return "all tokens of texts, completions and assistant turns; none of prompts"
        rollout, shares = self.rollouts[0], sorted({rollout.share for rollout in self.rollouts})
        whose = f"by the {rollout.writer}"
        if shares != [1.0]:
            share = " to ".join(f"{share:.0%}" for share in dict.fromkeys((shares[0], shares[-1])))
            whose = f"{share} of the completions {whose}, the others from the dataset"
        return f"all tokens of the completions: {whose}, schedule {rollout.schedule}"

    def _sections(self, spec: ObjectiveSpec) -> LossSections:
        has_teacher = self.teacher is not None or self.teachers is not None
        return LossSections(self.objective, self.student, spec, has_teacher)

    def _parts(self, spec: ObjectiveSpec) -> list[LossPart]:
        sections = self._sections(spec)
        return [part for kind in _part_types() if (part := kind.from_config(sections)) is not None]

    def _parsed(self, key: str, loss: str) -> ObjectiveSpec:
        """Parse the expression of the run, or of one origin, and add the rollouts' correction, discount and sampling
        temperature. Raises ConfigError if the expression contradicts the section `rollout`.
        """
        temperature, is_squared = self.objective.temperature, self.objective.scale_by_temperature_squared
        spec = read_objective(loss, load_all("stillhouse.divergences"), temperature, is_squared)
        if key.startswith(BY_ORIGIN):
            _require_terms_of(key, loss, spec)
        by_student = bool(self.rollouts) and self.rollouts[0].writer == "student"
        if spec.needs_rollouts and not by_student:
            raise ConfigError(key, f"got '{loss}', which needs completions of the student: set rollout")
        if not self.rollouts:
            return spec
        rollout, temperatures = self.rollouts[0], sampling_temperatures(self.rollouts)
        if key != f"{BY_ORIGIN}.{DATASET}":  # no term of the dataset's objective uses rewards
            self._require_rewards(key, loss, spec)
        is_on_student_alone = all(source.is_on_student_alone for source in self.rollouts)
        if spec.cross_entropy is not None and is_on_student_alone and by_student:
            raise ConfigError(
                key,
                f"got '{loss}' with rollout.share=1: cross_entropy applies to the dataset's completions, and there "
                "are none; lower rollout.share, or leave cross_entropy out",
            )
        return replace(
            spec,
            correction=Correction(rollout.correction, rollout.limit),
            discount=rollout.discount,
            sampling_temperature=rollout.temperature,
            sampling_temperatures=tuple(temperatures) if len(temperatures) > 1 else (),
        )

    def _require_rewards(self, key: str, loss: str, spec: ObjectiveSpec) -> None:
        """Raise ConfigError for a missing reward, or for a reward or a discount that the objective does not use."""
        without = [number for number, rollout in enumerate(self.rollouts) if rollout.reward is None]
        if spec.needs_rewards and without:
            is_of_all = len(without) == len(self.rollouts)
            reward_key = "rollout.reward" if is_of_all else f"data.train[{without[0]}].rollout.reward"
            raise ConfigError(reward_key, f"expected a reward, because {key} is '{loss}'")
        for number, rollout in enumerate(self.rollouts):
            if rollout.reward is not None and spec.policy_gradient is None:
                reward_key = self.rollout_key(number, "reward")
                raise ConfigError(reward_key, f"has no effect with {key} '{loss}': expected policy_gradient")
        if self.rollouts[0].discount and not (spec.policy_gradient and spec.teacher_kl):
            raise ConfigError("rollout.discount", f"has an effect only with policy_gradient(teacher_kl=…) in {key}")


def _part_types() -> list[type[LossPart]]:
    """Return the kinds of losses in addition to the objective; those of the student's section are first."""
    types = (kind.part() for kind in load_all("stillhouse.parts").values())
    return sorted(types, key=lambda kind: kind.key, reverse=True)


def _require_terms_of(key: str, loss: str, spec: ObjectiveSpec) -> None:
    """Raise ConfigError if the objective of an origin has terms that rows of this origin cannot have."""
    origin = key.rpartition(".")[2]
    if origin == STUDENT and spec.cross_entropy is not None:
        raise ConfigError(
            key,
            f"got '{loss}': cross_entropy applies to completions of the dataset; expected it under "
            f"{BY_ORIGIN}.{DATASET}",
        )
    if origin != STUDENT and spec.needs_rollouts:
        raise ConfigError(
            key,
            f"got '{loss}': sampled_kl and policy_gradient need tokens that the student has sampled; expected them "
            f"under {BY_ORIGIN}.{STUDENT}",
        )


def _over(teacher: TeacherConfig, store: SignalStore | None) -> str:
    if store is None or store.signal.is_exact:
        return "over the full vocabulary"
    tail = f" (tail: {teacher.tail})" if store.signal.has_tail else ""
    return f"over {store.signal} of the teacher{tail}"
