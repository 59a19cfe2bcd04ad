"""Images in documents: an add-on, which the core does not import (group `stillhouse.media` of the registry).

The core calls only this module. It imports little, and loads the other modules when a record or a model has images.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillhouse.data.media import MediaProcessor
    from stillhouse.data.media_files import MediaFile
    from stillhouse.models import Decoder

#: a model with a processor has one of these files
_FILES = ("processor_config.json", "preprocessor_config.json")
_MORE_FILES = ("video_preprocessor_config.json",)
#: the maximum number of images of a document that a page shows, because each image adds up to 30 kB to the page
SHOWN = 8
#: the functions that the core calls: for each name, the module in this package and the function's name in it
_FUNCTIONS = {
    "with_files": ("columns", "with_images"),
    "require_support": ("prepare", "require_image_support"),
    "require_layout": ("prepare", "require_image_layout"),
    "with_models_proven": ("prepare", "with_images_proven"),
}


def processor_files(name_or_path: str, revision: str | None = None) -> list[Path]:
    """The files of the processor of a folder or a hub id, if it has one. Raises ValueError for unreadable files."""
    from transformers.utils import cached_file

    from stillhouse.libraries import reading

    files = {}
    for name in (*_FILES, *_MORE_FILES):
        with reading(f"the processor of {name_or_path!r} cannot be read"):
            path = cached_file(
                name_or_path,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        if path is not None:
            files[name] = Path(path)
    return [*files.values()] if files.keys() & {*_FILES} else []


class Images:
    """The interface for the core. The functions of `_FUNCTIONS` are its attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(f"the add-on has no {name}")
        module, function = _FUNCTIONS[name]
        return getattr(import_module(f"{__package__}.{module}"), function)

    def find_processor(
        self, name_or_path: str, tokenizer: "PreTrainedTokenizerBase", *, revision: str | None = None, **options: Any
    ) -> "MediaProcessor | None":
        """The processor of a folder or a hub id; None if it has no processor. options: see `ImageProcessor`."""
        if not (files := processor_files(name_or_path, revision)):
            return None
        from stillhouse.images.processor import ImageProcessor

        return ImageProcessor(name_or_path, files, tokenizer, revision=revision, **options)

    def shown(self, files: "Sequence[MediaFile]") -> dict[str, Any]:
        from stillhouse.images.decode import thumbnail

        return {"images": [thumbnail(image) for image in files[:SHOWN]], "image_count": len(files)}

    def prove(
        self, decoder: "Decoder", processor: "MediaProcessor", agreed: "Callable[[], AbstractContextManager[Any]]"
    ) -> None:
        from stillhouse.images.proof import prove_images

        prove_images(decoder, processor.example_documents(), processor.join, agreed)


IMAGES = Images()
