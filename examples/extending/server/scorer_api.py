from stillhouse.serving.client.http_client import bytes_of_json
from stillhouse.serving.client.server_api import ServerApi, ServerInfo, json_call, require, top_k_tensors


class ScorerApi(ServerApi):
    name = "scorer"

    def recognises(self, ask):
        return ask("/scorer", None).status == 200

    def describe(self, ask, url):
        return ServerInfo(url, **require(ask("/scorer", None), "/scorer"))

    def calls(self, info, spec, width, documents):
        return [scoring(spec, document) for document in documents]


def scoring(spec, document):
    """`POST /scores` answers with the top ids before each token, and their log-probabilities."""
    tokens = document.tokens[: document.rows.stop + 1].tolist()

    def parse(response):
        return [top_k_tensors([dict(pairs) for pairs in response.json()], document, spec, "/scores")]

    most_bytes = bytes_of_json(len(tokens) * spec.top_k)
    return json_call("/scores", {"ids": tokens, "top_k": spec.top_k}, parse, len(tokens), most_bytes)
