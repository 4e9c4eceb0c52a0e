"""The page of a study in a real browser, from the file system."""

from pathlib import Path

import pytest

from moe_rl.results.study_page import write_study_page

STUDY = Path(__file__).parents[2] / "studies" / "routing_replay"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    written = tmp_path_factory.mktemp("report") / "page.html"
    write_study_page(STUDY, written)
    return written


@pytest.mark.parametrize("width, scheme", [(400, "light"), (400, "dark"), (1400, "light"), (1400, "dark")])
def test_it_fits_its_window_and_asks_nothing_of_a_network(browser, file, width, scheme):
    page, beyond = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme), []
    page.on(
        "request", lambda request: beyond.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
    )
    page.on("console", lambda message: beyond.append(message.text) if message.type == "error" else 0)
    page.goto(file.as_uri())
    assert beyond == [] and page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    paper, ink = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)"}[scheme] and paper != ink
    page.close()
