"""A real JupyterLab server and a real Chromium, each started for the browser tests and ended after them."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CHROMIUM_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A first visit asks whether to fetch news; the tests have no use for the question, nor for the network.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "docmanager-extension/plugin": {"autosave": False},
    "completer-extension/inline-completer": {"providers": {}},
}


def find_chromium() -> str | None:
    """The browser's path: MHA_CHROMIUM, else the first one found, else None."""
    if named := os.environ.get("MHA_CHROMIUM"):
        return named
    found = (shutil.which(name) for name in CHROMIUM_NAMES)
    places = (place for place in CHROMIUM_PLACES if Path(place).exists())
    return next(filter(None, found), None) or next(places, None)


@contextmanager
def jupyterlab(root: Path, home: Path) -> Iterator[tuple[str, str]]:
    """Serve the notebooks in ``root``; settings, trust and run-time files go to ``home``. Yields address and token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    _write_settings(home / "settings")
    folders = {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    folders |= {f"JUPYTERLAB_{name.upper()}_DIR": str(home / name) for name in ("settings", "workspaces")}
    environment = os.environ | folders | {"JUPYTER_TOKEN": token, "IPYTHONDIR": str(home / "ipython")}
    options = ["ip=127.0.0.1", f"port={port}", "port_retries=0", "open_browser=False", "allow_root=True"]
    command = [sys.executable, "-m", "jupyterlab", str(root), "--expose-app-in-browser"]
    command += [f"--ServerApp.{option}" for option in options] + ["--LabApp.extension_manager=readonly"]
    log = home / "server.log"
    with log.open("w") as sink:
        server = subprocess.Popen(command, cwd=root, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(server, address, token, log)
        yield address, token
    finally:
        _end(server, address, token)


def _write_settings(folder: Path) -> None:
    for name, values in SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _request(address: str, token: str, path: str, method: str = "GET") -> bytes:
    headers = {"Authorization": f"token {token}"}
    with urllib.request.urlopen(
        urllib.request.Request(address + path, headers=headers, method=method), timeout=10
    ) as answer:
        return answer.read()


def _wait_until_up(server: subprocess.Popen, address: str, token: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            _request(address, token, "/api/status")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start; its log ends with:\n{log.read_text()[-2000:]}")


def _end(server: subprocess.Popen, address: str, token: str) -> None:
    """End the kernels, then the server, by its process id and by force if it has to be."""
    try:
        for kernel in json.loads(_request(address, token, "/api/kernels")):
            _request(address, token, f"/api/kernels/{kernel['id']}", "DELETE")
    except (OSError, ValueError):
        pass  # the server is gone or stuck; a kernel ends by itself when its server does
    server.terminate()
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
