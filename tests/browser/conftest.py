"""Chromium without a window, or a clear reason why not."""

import shutil

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


class Page:
    """One browser window: open addresses, choose a width, read the console."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, address: str, width: int = 1200, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser")  # what an earlier page said is forgotten
        self.driver.get(address)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def run(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def overflow(self) -> float:
        """By how many pixels the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth - window.innerWidth")

    def asked(self) -> list[str]:
        """Every address that the page has loaded something from."""
        return self.run("return performance.getEntriesByType('resource').map(e => e.name)")


@pytest.fixture(scope="session")
def browser():
    if not (BROWSER and DRIVER):
        pytest.skip("no chromium with chromedriver here: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(120)
    yield Page(driver)
    driver.quit()
