"""Two LoRA adapters over one prompt: what each policy takes from base's cache, and what it computes again.

    agentcache serve                                        # in another terminal
    python examples/adapters.py [--url URL]                 # two random adapters for the model in the package
    python examples/adapters.py FOLDER FOLDER [--url URL]   # your own, for the model that the server serves

`training/adapters/family/plan` and `reflect` are trained for the model in the package: their answers differ by policy.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

CONTEXT = "The lamp is in the attic. The coin is in the tower. The mirror is in the library. The map is in the barn."


def write_adapter(folder: Path) -> Path:
    """Write random weights as `mlx_lm.lora` does: rank 4, values of the upper four of eight layers."""
    folder.mkdir()
    module, random = "model.layers.{}.self_attn.v_proj", np.random.default_rng()
    weights = {}
    for layer in range(4, 8):
        weights[module.format(layer) + ".lora_a"] = random.normal(0, 0.06, (256, 4)).astype(np.float32)
        weights[module.format(layer) + ".lora_b"] = random.normal(0, 0.02, (4, 128)).astype(np.float32)
    save_file(weights, folder / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def ask(http: httpx.Client, adapter: str | None, policy: str) -> None:
    """Send the prompt to base or an adapter; print what the report says of its cache, and the answer."""
    messages = [{"role": "user", "content": f"{CONTEXT} Where is the mirror?"}]
    body = {"adapter": adapter, "agentcache": {"policy": policy}, "messages": messages, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    report, text = answer["agentcache"], answer["choices"][0]["message"]["content"]
    shared, computed = report["cached_tokens"]["shared"], report["computed_tokens"]
    print(f"{adapter or 'base':12} {report['policy']:14} {shared:6} {computed:8}  {text}")


parser = argparse.ArgumentParser()
parser.add_argument("folders", nargs="*", type=Path)
parser.add_argument("--url", default=os.environ.get("AGENTCACHE_URL", "http://127.0.0.1:8000"))
options = parser.parse_args()

with tempfile.TemporaryDirectory() as temporary, httpx.Client(base_url=options.url, timeout=60) as http:
    folders = options.folders or [write_adapter(Path(temporary, name)) for name in ("example-1", "example-2")]
    for folder in folders:  # what `agentcache adapters load NAME=FOLDER` does
        path = str(folder.resolve())
        http.post("/v1/adapters", json={"name": folder.name, "path": path}).raise_for_status()
    print(f"{'adapter':12} {'policy':14} {'shared':>6} {'computed':>8}  answer")
    ask(http, None, "exact")
    for policy in ("exact", "prefill-share"):
        for folder in folders:
            ask(http, folder.name, policy)
    for folder in folders:
        http.delete(f"/v1/adapters/{folder.name}").raise_for_status()
