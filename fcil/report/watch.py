"""The report page, live: a small server on this machine that draws a run anew when its ledger has grown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fcil.errors import UserError, lacking
from fcil.report.comparison import settings_text
from fcil.report.evidence import gather, rounds_of
from fcil.report.page import WATCH_EVERY, island, page_of
from fcil.results.ledger import read

HERE = "127.0.0.1"  # nobody else can see it


class Live:
    """The page of one run, drawn when it is asked for and its ledger has another state than before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drawn: tuple[str, str] = ("", "")
        self.lock = Lock()

    def state(self) -> dict[str, Any]:
        """Return what changes when there is something new to draw, how many rounds are over, and where the run is."""
        try:
            lines = read(self.folder / "ledger.jsonl")
        except UserError as error:
            return {"drawn": "", "rounds": 0, "now": str(error)}
        ended, rounds = (sum(line.get("kind") == kind for line in lines) for kind in ("task", "round"))
        finished = (self.folder / "result.json").exists()
        return {
            "drawn": f"{ended}{' finished' * finished}", "rounds": rounds,
            "now": "finished" if finished else _now(lines, ended),
        }  # fmt: skip

    def page(self) -> str:
        """Return the page."""
        with self.lock:
            state = self.state()
            if self.drawn[0] != state["drawn"] or not self.drawn[0].strip("0"):
                self.drawn = (state["drawn"], self._page(state))
            return self.drawn[1]

    def loss(self) -> dict[str, Any] | None:
        """Return the chart of the training loss so far, as the page has it; None where the ledger is no run's."""
        lines = read(self.folder / "ledger.jsonl")
        first = next((line for line in lines if line.get("kind") == "run"), {})
        try:
            return island(_loss_so_far(lines, first), "now")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def _page(self, state: dict[str, Any]) -> str:
        found, left_out = gather([self.folder], unfinished=True)
        if state["now"] == "finished" and found:
            return page_of(found, left_out)
        if not found and not state["rounds"]:
            return _waiting([*left_out, state["now"]])
        said = left_out if found or state["drawn"] != "0" else []  # before a task has ended, nothing is wrong
        drawn = self.loss()
        if drawn is None:
            return _waiting([*left_out, f"the ledger of {self.folder} is not one of ours"])
        return page_of(found, said, live={**state, "title": f"watching {self.folder}", "chart": drawn})


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve the page of a run on the loopback address; port 0 takes a free one."""
    if not (folder / "ledger.jsonl").exists():
        raise UserError(f"{folder} is not a run that has begun: it has no ledger.jsonl")
    live = Live(folder)
    live.page()  # what is missing to draw it is said now, not in the browser

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").split(":")[0] not in (HERE, "localhost"):
                return self.send_error(403)  # another site's name that points here
            if self.path == "/":
                return self.answer(live.page(), "text/html")
            if self.path == "/state":
                return self.answer(json.dumps(live.state()), "application/json")
            if self.path == "/loss" and (drawn := live.loss()):
                return self.answer(json.dumps(drawn["content"]), "application/json")
            self.send_error(404)

        def answer(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Keep the terminal quiet."""

    try:
        server = ThreadingHTTPServer((HERE, port), Answers)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    with server:
        yield server


def _loss_so_far(lines: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> Any:
    try:
        from fcil.report.courses import loss_chart
    except ImportError as error:
        raise lacking(f"a page needs the package {error.name}", "report") from None
    rounds = rounds_of(lines)
    name, settings = str(first.get("method", "?")), settings_text(first.get("settings", {}))
    return loss_chart([(name, (name, settings), rounds, [r.loss for r in rounds])])


def _now(lines: Sequence[dict[str, Any]], ended: int) -> str:
    last = lines[-1] if lines else {}
    if last.get("kind") != "round":
        return f"task {ended + 1} begins"
    return f"task {ended + 1}, round {last.get('round', 0) + 1} of {last.get('rounds', '?')}"


def _waiting(left_out: Sequence[str]) -> str:
    said = "; ".join(escape(sentence) for sentence in left_out)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fcil watch</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="{WATCH_EVERY}"></head>'
        f"<body><p>There is nothing to draw yet: {said}</p></body></html>"
    )
