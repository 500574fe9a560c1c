"""Pictures for docs/dashboards.md: `python -m checks.dashboards.draw FOLDER` (needs node, npm, chromium).

FOLDER keeps what takes long: the npm packages (once, 700 MB), the bundle, and a Prometheus that has scraped
the fleet. Delete FOLDER/tsdb to scrape anew. A picture is drawn by Grafana's own components in a browser.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from checks.dashboards.grafana import View, panels
from checks.dashboards.hosts import Fleet, Prometheus
from tests.harness import ROOT

HERE = Path(__file__).parent
SPEED = 2.0
SECONDS = 100.0
WIDTH, UNIT = 1488, 38  # as in app.tsx
SCALE = 0.8  # 1190 pixels wide
COLORS = 200

# What a reader would choose: one or two hosts, but all of them for the fleet.
CHOSEN: Mapping[str, Mapping[str, Sequence[str]]] = {
    "overview": {"instance": ["tour"]},
    "fleet": {},
    "gpu-memory": {"instance": ["leak", "acting"], "gpu": ["0"]},
    "kv-requests": {"instance": ["overload", "acting"]},
    "kvwatch-itself": {"instance": ["faults", "acting"]},
}
INDEX = b"""<!doctype html><html><head><link rel="stylesheet" href="/app.css"></head>
<body style="background:#111217;font-family:Inter,Helvetica,Arial,sans-serif;font-size:14px;margin:4px">
<div id="root"></div><script>window.process={env:{NODE_ENV:"production"}}</script>
<script src="/app.js"></script></body></html>"""


def bundle(folder: Path) -> None:
    """The packages and one script of them and app.tsx."""
    shutil.copy(HERE / "app.tsx", folder)
    shutil.copy(HERE / "package.json", folder)
    if not (folder / "node_modules/@grafana/ui").is_dir():
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True
        )
    flags = [f"--loader:.{kind}=dataurl" for kind in ("svg", "woff2", "png")]
    subprocess.run(
        [
            "node_modules/.bin/esbuild", "app.tsx", "--bundle", "--outfile=out/app.js", "--platform=browser",
            '--define:process.env.NODE_ENV="production"', "--define:global=window",
            "--external:monaco-editor", "--log-level=error", *flags,
        ],
        cwd=folder,
        check=True,
    )  # fmt: skip


def scrape(folder: Path) -> None:
    """Let a Prometheus scrape the fleet, and keep its data and the times."""
    with Fleet(folder, SPEED) as fleet:
        time.sleep(SECONDS)
        times = {"from_s": fleet.from_s + 5.0, "to_s": time.time()}
    (folder / "times.json").write_text(json.dumps(times))


def answered(board: dict[str, Any], view: View) -> dict[str, Any]:
    """The dashboard with the answer to every query beside it."""
    for panel in panels(board):
        panel["answers"] = [view.series(target, board) for target in panel["targets"]]  # type: ignore[index]
    return board | {"from": view.from_s, "to": view.to_s}


@contextmanager
def served(folder: Path, board: dict[str, Any]) -> Iterator[str]:
    """The page that draws this dashboard, on loopback."""
    pages = {
        "/": INDEX,
        "/board.json": json.dumps(board).encode(),
        "/app.js": (folder / "out/app.js").read_bytes(),
        "/app.css": (folder / "out/app.css").read_bytes(),
    }
    kinds = {".js": "text/javascript", ".css": "text/css", "json": "application/json"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            kind = next((kind for end, kind in kinds.items() if self.path.endswith(end)), "text/html")
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def shoot(url: str, height: int, picture: Path) -> None:
    """One screenshot; prints what the page logs."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
                f"--window-size={WIDTH + 12},{height}", f"--force-device-scale-factor={SCALE}",
                "--run-all-compositor-stages-before-draw", "--virtual-time-budget=30000",
                "--hide-scrollbars", "--enable-logging=stderr", "--v=0", f"--screenshot={picture}", url,
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    print("\n".join(line[:400] for line in told))


def reduce(picture: Path, packages: Path) -> None:
    """Fewer colours, so that the file is small."""
    sys.path.insert(0, str(packages))
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def main() -> None:
    """Scrape unless there is data, then draw every dashboard into docs/img."""
    parser = argparse.ArgumentParser(prog="python -m checks.dashboards.draw")
    parser.add_argument("folder", type=Path)
    parser.add_argument("boards", nargs="*", default=list(CHOSEN))
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bundle(folder)
    if not (folder / "times.json").exists() or not (folder / "tsdb").is_dir():
        scrape(folder)
    times = json.loads((folder / "times.json").read_text())
    with closing(Prometheus(folder, {})) as prometheus:
        prometheus.wait()
        for name in args.boards:
            view = View(url=prometheus.url, chosen=CHOSEN[name], **times)
            board = answered(json.loads((ROOT / f"dashboards/{name}.json").read_text()), view)
            rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
            picture = ROOT / f"docs/img/dashboard-{name}.png"
            with served(folder, board) as url:
                shoot(url, rows * UNIT + 12, picture)
            reduce(picture, folder / "python")
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
