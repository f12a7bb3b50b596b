"""Drives the server's page in headless Chromium: page.py SCENE URL FOLDER; a picture of each state goes to FOLDER."""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --force-device-scale-factor=1"
).split()
WIDE, NARROW = (1400, 900), (420, 860)
ODD = "na\u00efve \u4f60\u597d \U0001f469\u200d\U0001f52c \u0627\u0644\u0633\u0644\u0627\u0645 <b>&amp;</b> \u2028end"


class Page:
    """A browser on the page."""

    def __init__(self, url: str, folder: Path, size: tuple[int, int], *, dark: bool, data: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS, f"--user-data-dir={data}", f"--window-size={size[0]},{size[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        # A headless window has a least width; the emulated one has none.
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.folder = folder
        self.driver.get(url)

    def text(self, name: str) -> str:
        return self.driver.find_element(By.ID, name).text

    def label(self, name: str) -> str:
        return self.driver.find_element(By.ID, name).get_attribute("aria-label") or ""

    def type(self, name: str, *keys: str) -> None:
        self.driver.find_element(By.ID, name).send_keys(*keys)

    def ask(self, text: str) -> None:
        """Send a message. Keys of this driver end at U+FFFF, so the text is set as a paste would."""
        self.driver.execute_script("document.getElementById('input').value = arguments[0]", text)
        self.type("input", Keys.ENTER)

    def click(self, name: str) -> None:
        self.driver.find_element(By.ID, name).click()

    def wait(self, what: str, condition: Callable[[], object], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.picture("failed")
                raise AssertionError(
                    f"not in {seconds} s: {what}\n{self.driver.find_element(By.TAG_NAME, 'body').text}"
                )
            time.sleep(0.05)

    def picture(self, name: str) -> None:
        time.sleep(0.3)  # the page draws in the next frame
        self.driver.save_screenshot(str(self.folder / f"{name}.png"))

    def script(self, code: str) -> object:
        return self.driver.execute_script(code)

    def check_quiet(self) -> None:
        """Nothing was logged: no error, nothing refused by the policy, nothing asked of another host."""
        assert not [entry for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]
        hosts = self.script("return performance.getEntriesByType('resource').map((e) => new URL(e.name).host)")
        assert set(hosts) <= {self.script("return location.host")}, hosts
        assert self.script("return document.documentElement.scrollWidth <= innerWidth"), "wider than the window"


@contextmanager
def opened(url: str, folder: Path, size: tuple[int, int] = WIDE, *, dark: bool = False):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as data:
        page = Page(url, folder, size, dark=dark, data=data)
        try:
            yield page
        finally:
            page.driver.quit()


def chat(url: str, folder: Path) -> None:
    """Streaming, odd text, parameters, stop, clear, an error that the server answers with."""
    with opened(url, folder) as page:
        page.wait("ready", lambda: page.text("status") == "ready")
        page.wait("the model's name", lambda: page.text("model") == "tiny")
        page.picture("idle-wide")
        page.script("document.querySelector('#composer details').open = true")
        page.driver.find_element(By.NAME, "max_tokens").send_keys("12")
        page.ask(ODD)
        page.wait("an answer", lambda: "12 tokens" in page.text("log"))
        user = page.driver.find_element(By.CSS_SELECTOR, ".message.user .text")
        assert user.get_attribute("textContent") == ODD and not user.find_elements(By.TAG_NAME, "b")
        assert "cut off at the limit of tokens" in page.text("log")
        assert page.script("return messages.length") == 2
        page.picture("answered-wide")

        page.driver.find_element(By.NAME, "max_tokens").clear()
        page.ask("a long one")
        page.wait("it runs", lambda: page.text("load").startswith("1 /"))
        page.wait("text comes", lambda: page.driver.find_elements(By.CSS_SELECTOR, ".message .text")[-1].text)
        assert not page.driver.find_element(By.ID, "send").is_enabled()
        page.click("stop")
        page.wait("it is stopped", lambda: page.text("log").endswith("stopped"))
        page.wait("its blocks are free", lambda: page.text("load") == "0 / 0")
        assert page.driver.find_element(By.ID, "send").is_enabled()

        page.driver.find_element(By.NAME, "seed").send_keys("5")
        page.driver.find_element(By.NAME, "max_tokens").send_keys("3")
        page.type("system", "\u00fcber")
        page.script(
            "isPlain = false; window.sent = []; const real = fetch; "
            "window.fetch = (path, options) => { sent.push(options.body); return real(path, options); }"
        )
        page.ask("with a system prompt")
        page.wait("the third answer", lambda: page.script("return messages.length") == 6)
        sent = page.script("return JSON.parse(sent.findLast(Boolean))")
        assert sent["seed"] == 5 and sent["max_tokens"] == 3 and sent["messages"][0]["content"] == "\u00fcber", sent
        page.check_quiet()

        page.click("clear")
        assert page.text("log") == "Ask the model something."
        page.ask("x " * 9000)
        page.wait("an error", lambda: page.driver.find_elements(By.CSS_SELECTOR, ".error[role=alert]"))
        assert "max_model_len" in page.text("log")
        assert page.script("return document.getElementById('input').value.length") == 18000, "the question is lost"
        page.picture("error-wide")


def busy(url: str, folder: Path) -> None:
    """Many streams, which the test runs: pictures in both widths and both colour schemes."""
    for name, size, dark in (("wide", WIDE, False), ("narrow", NARROW, True)):
        with opened(url, folder, size, dark=dark) as page:
            page.wait("streams", lambda: page.script("return samples.at(-1)?.figures.running > 20"))
            page.wait("steps", lambda: page.script("return history.filter((s) => s.rows.length > 20).length > 40"))
            page.wait(
                "both kinds",
                lambda: page.script(
                    "return new Set(history.flatMap((s) => s.rows.map((r) => r.isPrefill))).size == 2"
                ),
            )
            page.wait(
                "a shared prefix", lambda: ", 0 shared" not in page.label("blocks") and "held" in page.label("blocks")
            )
            assert "requests" in page.label("steps")
            page.wait("a rate", lambda: float(page.text("rate").replace(",", "")) > 0)
            page.wait("a first token's time", lambda: page.text("ttft").endswith("s"))
            page.wait("hits", lambda: page.text("hits").endswith("%") and page.text("hits") != "0 %")
            # What is drawn: amber and blue in the timeline, more than ten colours of requests among the blocks.
            page.wait("colours", lambda: page.script(COLOURS))
            page.picture(f"busy-{name}")
            if size is NARROW:
                page.script("document.getElementById('engine').scrollIntoView()")
                page.picture(f"busy-{name}-engine")
            page.check_quiet()


COLOURS = """
const pixels = (id) => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const name = `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
    found.set(name, (found.get(name) || 0) + 1);
  }
  return found;
};
const steps = pixels("steps");
return steps.has(shade.prefill) && steps.has(shade.decode)
       && [...pixels("blocks").values()].filter((count) => count > 20).length > 10;
"""


def keyed(url: str, folder: Path) -> None:
    """A server with a key: the page asks, a wrong key is told, the right one stays for the tab."""
    with opened(url, folder, NARROW) as page:
        page.wait("the question", lambda: page.driver.find_element(By.ID, "ask").is_displayed())
        assert page.text("status") == "needs a key"
        page.picture("key-narrow")
        page.type("key", "wrong", Keys.ENTER)
        page.wait(
            "it asks again",
            lambda: (
                page.driver.find_element(By.ID, "key").get_attribute("value") == ""
                and page.driver.find_element(By.ID, "ask").is_displayed()
            ),
        )
        page.type("key", "secret", Keys.ENTER)
        page.wait("ready", lambda: page.text("status") == "ready")
        page.driver.find_element(By.CSS_SELECTOR, "#composer summary").click()
        page.driver.find_element(By.NAME, "max_tokens").send_keys("4")
        page.ask("hello")
        page.wait("an answer", lambda: "4 tokens" in page.text("log"))
        page.driver.refresh()
        page.wait("ready without asking", lambda: page.text("status") == "ready")
        assert not page.driver.find_element(By.ID, "ask").is_displayed()


def gone(url: str, folder: Path) -> None:
    """The server goes away in the midst of an answer; the test kills it when "answering" is printed."""
    with opened(url, folder) as page:
        page.wait("ready", lambda: page.text("status") == "ready")
        stop = page.driver.find_element(By.ID, "stop")
        # Made-up tokens end an answer anywhere: ask until one goes on for a while.
        for attempt in range(20):
            page.ask(f"a long one, number {attempt}")
            page.wait("text comes", lambda: page.driver.find_elements(By.CSS_SELECTOR, ".message .text")[-1].text)
            time.sleep(0.3)
            if stop.is_enabled():
                break
        print("answering", flush=True)
        page.wait("it says so", lambda: page.text("status") == "disconnected, trying again")
        page.wait("the answer too", lambda: page.driver.find_elements(By.CSS_SELECTOR, ".error[role=alert]"))
        assert "the connection broke off" in page.text("log")
        page.picture("gone-wide")
        page.ask("another")
        page.wait("no server", lambda: "the server cannot be reached" in page.text("log"))
        assert page.driver.find_element(By.ID, "input").get_attribute("value") == "another"


if __name__ == "__main__":
    scene, address, target = sys.argv[1:]
    {"chat": chat, "busy": busy, "keyed": keyed, "gone": gone}[scene](address, Path(target))
