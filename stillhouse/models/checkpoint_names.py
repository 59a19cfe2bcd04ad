"""The names of a decoder's tensors in transformers' files."""

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from stillhouse.models.adapter import base_name
from stillhouse.models.decoder import Decoder


def checkpoint_names(decoder: Decoder, name: str) -> list[str]:
    """Return the names that a tensor may have in transformers' files: a tied head may be saved as the embedding."""
    model, name = decoder.pretrained, base_name(name)
    prefix = f"{model.base_model_prefix}."
    if decoder.mtp is not None and is_mtp(name):
        return [decoder.mtp.checkpoint_name(model, name.removeprefix("mtp."))]
    if name.startswith("backbone."):
        return [prefix + name.removeprefix("backbone.")]
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    candidates = [f"{head}.{name.removeprefix('head.linear.')}"]
    if getattr(model.config, "tie_word_embeddings", False):  # transformers ignores the text configuration's value
        candidates.append(prefix + decoder.embedding_name.removeprefix("backbone."))
    return candidates


def parts_of_stack(decoder: Decoder, name: str) -> list[str]:
    """Return the names, in files, of the tensors that form the stack `name`, with a * for the expert's number.

    A file has one tensor per expert; a model has one stacked tensor. transformers' conversions define which tensors
    form a stack. The list is empty if `name` is not a stack. With two names (gate and up projection), an expert's
    part of the stack has the rows of the first tensor, then the rows of the second one.
    """
    for conversion in get_model_conversion_mapping(decoder.pretrained):
        target = conversion.target_patterns[0]
        if isinstance(conversion, WeightConverter) and name.endswith(target) and _stacks(conversion):
            return [name.removesuffix(target) + source for source in conversion.source_patterns]
    return []


def is_mtp(name: str) -> bool:
    """Whether a tensor with this name in a decoder belongs to the decoder's MTP layers."""
    return name.startswith("mtp.")


def _stacks(conversion: WeightConverter) -> bool:
    merge, *rest = conversion.operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0:
        return False
    return not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)
