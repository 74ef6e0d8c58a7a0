#!/usr/bin/env bash
# A named agent over plain HTTP: two turns, a stream, the list of agents, a fork, and their deletion.
#
#   agentcache serve                # in another terminal
#   bash examples/curl.sh [URL]     # default: $AGENTCACHE_URL, else http://127.0.0.1:8000
set -euo pipefail
url=${1:-${AGENTCACHE_URL:-http://127.0.0.1:8000}}

request() { curl -sSN --fail-with-body "$@"; }
post() { request "$url$1" -H 'Content-Type: application/json' -d "$2"; }

# Print the answer, and from the report how much of the prompt was computed.
show() {
  python3 -c '
import json, sys
answer = json.load(sys.stdin)
report = answer["agentcache"]
print(answer["choices"][0]["message"]["content"])
print("   ", report["cache_state"] + ":", report["computed_tokens"], "of", report["prompt_tokens"], "tokens computed")'
}

told='{"role": "user", "content": "The ring is in the mill. Ada lives in Rome."}'
noted='{"role": "assistant", "content": "Noted."}'
asked='{"role": "user", "content": "Where is the ring?"}'
answered='{"role": "assistant", "content": "The ring is in the mill."}'
asked_again='{"role": "user", "content": "Where does Ada live?"}'

echo "== First turn. The field agent names the agent; its KV cache is on disk when the answer ends."
post /v1/chat/completions "{\"agent\": \"example-curl\", \"temperature\": 0, \"messages\": [$told]}" | show

echo "== Next turn. Send the whole history; only the new part is computed. This also holds after a restart."
post /v1/chat/completions "{\"agent\": \"example-curl\", \"temperature\": 0, \"messages\": [$told, $noted, $asked]}" | show

echo "== The same as a stream. The last chunk has the report."
post /v1/chat/completions "{\"agent\": \"example-curl\", \"temperature\": 0, \"stream\": true,
  \"agentcache\": {\"report\": true}, \"messages\": [$told, $noted, $asked, $answered, $asked_again]}"

echo "== Fork: a second agent with the same memory. It shares all blocks, so nothing is copied."
post /v1/agents/example-curl/fork '{"id": "example-curl-fork"}' && echo

echo "== List the agents."
request "$url/v1/agents" | python3 -c '
import json, sys
for agent in json.load(sys.stdin)["data"]:
    print("{id}: {tokens} tokens, {ram_bytes} bytes in RAM, {disk_bytes} on disk".format(**agent))'

echo "== Delete both."
request -X DELETE "$url/v1/agents/example-curl-fork" && echo
request -X DELETE "$url/v1/agents/example-curl" && echo
