"""Loads the processors of models that read images.

A processor has a tokenizer and an image processor. In most families it also has a video processor, which
transformers cannot load without torchvision. Images do not need torchvision, and Stillhouse reads no videos. So the
video processor is left out if torchvision is not installed.
"""

from functools import cache

from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers import ProcessorMixin as Processor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.utils import is_torchvision_available, is_vision_available

from stillhouse.libraries import reading

_LOADERS = {
    "tokenizer": AutoTokenizer,
    "image_processor": AutoImageProcessor,
    "feature_extractor": AutoFeatureExtractor,
}


def load_processor(name_or_path: str, revision: str | None = None, trust_remote_code: bool = False) -> Processor:
    """The processor of a folder or a hub id, such as `Qwen3VLProcessor`.

    Raises ValueError if Pillow or another package that the processor needs is not installed, if there is no
    processor, and if the processor is damaged.
    """
    if not is_vision_available():
        raise ValueError(
            f"the processor of {name_or_path!r} needs Pillow, which is not installed: "
            "pip install 'stillhouse[images]'"
        )
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    with reading(f"the processor of {name_or_path!r} cannot be loaded"):
        if is_torchvision_available():
            return AutoProcessor.from_pretrained(name_or_path, **options)
        settings, _ = Processor.get_processor_dict(name_or_path, revision=revision)
        name = settings.get("processor_class")
        kind = processor_class_from_name(name) if name else None
        kind = kind or PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(name_or_path, **options))]
        if "video_processor" not in kind.get_attributes():
            return AutoProcessor.from_pretrained(name_or_path, **options)
        parts = [
            None if part == "video_processor" else _LOADERS[part].from_pretrained(name_or_path, **options)
            for part in kind.get_attributes()
        ]
        return _without_videos(kind).from_args_and_dict(parts, settings)


@cache
def _without_videos(kind: type[Processor]) -> type[Processor]:
    """A subclass of `kind` with the same name, whose processors need not have a video processor."""

    def check_argument_for_proper_class(self: Processor, name: str, part: object) -> object:
        if name == "video_processor" and part is None:
            return type(None)
        return kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check_argument_for_proper_class})
