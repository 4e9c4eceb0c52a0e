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
LAYERS = {4: 3, 6: 1, 12: 2}
CONTRAST = """() => {
  const canvas = document.createElement("canvas"); canvas.width = canvas.height = 1;
  const g = canvas.getContext("2d", { willReadFrequently: true });
  const light = colours => {
    g.clearRect(0, 0, 1, 1);
    for (const c of colours) { g.fillStyle = c; g.fillRect(0, 0, 1, 1); }
    const [r, b, l] = [...g.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * b + 0.0722 * l;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  return [...document.querySelectorAll("#tokens .t, p, h1, td, .e span")].map(x => {
    const style = getComputedStyle(x), back = [paper];
    for (let y = x; y; y = y.parentElement) back.splice(1, 0, getComputedStyle(y).backgroundColor);
    const [a, b] = [light(back), light([...back, style.color])];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


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
    assert page.locator("#tokens img, #tokens i, #tokens script, body > img").count() == 0


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


def test_colour_follows_the_number_of_layers_that_changed(page):
    heat = {t: float(token(page, t).evaluate("x => x.style.getPropertyValue('--heat')")) for t in (3, *LAYERS)}
    assert heat[3] == 0 < heat[6] < heat[12] < heat[4] == 1
    colours = [token(page, t).evaluate("x => getComputedStyle(x).backgroundColor") for t in (3, 6, 12, 4)]
    assert len(set(colours)) == 4
    for t, n in LAYERS.items():
        assert f"{n} of 3 layers changed" in token(page, t).get_attribute("aria-label")
    assert f"3 of {len(TOKENS)} tokens changed" in page.locator("#summary").inner_text()


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


def test_only_layers_that_changed_on_request(page):
    token(page, 12).click()
    page.locator("#only").check()
    assert [x.split()[0] for x in page.locator("#experts tr").all_inner_texts()] == ["0", "2"]


def test_the_keyboard_is_enough(page):
    for name in ("before", "after", "first"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == name
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.t") == "4"  # the first response token that changed
    keys = {"ArrowRight": [5], "n": [6, 12, 12], "p": [6], "ArrowLeft": [5], "End": [len(TOKENS) - 1], "Home": [0]}
    keys |= {"f": [4]}
    for key, at in [(key, at) for key, places in keys.items() for at in places]:
        page.keyboard.press(key)
        assert selected(page) == at == int(page.evaluate("document.activeElement.dataset.t"))
    for _ in range(2):  # the map, which scrolls, may come first
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "only":
            page.keyboard.press("Space")
            assert page.locator("#only").is_checked()
            return
    pytest.fail("the check box cannot be reached")


def test_the_map_shows_layer_by_position_and_selects(page):
    box = page.locator("#cells").bounding_box()
    width = page.evaluate("cw")

    def pixel(t, s):
        place = [(t + 0.4) * width, page.evaluate("top_") + (s + 0.5) * page.evaluate("ch")]
        read = "([x, y]) => [...cells.getContext('2d').getImageData(x * ratio, y * ratio, 1, 1).data]"
        return page.evaluate(read, place)

    for s in range(3):
        for t in (6, 12):
            assert (pixel(t, s) != pixel(15, s)) == ((t, s) in FLIPS)
    page.mouse.move(box["x"] + 12.5 * width, box["y"] + 40)
    assert selected(page) == 12
    page.mouse.click(box["x"] + 6.5 * width, box["y"] + 40)
    page.mouse.move(5, 5)
    assert selected(page) == 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_light_and_in_dark(browser, tmp_path, scheme):
    every_heat = [(t, s) for t in range(13) for s in range(t)]
    write_response_page(pair(tmp_path, ["abc\ndefghijklm"], every_heat, moe_layers=12), tmp_path / "page.html")
    page = browser.new_page(color_scheme=scheme)
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    token(page, 7).hover()
    assert min(page.evaluate(CONTRAST)) >= 4.5  # WCAG AA
    page.close()


@pytest.mark.parametrize("width", [380, 800, 1400])
def test_nothing_runs_out_of_the_window(browser, tmp_path, width):
    write_response_page(pair(tmp_path, ["word " * 120], [(9, 40)], moe_layers=48), tmp_path / "page.html")
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#experts tr").count() == 48
    page.close()


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


def test_the_gap_of_log_probs_is_a_colour_of_its_own(three):
    gaps = [t for t in range(10) if "gap" in token(three, t).get_attribute("class")]
    assert gaps == [2] and "0.500 nats apart" in token(three, 2).get_attribute("aria-label")
    assert "log-prob, up to 0.500 nats apart" in three.locator("#legend").inner_text()
    token(three, 2).click()
    assert three.locator("#apart").inner_text() == "log-prob -1.000 → -1.500, 0.500 nats apart"
    token(three, 0).click()
    assert three.locator("#apart").inner_text() == "log-prob unknown → unknown"
    three.locator("#after").select_option("2")  # which has none
    assert not any("gap" in token(three, t).get_attribute("class") for t in range(10))
