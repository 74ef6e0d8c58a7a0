"""The read-only page at `/`.

The CSP allows only its own style and script, by digest. It reads the API with the user's key and inserts data as text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response


def wants_page(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "")


def page() -> Response:
    return HTMLResponse(_text(), headers=_headers())


@cache
def _text() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@cache
def _headers() -> dict[str, str]:
    allowed = {
        "default-src": "'none'",
        "script-src": _digest("script"),
        "style-src": _digest("style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in allowed.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }


def _digest(tag: str) -> str:
    [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", _text(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
