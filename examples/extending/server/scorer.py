from stillhouse.serving.client.server_kinds import HttpServer


class Scorer(HttpServer):
    def api(self, *, is_tied=False):
        from scorer_api import ScorerApi

        return ScorerApi()


SCORER = Scorer("scorer", "the scorer", signals=("top_k",))
