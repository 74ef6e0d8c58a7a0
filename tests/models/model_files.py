"""mlx-lm's model files, each with a tiny configuration and what becomes of it on the paged cache.

A new one gets an entry in a table of `mlx_lm_files`.
"""

from __future__ import annotations

from tests.models.mlx_lm_files.latents import LATENTS
from tests.models.mlx_lm_files.model_file import COMMON, ModelFile
from tests.models.mlx_lm_files.recurrent import RECURRENT
from tests.models.mlx_lm_files.refused import REFUSED
from tests.models.mlx_lm_files.whole import WHOLE
from tests.models.mlx_lm_files.windows import WINDOWS

__all__ = ["COMMON", "MODEL_FILES", "NOT_BUILT"]

# Not models, or not to be built of a configuration alone.
NOT_BUILT = {
    "olmo": "ends the process where its package is not installed",
    "prism_hadamard_qwen35": "a manifest of packed modules",
}
MODEL_FILES: dict[str, ModelFile] = WHOLE | WINDOWS | LATENTS | RECURRENT | REFUSED
