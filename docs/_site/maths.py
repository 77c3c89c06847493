"""Equations as MathML, which browsers draw by themselves: no script, no font, no request."""

from __future__ import annotations

import html as htmllib
import re

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def render(html: str) -> str:
    """A page with its TeX turned to MathML."""
    if "arithmatex" not in html:
        return html
    from latex2mathml.converter import convert

    html = INLINE.sub(lambda m: convert(htmllib.unescape(m[1]).strip()), html)
    return BLOCK.sub(
        lambda m: f'<div class="equation">{convert(htmllib.unescape(m[1]).strip(), display="block")}</div>',
        html,
    )
