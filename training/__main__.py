"""The commands of the embedded model's recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer

from agentcache.api.sampling import SamplingParams
from agentcache.errors import AgentCacheError
from agentcache.llm import LLM
from agentcache.models.builtin.embedded import DATA
from agentcache.training.decoder import CACHE_LIMIT, Progress
from training.corpus import Corpus
from training.dialogue import Dialogue
from training.export import export
from training.model import CONFIG
from training.recall import Recall, measure_recall, recall_case
from training.role_adapters import TRAINED, Kind, load_frozen, train_roles
from training.roles import BY_NAME, ROLES
from training.tokenizer import train_tokenizer
from training.train import RECIPE, Trainer, conversations

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Option(help="Holds tokenizer and chat template; gets the trained model.")]
Seed = Annotated[int, typer.Option(help="Decides parameters and documents.")]


@app.command()
def tokenizer(folder: Folder = DATA, seed: Seed = RECIPE.seed) -> None:
    """Train the tokenizer and write it to FOLDER."""
    train_tokenizer(seed).save(str(folder / "tokenizer.json"))
    typer.echo(f"wrote {folder / 'tokenizer.json'}")


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help="Kind of document, such as facts or negotiation.")],
    tokens: Annotated[int, typer.Option(help="Its length, about.")] = 500,
    folder: Folder = DATA,
    seed: Seed = RECIPE.seed,
) -> None:
    """Print one document of the corpus as the model reads it."""
    corpus = Corpus(folder, seed)
    typer.echo(corpus.render(corpus.write({kind: 1.0}, tokens, "show")))


@app.command()
def train(
    checkpoints: Annotated[Path, typer.Option(help="Where checkpoints go; an unfinished training goes on from there.")],
    folder: Folder = DATA,
    seed: Seed = RECIPE.seed,
    share: Annotated[float, typer.Option(help="Share of the recipe's steps, for a quick look.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Processes that write documents.")] = 4,
) -> None:
    """Train the model and write it to FOLDER. Half an hour on a data-centre GPU; days on a CPU."""
    mx.set_cache_limit(CACHE_LIMIT)
    recipe = replace(RECIPE.scaled(share), seed=seed)
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    trainer = Trainer(recipe, CONFIG, Corpus(folder, seed), dtype)
    if (checkpoints / "checkpoint.safetensors").exists():
        trainer.load(checkpoints)
        typer.echo(f"going on from step {trainer.step}")

    def report(progress: Progress) -> None:
        typer.echo(
            f"step {progress.step}/{recipe.steps}, loss {progress.loss:.4f}, {progress.tokens_a_second:.0f} tokens/s"
        )
        if progress.step % 500 == 0 or progress.step == recipe.steps:
            trainer.save(checkpoints)
            typer.echo(f"recall at 512 tokens: {trainer.recall(512, 8):.0%}, at 2000: {trainer.recall(2000, 8):.0%}")

    trainer.run(workers, report, every=100)
    typer.echo(f"wrote {folder}: {export(trainer, folder) / 1e6:.1f} MB of weights")


@app.command()
def roles(
    out: Annotated[Path, typer.Option(help="Folder; gets KIND/ROLE/ with an adapter each.")] = TRAINED,
    kind: Annotated[list[Kind] | None, typer.Option(help="How they are made; all ways without it.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="Whose; every role's without it.")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer than the recipe's, for a quick look.")] = None,
) -> None:
    """Train the roles' adapters of the embedded model: a minute or two each on one core. Existing ones stay."""
    chosen = [BY_NAME[name] for name in role] if role else list(ROLES)
    train_roles(load_frozen(DATA), out, dict.fromkeys(kind or list(Kind), chosen), typer.echo, steps)


@app.command()
def documents(
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Conversations.")] = 200,
    folder: Folder = DATA,
    seed: Seed = RECIPE.seed,
) -> None:
    """Write conversations of the corpus as `python -m agentcache.training decoder --data` reads them."""
    lines = [json.dumps(conversation) + "\n" for conversation in conversations(Corpus(folder, seed), count)]
    out.write_text("".join(lines), encoding="utf-8")
    typer.echo(f"wrote {len(lines)} conversations to {out}")


@app.command()
def recall(
    model: Annotated[str | None, typer.Option(help="Folder; the embedded model without it.")] = None,
    documents: Annotated[int, typer.Option(help="Conversations for each distance; eight questions each.")] = 25,
    invented: Annotated[float, typer.Option(help="Share of words made of syllables on the spot.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides the facts.")] = 1000,
) -> None:
    """Held-out recall through the served model and its 4-bit cache, at 512 and 2,000 tokens."""
    corpus = Corpus(Path(model) if model else DATA, seed)
    with LLM(model) as llm:

        def answer(dialogue: Dialogue) -> str:
            return llm.chat(dialogue.rendered(), SamplingParams(max_tokens=48, temperature=0.0)).text

        for distance in (512, 2000):
            cases = (recall_case(corpus, distance, index, invented=invented) for index in range(documents))
            _show(distance, measure_recall(cases, answer))


def _show(distance: int, found: Recall) -> None:
    typer.echo(f"{distance} tokens: {found.right} of {found.asked} exactly right, {found.share:.1%}")
    for question, said in found.wrong[:5]:
        typer.echo(f"  {question.text} {question.answer!r}, but: {said!r}")


def main() -> None:
    try:
        app()
    except AgentCacheError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
