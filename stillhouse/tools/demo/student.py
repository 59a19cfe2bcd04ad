"""The demo's student: the teacher's family and vocabulary, a quarter of its parameters, newly initialised."""

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

TEACHER = Path(__file__).parent / "teacher"


def student_config(teacher_config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration with half the teacher's width and one layer less: about a quarter of its parameters."""
    config = copy.deepcopy(teacher_config)
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.num_attention_heads //= 2
    config.num_key_value_heads //= 2
    config.num_hidden_layers -= 1
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def new_student(seed: int, teacher: Path = TEACHER) -> PreTrainedModel:
    """Return a newly initialised student of a saved teacher; the global random state on the CPU does not change."""
    config = student_config(AutoConfig.from_pretrained(teacher, trust_remote_code=False))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def save_new_student(folder: Path, seed: int, teacher: Path = TEACHER) -> None:
    """Write a new student and the teacher's tokenizer as an ordinary Hugging Face model folder."""
    new_student(seed, teacher).save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher, trust_remote_code=False).save_pretrained(folder)
