"""Open a page in Chromium without a window and print the value of an expression there; run by `in_browser`.

The browser comes with PySide6-WebEngine, from the extra `test`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WAITING = "waiting"


def in_browser(
    page: Path, expression: str, width: int = 1200, dark: bool = False, script: Path | None = None
) -> tuple[Any, list[str]]:
    """Return an expression's value (JSON) in a page `width` pixels wide, and the messages on its console.

    The value may be a promise. dark: the user prefers a dark colour scheme. script: a file to run in the page first.
    """
    if importlib.util.find_spec("PySide6") is None or importlib.util.find_spec("PySide6.QtWebEngineCore") is None:
        pytest.skip("no browser: pip install PySide6-WebEngine")
    command = [sys.executable, __file__, str(page), expression, str(width)]
    command += [] if script is None else [str(script)]
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    environment["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(f"no browser: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def _main(page: str, expression: str, width: str, script: str | None = None) -> None:
    try:
        from PySide6.QtCore import QTimer, QUrl
        from PySide6.QtWebEngineCore import QWebEnginePage
        from PySide6.QtWebEngineWidgets import QWebEngineView
        from PySide6.QtWidgets import QApplication
    except ImportError as error:  # a system library is missing
        print(error, file=sys.stderr)
        sys.exit(77)
    messages: list[str] = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            messages.append(message)

    app = QApplication([""])
    view = QWebEngineView()
    view.setPage(Page(view))
    view.resize(int(width), 900)
    view.show()

    def receive(value: str) -> None:
        if value == WAITING:
            QTimer.singleShot(50, look)
            return
        print(json.dumps([json.loads(value) if value else None, messages]), flush=True)
        app.quit()

    def look() -> None:
        view.page().runJavaScript("window.outcome", receive)

    def ask() -> None:
        if script is not None:
            view.page().runJavaScript(Path(script).read_text(encoding="utf-8"))
        text = f"Promise.resolve({expression}).then(JSON.stringify).catch(error => JSON.stringify(String(error)))"
        view.page().runJavaScript(f"window.outcome = '{WAITING}'; {text}.then(text => (window.outcome = text))")
        look()

    # The page needs its size first.
    view.loadFinished.connect(lambda _: QTimer.singleShot(300, ask))
    view.load(QUrl.fromLocalFile(str(Path(page).resolve())))
    app.exec()
    view.setPage(None)  # pyright: ignore  # before its profile goes


if __name__ == "__main__":
    _main(*sys.argv[1:])
