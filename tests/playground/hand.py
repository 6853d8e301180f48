"""Draws with the mouse, and reads what the page shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from playwright.sync_api import Page

Stroke = Sequence[tuple[float, float]]  # in parts of the slate's side


def _arc(x: float, y: float, across: float, down: float, start: float, end: float) -> Stroke:
    """Part of an ellipse; degrees, clockwise from the right."""
    angles = [math.radians(start + (end - start) * step / 24) for step in range(25)]
    return [(x + across * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


SEVEN: list[Stroke] = [[(0.2, 0.15), (0.75, 0.15), (0.45, 0.85)]]
ONE: list[Stroke] = [[(0.5, 0.1), (0.5, 0.9)]]

# Digits as a person would write them, for pictures.
WRITTEN_SEVEN: list[Stroke] = [
    [(0.22, 0.2), (0.5, 0.19), (0.74, 0.18), (0.7, 0.3), (0.6, 0.5), (0.52, 0.66), (0.47, 0.86)],
    [(0.42, 0.54), (0.56, 0.52), (0.72, 0.5)],
]
WRITTEN_THREE: list[Stroke] = [[*_arc(0.48, 0.3, 0.2, 0.18, -150, 90), *_arc(0.48, 0.68, 0.23, 0.2, -90, 150)]]
THREE_AND_SEVEN: list[Stroke] = [
    [(x - 0.06, y) for x, y in WRITTEN_THREE[0]],
    *([(x + 0.08, y) for x, y in stroke] for stroke in WRITTEN_SEVEN),
]


def draw(page: Page, strokes: Sequence[Stroke], lift: bool = True) -> None:
    page.locator("#slate").scroll_into_view_if_needed()
    box = page.locator("#drawing").bounding_box()
    assert box is not None
    for stroke in strokes:
        points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point)
        if lift:
            page.mouse.up()


def wait_for_verdict(page: Page, label: str, finally_: bool = True) -> None:
    """Waits until the page says that it sees this label and, unless told otherwise, awaits no further answer."""
    page.wait_for_function(
        """([label, last]) => document.querySelector("#verdict").textContent.includes(label)
            && !(last && document.querySelector("#answer").ariaBusy === "true")""",
        arg=[label, finally_],
    )


def image(page: Page, canvas: str) -> str:
    """What is on a canvas, as text to compare."""
    shown: str = page.evaluate("id => document.getElementById(id).toDataURL()", canvas)
    return shown


def wait_for_change(page: Page, canvas: str, before: str) -> str:
    page.wait_for_function("([id, before]) => document.getElementById(id).toDataURL() !== before", arg=[canvas, before])
    return image(page, canvas)


def colours(page: Page) -> tuple[int, int]:
    """Counts the pixels of what the network believes in the colour of the first digit, which is warm, and of the second."""
    warm, cold = page.evaluate("""() => {
        const canvas = document.getElementById("believed");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let warm = 0, cold = 0;
        for (let i = 0; i < data.length; i += 4) {
            if (data[i] > data[i + 2] + 40) warm++;
            if (data[i + 2] > data[i] + 40) cold++;
        }
        return [warm, cold];
    }""")
    return warm, cold


def said(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()
