"""The page: well formed, complete, and in need of nothing from outside."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kvxfer.bench.histogram import Histogram
from kvxfer.bench.page import curve, page, size
from kvxfer.bench.rows import single
from kvxfer.bench.run import Result


def filled() -> Result:
    histogram = Histogram()
    histogram.extend([1000, 2000, 2000, 90_000])
    rows = [
        single("kvxfer", "shm", "W2", "put_GBps", 12.0),
        single("kvxfer", "shm", "W5", "put_cpu_s_per_GiB", 0.1),
        *(single("kvxfer", "shm", f"contiguous/{4096 * 4**step}", "put_GBps", 3.0 + step) for step in (2, 0, 1)),
        *(single("kvxfer", "shm", f"descriptors/{16**step}", "put_ms", 16.0**step / 100) for step in range(4)),
        single("kvxfer", "shm", "peers/4", "connect_ms", 3.0),
        single("<rival & co>", "shm", "W2", "put_GBps", 1.0),
    ]
    return Result(rows=rows, histograms={("shm", "put 4k"): histogram}, machine={"CPU": "a < b"}, rounds=3)


def test_the_page_is_well_formed_and_self_contained() -> None:
    text = page(filled())
    root = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) >= 6
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert re.findall(r"(?:https?:)?//[^\s\"'<]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"\b(src|href|@import|url)\b\s*[=(]", text)
    assert "&lt;rival &amp; co&gt;" in text


def test_curves_are_in_order() -> None:
    assert curve(filled().rows, "contiguous", "put_GBps", "shm") == [(4096, 3.0), (16384, 4.0), (65536, 5.0)]


def test_an_empty_result_is_a_page_too() -> None:
    ElementTree.fromstring(page(Result()).removeprefix("<!doctype html>\n"))


def test_sizes() -> None:
    assert [size(value) for value in (1, 4096, 3 * 2**20, 2**30)] == ["1 B", "4 KiB", "3 MiB", "1 GiB"]
