from stillhouse.config.signal_source_kind import SourceKind


class Bigrams(SourceKind):
    def open(self, section, teacher, objective, batch_tokens):
        from bigram_store import BigramStore

        return BigramStore(teacher.bigrams)


BIGRAMS = Bigrams("bigrams", "bigrams {}", any_tokens=True)
