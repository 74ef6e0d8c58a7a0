"""What clang would let pass and Metal's compiler, or CUDA's, would not."""

from __future__ import annotations

import re

_TYPES = (
    r"(?:float|half|bfloat|int|uint|bool|char|uchar|short|ushort|long|ulong|size_t"
    r"|u?int(?:8|16|32|64)_t|b?float16_t|[STUV]|void)[234]?"
)
_POINTER = re.compile(rf"\b{_TYPES}\s*(?:const\s*)?[*&]+\s*(?:const\s+)?\w+\s*[=;,)\[]")
_SPACES = re.compile(r"\b(device|constant|thread|threadgroup)\b")
_FORBIDDEN = {
    r"\bstd::": "no std:: in Metal",
    r"\bdouble\b": "no double in Metal",
    r"\b(new|delete)\b": "no new or delete in Metal",
    r"\b(goto|throw|try|catch|virtual|dynamic_cast|typeid|thread_local|register)\b": "keyword that Metal lacks",
    r"\[\s*[&=]?\s*\]\s*\(": "lambdas need a recent Metal",
    r"\bstatic\s+(?!const|inline|_)": "static local",
    r"\bif\s+constexpr\b": "C++17; Metal is C++14",
}


def lint(source: str) -> list[str]:
    """Findings, each with the number of its line and the line."""
    found = []
    for number, line in enumerate(_without_comments(source).split("\n"), 1):
        text = line.strip()
        found += [f"line {number}: {why}: {text}" for pattern, why in _FORBIDDEN.items() if re.search(pattern, line)]
        for match in _POINTER.finditer(line):
            before = re.split(r"[;{}(,<]", line[: match.start()])[-1]
            if not _SPACES.search(before + match.group()):
                found.append(f"line {number}: pointer or reference without address space: {text}")
    return found


def _without_comments(source: str) -> str:
    """With as many lines."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda match: "\n" * match.group().count("\n"), source, flags=re.S)
