"""Files of a cache folder that are no agents': what a start has found out and later ones need not."""

MEMOS = frozenset({"weights.json", "kernels.json", "prefill.json", "steps.json"})
BESIDE = MEMOS | {"lock"}
