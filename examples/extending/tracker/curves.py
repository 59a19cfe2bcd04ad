import csv

from stillhouse.output.trackers import Tracker


class Csv(Tracker):
    library = "csv"

    def __init__(self, run):
        self._file = (run.folder / "curves.csv").open("a", encoding="utf-8", newline="")

    def log(self, step, metrics):
        csv.writer(self._file).writerows((step, name, value) for name, value in metrics.items())
        self._file.flush()

    def close(self, *, complete):
        self._file.close()
