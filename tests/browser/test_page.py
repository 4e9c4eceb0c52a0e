"""The page of a flip in a real browser: `make test-browser` brings one and runs these tests."""

from __future__ import annotations

import pytest
import torch

from moe_rl.analysis.response_page import write_response_page
from moe_rl.routing import Layout, MoeLayer, RoutingTrace
from tests.analysis.test_response_page import EVIL, pair, save_tokenizer

sync_api = pytest.importorskip("playwright.sync_api", reason="tests in a real browser are run by `make test-browser`")

TEXT = "ab<i>x</i>\n</script>"
TOKENS = [*TEXT.encode(), *range(258, 258 + len(EVIL))]
FLIPS = [(4, 0), (4, 1), (4, 2), (6, 1), (12, 0), (12, 1)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    save_tokenizer(folder / "tokenizer")
    write_response_page(pair(folder, [TOKENS], FLIPS), folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def page(browser, file):
    """The open page; at the end it must have asked for nothing and complained about nothing."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    yield page
    assert asked == [file.as_uri()]
    assert complaints == []
    page.close()


def token(page, t):
    return page.locator(f"#tokens [data-t='{t}']")


def selected(page):
    return int(page.locator("#tokens [aria-selected=true]").get_attribute("data-t"))


def test_every_token_is_there_as_text_and_none_of_it_ran(page):
    shown = page.locator("#tokens .t").all_text_contents()
    assert "".join(shown).replace("⏎", "") == TEXT + "".join(EVIL)
    assert page.evaluate("window.hacked") is None
    for element in ("#tokens img", "#tokens i", "#tokens script", "body > img"):
        assert page.locator(element).count() == 0


def test_a_script_that_found_a_way_in_would_still_not_run(browser, file):
    page = browser.new_page()
    page.goto(file.as_uri())
    page.evaluate("""() => {
        const script = document.createElement("script"), image = document.createElement("img");
        script.textContent = "window.hacked = 1";
        image.setAttribute("onerror", "window.hacked = 1");
        image.src = "x";
        document.body.append(script, image);
    }""")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    page.close()


def test_the_pointer_shows_experts_and_gates_before_and_after(page):
    token(page, 6).hover()
    assert page.locator("#which").inner_text() == 'Token 6: "<"'
    rows = page.locator("#experts tr")
    assert rows.count() == 3
    cells = [rows.nth(1).locator("td").nth(i).inner_text().split() for i in range(3)]
    assert cells == [["2"], ["0", "0.750", "−", "1", "0.250"], ["+", "7", "0.750", "0", "0.250"]]
    assert "same" in rows.nth(0).get_attribute("class")
    page.mouse.move(5, 5)  # away: back to the token that was kept
    assert page.locator("#which").inner_text() == 'Token 4: ">"'


# ---------------------------------------------------------------------- several traces, log-probs, size
def saved(folder, name, flips, version, logprobs=None):
    """Ten tokens, three layers; expert 7 in place of 1 at some (token, MoE layer)."""
    ids = torch.tensor([0, 1]).expand(1, 10, 3, 2).clone()
    for t, s in flips:
        ids[0, t, s] = torch.tensor([7, 0])
    layout = Layout(tuple(MoeLayer(f"l{s}", s, 8, 2) for s in range(3)), "tiny")
    trace = RoutingTrace.from_ids(ids, layout, tokens=torch.arange(97, 107)[None], weight_version=version)
    trace.save(folder / name, None if logprobs is None else {"logprobs": torch.tensor([logprobs])})
    return folder / name


@pytest.fixture
def three(browser, tmp_path):
    files = [
        saved(tmp_path, "engine", [], "step 7", [float("nan"), *[-1.0] * 9]),
        saved(tmp_path, "unconstrained", [(3, 0), (8, 1)], "step 8", [float("nan"), -1.0, -1.5, *[-1.0] * 7]),
        saved(tmp_path, "replayed", [(8, 2)], "step 8"),
    ]
    write_response_page(files, tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    yield page
    page.close()


def test_any_two_of_several_traces_are_compared(three):
    assert [x.split(" (")[1] for x in three.locator("#after option").all_text_contents()] == [
        "weights step 7)",
        "weights step 8)",
        "weights step 8)",
    ]
    assert "2 of 10 tokens changed" in three.locator("#summary").inner_text()
    three.locator("#first").click()
    assert selected(three) == 3
    three.locator("#after").select_option("2")
    assert "1 of 10 tokens changed" in three.locator("#summary").inner_text()
    assert "still" in token(three, 3).get_attribute("class")
    token(three, 0).click()
    three.keyboard.press("f")
    assert selected(three) == 8
    three.locator("#before").select_option("1")
    assert "1 of 3 layers changed" in token(three, 3).get_attribute("aria-label")
    token(three, 8).click()
    cells = [x.split() for x in three.locator("#experts tr").nth(1).locator("td").all_inner_texts()]
    assert cells == [["1"], ["−", "7", "0"], ["0", "+", "1"]]
