"""A folder with what a run needs of a teacher that does not run in its job: configuration, tokenizer, output head."""

from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from stillhouse.models import Decoder
from stillhouse.models.head import Head
from stillhouse.parallel.loading import checkpoint_names


def save_teacher(folder: Path, teacher: Decoder, tokenizer: PreTrainedTokenizerBase, *, with_head: bool) -> None:
    """Save a teacher's configuration and tokenizer, and its output head with the name that transformers gives it."""
    folder.mkdir(exist_ok=True)
    teacher.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if with_head:
        head = teacher.head
        assert isinstance(head, Head)
        own = {
            checkpoint_names(teacher, f"head.linear.{name}")[0]: value.detach().cpu().contiguous()
            for name, value in head.linear.named_parameters()
        }
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
