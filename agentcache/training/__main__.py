from __future__ import annotations

from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer

from agentcache.errors import AgentCacheError
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.settings.sources import load_config
from agentcache.text.tokenizer import Tokenizer
from agentcache.training.decoder import CACHE_LIMIT, DecoderRecipe, DecoderTrainer, Progress
from agentcache.training.decoder_data import Example, make_examples, read_conversations
from agentcache.training.decoder_files import CHECKPOINT_FILE
from agentcache.training.decoder_model import load_base

DECODER = DecoderRecipe()

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def training() -> None:
    """Training on top of a model that is served."""


@app.command()
def decoder(
    out: Annotated[Path, typer.Option(help="Gets adapter and checkpoint; an unfinished training goes on from there.")],
    data: Annotated[Path, typer.Option(help="JSONL, as mlx-lm's.", exists=True, dir_okay=False)],
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the embedded model without it.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the matrices.")] = DECODER.rank,
    scale: Annotated[float, typer.Option(help="Factor on what the matrices add.")] = DECODER.scale,
    layers: Annotated[int, typer.Option(min=1, help="Layers to adapt, from the last one down.")] = DECODER.num_layers,
    steps: Annotated[int, typer.Option(min=1, help="Batches.")] = DECODER.steps,
    rows: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = DECODER.rows,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = DECODER.learning_rate,
    longest: Annotated[int, typer.Option(min=2, help="Tokens; longer examples are left out.")] = 2048,
    seed: Annotated[int, typer.Option(help="Decides matrices and order.")] = DECODER.seed,
) -> None:
    """Train a LoRA decoder on a frozen model's cache, for `agentcache serve --adapter NAME=OUT:prefill-share`."""
    mx.set_cache_limit(CACHE_LIMIT)
    base = load_base(model or str(embedded_model_path(Path(load_config().cache_dir).parent)))
    examples = _examples(data, base.tokenizer, longest)
    trainer = DecoderTrainer(base, DecoderRecipe(rank, scale, layers, steps, rows, learning_rate, seed=seed), examples)
    if (out / CHECKPOINT_FILE).exists():
        trainer.load(out)
        typer.echo(f"going on from step {trainer.step}")

    def report(progress: Progress) -> None:
        typer.echo(f"step {progress.step}/{steps}, loss {progress.loss:.4f}, {progress.tokens_a_second:.0f} tokens/s")
        trainer.save(out)

    trainer.run(report, every=20)
    trainer.export(out)
    typer.echo(f"wrote the adapter to {out}")


def _examples(data: Path, tokenizer: Tokenizer, longest: int) -> list[Example]:
    examples = list(make_examples(read_conversations(data), tokenizer))
    kept = [example for example in examples if len(example) <= longest]
    typer.echo(f"{len(kept)} answers to learn, {len(examples) - len(kept)} left out for their length")
    return kept


def main() -> None:
    try:
        app()
    except AgentCacheError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
