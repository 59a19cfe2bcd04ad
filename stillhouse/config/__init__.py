"""The configuration of a run: one strict class per section, and functions to read and write it; no torch import.

A component gets only its own section. The keys are a contract; `docs/config.md` is generated from these classes.
"""

from stillhouse.config.errors import ConfigError, MissingKeyError, as_config_error
from stillhouse.config.explain_errors import override_hint
from stillhouse.config.read_config import dump_config, load_config
from stillhouse.config.sections.checkpoint_section import CheckpointConfig
from stillhouse.config.sections.data_section import DataConfig, SourceConfig
from stillhouse.config.sections.eval_section import EvalConfig, EvalPromptsConfig
from stillhouse.config.sections.objective_section import ObjectiveConfig
from stillhouse.config.sections.parallel_section import ParallelConfig
from stillhouse.config.sections.rollout_section import RolloutConfig, sampling_temperatures
from stillhouse.config.sections.run_section import RunConfig
from stillhouse.config.sections.student_section import AdapterConfig, MtpConfig, StudentConfig
from stillhouse.config.sections.teacher_section import NamedTeacherConfig, TeacherConfig, TeachersConfig
from stillhouse.config.sections.train_section import TrainConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "EvalPromptsConfig",
    "MissingKeyError",
    "MtpConfig",
    "NamedTeacherConfig",
    "ObjectiveConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeachersConfig",
    "TrainConfig",
    "as_config_error",
    "dump_config",
    "load_config",
    "override_hint",
    "sampling_temperatures",
]
