"""Pictures of the pages can be seen on a dark and on a light ground."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_picture_has_a_ground_of_its_own(picture: Path) -> None:
    """A picture without a ground is black on black in a dark theme: the first thing that is painted
    covers all of it.
    """
    text = picture.read_text(encoding="utf-8")
    # Terminals are drawn with their window, which is the ground.
    painted = re.search(
        r"<(?:rect|path|text|line|circle|polyline)\b[^>]*>", re.sub(r"<defs>.*?</defs>", "", text, flags=re.DOTALL)
    )
    size = re.search(r'<svg[^>]*?\bwidth="([\d.]+)"', text)

    assert painted is not None
    assert re.search(r'fill="(?:#fff|white|#[0-9a-f]{6})"', painted[0])
    width = re.search(r'\bwidth="([\d.]+%?)"', painted[0])
    assert width is not None
    if size is not None:
        assert width[1] in ("100%", size[1])
