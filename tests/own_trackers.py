"""Trackers of one's own: one that keeps lines, one that fails, one that never answers."""

from __future__ import annotations

import json
import time


class Lines:
    """A line of JSON per step."""

    def __init__(self, folder):
        self.folder = folder

    def file(self, run):
        return self.folder / (run.place.replace("/", "+") + ".jsonl")

    def last(self, run):
        return max((p["step"] for p in points(self.file(run))), default=-1)

    def write(self, run, new):
        lines = "".join(json.dumps({"step": p.step, "time": p.time, "values": p.values}) + "\n" for p in new)
        with self.file(run).open("a") as out:
            out.write(lines)


class Failing(Lines):
    """Takes the first commit of one run and fails at the second."""

    def write(self, run, new):
        if self.last(run) >= 0:
            raise ConnectionError("the service is down\nand says so in two lines")
        super().write(run, new)


class Slow(Lines):
    def write(self, run, new):
        time.sleep(0.2)
        super().write(run, new)


class Hanging(Lines):
    def write(self, run, new):
        time.sleep(3600)


def points(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
