"""A run's configuration: one strict class per section, without torch, and the functions that read and write it.

`load_config` reads YAML and overrides into a `RunConfig`, and `dump_config` writes YAML. Each component gets only its
own section. The keys are a contract; `docs/config.md` lists them and is generated from these classes.
"""

from stillhouse.config.adapter import AdapterConfig
from stillhouse.config.checkpoint import CheckpointConfig
from stillhouse.config.data import DataConfig
from stillhouse.config.errors import ConfigError, MissingKeyError
from stillhouse.config.evaluation import EvalConfig
from stillhouse.config.keys import override_hint
from stillhouse.config.loading import dump_config, load_config
from stillhouse.config.mtp import MtpConfig
from stillhouse.config.objective import ObjectiveConfig
from stillhouse.config.parallel import ParallelConfig
from stillhouse.config.rollout import RolloutConfig
from stillhouse.config.run import RunConfig
from stillhouse.config.student import StudentConfig
from stillhouse.config.teacher import TeacherConfig
from stillhouse.config.teachers import NamedTeacherConfig, TeachersConfig
from stillhouse.config.train import TrainConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "MissingKeyError",
    "MtpConfig",
    "NamedTeacherConfig",
    "ObjectiveConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeachersConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
    "override_hint",
]
