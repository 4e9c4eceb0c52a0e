"""A real browser."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, or whichever is there, else the one that Playwright has installed."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="tests in a real browser are run by `make test-browser`"
    )
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    path = next((path for name in names if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield opened
        opened.close()
