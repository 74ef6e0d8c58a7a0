"""A server that speaks the HTTP contract without a model, for tests of what talks to one. Run as a script.

A token is a byte. What an agent says is a function of its whole prompt, so that a lost or wrong context shows in its
words. Its memory is a file an agent, read back by the next process. `--fault forget` writes nothing; with
`--fault drift` a new process over an old folder says other words; `--fault silent` sends no report.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_CONTEXT = 100_000
KV_FORMAT = "1 byte a token"


class Memory:
    """Per agent, the token ids that are cached; in RAM, on disk, or both."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = folder
        self.fault = fault
        self.ram: dict[str, list[int]] = {}
        (folder / "blocks" / "ab").mkdir(parents=True, exist_ok=True)
        self.second_process = bool(self._files())

    def _files(self) -> list[Path]:
        return sorted((self.folder / "blocks" / "ab").glob("*.safetensors"))

    def _file(self, agent: str) -> Path:
        return self.folder / "blocks" / "ab" / f"{agent}.safetensors"

    def agents(self) -> list[str]:
        return sorted({*self.ram, *(path.stem for path in self._files())})

    def load(self, agent: str) -> tuple[list[int], str]:
        if agent in self.ram:
            return self.ram[agent], "hot"
        if self._file(agent).exists():
            raw = self._file(agent).read_bytes()
            return list(raw[8 + int.from_bytes(raw[:8], "little") :]), "warm"
        return [], "cold"

    def save(self, agent: str, ids: list[int]) -> int:
        self.ram[agent] = ids
        if self.fault == "forget":
            return 0
        header = json.dumps({"__metadata__": {"model_type": "fake", "num_layers": "0"}}).encode()
        self._file(agent).write_bytes(len(header).to_bytes(8, "little") + header + bytes(ids))
        return self._file(agent).stat().st_size

    def delete(self, agent: str) -> None:
        self.ram.pop(agent, None)
        self._file(agent).unlink(missing_ok=True)


def common(one: list[int], other: list[int]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def say(prompt: list[int], count: int, twist: str) -> str:
    digest = hashlib.sha256(bytes(prompt) + twist.encode()).hexdigest()
    return (digest * (count // len(digest) + 1))[:count]


class Handler(BaseHTTPRequestHandler):
    memory: Memory
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._send(200, {"data": [{"id": "fake", "kv_format": KV_FORMAT}]})
        else:
            self._send(200, {"data": [{"id": agent} for agent in self.memory.agents()]})

    def do_DELETE(self) -> None:
        self.memory.delete(self.path.rsplit("/", 1)[1])
        self._send(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/v1/agents/"):
            self._agent_route(self.path.split("/")[3], self.path.split("/")[4], body)
        else:
            self._complete(body)

    def _agent_route(self, agent: str, verb: str, body: Any) -> None:
        if verb == "fork":
            self.memory.save(body["id"], self.memory.load(agent)[0])
        if verb == "evict":
            self.memory.ram.pop(agent, None)
        if verb == "restore":
            return self._restore(agent)
        self._send(200, {"id": agent})

    def _restore(self, agent: str) -> None:
        ids, state = self.memory.load(agent)
        if state == "cold":
            return self._send(404, {"error": {"message": "no such agent", "code": "not_found"}})
        self.memory.ram[agent] = ids
        self._send(200, {"restored_bytes": len(ids) if state == "warm" else 0, "restore_ms": 0.5})

    def _complete(self, body: Any) -> None:
        ids = self._prompt_ids(body)
        if len(ids) > MAX_CONTEXT:
            error = {"message": "too long", "code": "context_length_exceeded"}
            return self._send(400, {"error": error})
        answer, report = self._turn(body, ids)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
        if body.get("stream"):
            return self._stream(body, answer, usage, report)
        choice = {"text": answer, "prompt_token_ids": ids, "token_ids": list(answer.encode())}
        return self._send(200, {"choices": [choice], "usage": usage, "agentcache": report})

    def _prompt_ids(self, body: Any) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        text = prompt if prompt is not None else "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        return list(text.encode() + (b"<assistant>" if prompt is None else b""))

    def _turn(self, body: Any, ids: list[int]) -> tuple[str, dict[str, Any]]:
        agent = body.get("agent")
        known, state = self.memory.load(agent) if agent else ([], "cold")
        kept = min(common(known, ids), len(ids) - 1)
        computed = len(ids) - kept
        time.sleep(computed * 2e-6)
        twist = "drift" if self.memory.fault == "drift" and self.memory.second_process else ""
        answer = say(ids, body["max_tokens"], twist)
        written = self.memory.save(agent, [*ids, *answer.encode()]) if agent else 0
        report = {
            "agent": agent,
            "cache_state": state if kept else "cold",
            "match": "EXTEND" if kept else "NEW",
            "prompt_tokens": len(ids),
            "cached_tokens": {"own": kept, "shared": 0, "residual": None},
            "computed_tokens": computed,
            "time_to_first_token_ms": 1.0,
            "restore_ms": 0.5 if state == "warm" else 0.0,
            "restored_bytes": kept if state == "warm" else 0,
            "written_bytes": written,
        }
        return answer, report

    def _stream(self, body: Any, answer: str, usage: Any, report: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chat = "messages" in body
        self._event({"choices": [{"delta": {"role": "assistant"}} if chat else {"text": ""}]})
        for start in range(0, len(answer), 7):
            piece = answer[start : start + 7]
            words = {"delta": {"content": piece}} if chat else {"text": piece}
            self._event({"choices": [{**words, "token_ids": list(piece.encode())}]})
        self._event({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if self.memory.fault != "silent":
            last["agentcache"] = report
        self._event(last)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: Any) -> None:
        self.wfile.write(f": a comment\n\ndata: {json.dumps(event)}\n\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    Handler.memory = Memory(options.cache_dir, options.fault)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
