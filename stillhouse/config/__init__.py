"""The configuration of a run: one strict class per section, and functions to read and write it. Needs no torch.

A component gets only its own section. The keys are a public interface; these classes generate `docs/config.md`.
"""

from stillhouse.config.data_section import DataConfig, SourceConfig
from stillhouse.config.errors import ConfigError, MissingKeyError, as_config_error
from stillhouse.config.evaluation_section import CheckpointConfig, EvalConfig, EvalPromptsConfig
from stillhouse.config.explain_errors import override_hint
from stillhouse.config.objective_section import ObjectiveConfig
from stillhouse.config.parallel_section import ParallelConfig
from stillhouse.config.read_config import dump_config, load_config
from stillhouse.config.rollout_section import RolloutConfig, sampling_temperatures
from stillhouse.config.run_section import RunConfig
from stillhouse.config.student_section import AdapterConfig, MtpConfig, StudentConfig
from stillhouse.config.teacher_section import NamedTeacherConfig, TeacherConfig, TeachersConfig
from stillhouse.config.train_section import TrainConfig

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
