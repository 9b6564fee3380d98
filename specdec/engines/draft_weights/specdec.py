"""specdec serve with allow_weights=FOLDER: one request, and new weights between two rounds of requests."""

from pathlib import Path

from specdec.engines.draft_weights.base import DraftWeights

PATH = "v1/draft_weights"


class OwnDraftWeights(DraftWeights):
    """`specdec serve` reads checkpoints, and answers that run keep the head they began with."""

    format = "checkpoint"
    advice = "Start it again with allow_weights=FOLDER, a folder that holds the checkpoints: specdec serve --help."

    def check_server(self, url: str) -> None:
        models = self.client.describe_server(url)
        if not all((model.get("draft") or {}).get("takes_weights") for model in models):
            raise ValueError(f"{url} takes no draft weights. {self.advice}")

    def load_into(self, url: str, folder: Path, version: str) -> None:
        self.ask(url, PATH, {"folder": str(folder), "version": version})
