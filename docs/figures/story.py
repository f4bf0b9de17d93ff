"""The run and the pictures of docs/how-to/repair.md and of docs/how-to/read.md; needs chromium and chromedriver.

python docs/figures/story.py        (make figures)
"""

from __future__ import annotations

import base64
import io
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import regard
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import CHARACTERS, TinyLM, batches, encode
from regard.health.report.report import Report

HERE = Path(__file__).parent
STEPS = 200
WIDTH, HEIGHT = 1280, 860
MARKS = (  # selector of a part of the report's first screen, in the order of docs/how-to/read.md
    "header .pill", "header .summary p", "header .summary a[href='#checked']", ".first-step", "#copy",
    "#causes li .place", "#causes li .so", "#causes li b", "#map", "#treatment", "#chosen", "#passage",
)  # fmt: skip
BESIDE = ("header .pill", "header .summary a[href='#checked']", "#copy")  # marked on the right
MARK = """document.querySelector("main").style.paddingLeft = arguments[0].length ? "40px" : "";
for (const [at, selector] of arguments[0].entries()) {
  const box = document.querySelector(selector)?.getBoundingClientRect(), mark = document.createElement("div");
  if (!box) throw new Error(selector);
  mark.textContent = at + 1;
  const left = arguments[1].includes(selector) ? box.right + 4 : box.left - 27;
  mark.style.cssText = `position: absolute; left: ${left}px; top: ${box.top}px; width: 22px; height: 22px; z-index: 9;
    border-radius: 11px; background: #c2185b; color: #fff; font: bold 13px/22px sans-serif; text-align: center`;
  document.body.append(mark);
}"""


def main() -> None:
    ill = train("none")
    before = examine(ill, "without-scale")
    before.show(page="before.html")
    print(regard.check(ill, batches(sample_text(), 64, 8), tokenizer=CHARACTERS.__getitem__, title="without-scale"))
    sound = train("sqrt")
    after = examine(sound, "with-scale")
    result = regard.compare(before, after)
    result.show()
    with tempfile.TemporaryDirectory() as folder, browse() as driver:
        for name, page in (("before", before), ("repaired", result)):
            take(driver, page.save(Path(folder) / f"{name}.html"), HERE / f"story-{name}.png")
        take(driver, Path(folder) / "before.html", HERE / "report.png", MARKS)


def train(scale: str) -> TinyLM:
    """A character model from one start; prints what a Monitor says of it, and the loss of the last ten steps."""
    torch.manual_seed(0)
    model = TinyLM(layers=3, heads=4, width=64, length=64, scale=scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text, generator, losses = encode(sample_text()), torch.Generator().manual_seed(0), []
    monitor = regard.Monitor(model, every=5, log=[].append, budget=1.0)
    for _ in range(STEPS):
        start = torch.randint(len(text) - 65, (16, 1), generator=generator)
        ids = text[start + torch.arange(65)]
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        monitor.step(loss=loss.item())
    monitor.close()
    print(f"scale={scale}: loss of the last ten steps {sum(losses[-10:]) / 10:.2f}")
    for one in monitor.incidents:
        print(f"step {one.opened}, {one.severity}: {one.text}\n    to do: {one.action}")
    return model.eval()


def examine(model: TinyLM, title: str) -> Report:
    texts = batches(sample_text(), model.options["length"], 8)
    return regard.examine(model, texts, ["scale=sqrt", "qk_norm"], title=title, tokenizer=CHARACTERS.__getitem__)


def browse():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def take(driver, page: Path, picture: Path, marks: tuple[str, ...] = ()) -> None:
    """The first screen of a page as a PNG of 128 colours, with a number beside each part of `marks`."""
    size = dict(width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.as_uri())
    driver.execute_async_script(
        "const done = arguments[0], wait = () => document.body.dataset.ready ? done() : setTimeout(wait, 50); wait()"
    )
    driver.execute_script(MARK, marks, BESIDE)
    png = base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", dict(format="png"))["data"])
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
