"""Real language models and tokenizers from package registries, for tests, benchmarks and first runs."""

from stillhouse.first_use import names_at_first_use

_MODULES = {"fetch": "stillhouse.fetch.fetched_folder", "PACKAGES": "stillhouse.fetch.packages"}
__getattr__, __dir__ = names_at_first_use(__name__, _MODULES)
