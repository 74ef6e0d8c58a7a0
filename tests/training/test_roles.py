"""Roles of the embedded model: their questions, and adapters of every kind, trained for a step or two."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.models.adapters import AdapterContent, read_adapter
from agentcache.models.builtin.embedded import DATA
from agentcache.models.step import StepInputs
from agentcache.training.decoder_model import FrozenBase
from training.beside_base import BesideBase, KeysValues, base_pass, plain_keys_values, squared_divergence
from training.model import RoundedCache
from training.role_adapters import (
    INVOCATION,
    QKV,
    RECIPES,
    TRAINED,
    Kind,
    RoleRecipe,
    RoleTrainer,
    load_frozen,
    train_roles,
)
from training.roles import BY_NAME, ROLES, f1, role_case, role_cases
from training.words import held_out


def test_what_is_asked_was_told_and_nothing_names_the_role() -> None:
    for case in role_cases(3, 12, 80, is_held_out=True):
        told = " ".join(message["content"] for message in case.messages[:-1])
        assert case.fact.subject in told and case.fact.value in told
        assert held_out(case.fact.subject, case.fact.value)
        assert case.messages[-1]["role"] == "user" and case.fact.subject in case.messages[-1]["content"]
        assert not any(role.name in told for role in ROLES)
        assert len({role.answer(case.fact) for role in ROLES} | {case.fact.answer}) == len(ROLES) + 1
        assert all(case.fact.value in role.answer(case.fact) for role in ROLES)


def test_a_case_depends_on_nothing_but_its_seed() -> None:
    one = role_case(3, 1, 80, is_held_out=False)
    assert one == role_case(3, 1, 80, is_held_out=False)
    assert len({role_case(seed, 1, 80, is_held_out=False).fact for seed in range(6)}) > 4
    assert not held_out(one.fact.subject, one.fact.value)
    lengths = [sum(len(m["content"].split()) for m in role_case(3, 1, n, is_held_out=True).messages) for n in (60, 600)]
    assert lengths[1] > 5 * lengths[0]


@pytest.mark.parametrize(
    ("said", "wanted", "expected"),
    [("It is Rome.", "it is rome", 1.0), ("Rome", "It is Rome.", 0.5), ("Oslo", "It is Rome.", 0), ("", "Rome", 0)],
)
def test_f1(said: str, wanted: str, expected: float) -> None:
    assert f1(said, wanted) == pytest.approx(expected)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return load_frozen(DATA)


@pytest.fixture(scope="module")
def trained(base: FrozenBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    some = [BY_NAME["plan"], BY_NAME["act"]]
    train_roles(base, folder, {Kind.FAMILY: some, Kind.QKV: some[:1], Kind.ACTIVATED: some[:1]}, steps=2)
    return folder


def read(base: FrozenBase, folder: Path) -> AdapterContent:
    return read_adapter(folder, base.adapters.modules)


@pytest.mark.slow
def test_members_of_a_family_have_the_as_of_the_first_one(base: FrozenBase, trained: Path) -> None:
    plan, act = (read(base, trained / "family" / name) for name in ("plan", "act"))
    assert plan.adapter.family == act.adapter.family and plan.adapter.digest != act.adapter.digest
    other = read(base, trained / "qkv" / "plan")
    assert other.adapter.family != plan.adapter.family
    for name, pair in plan.matrices.items():
        assert np.array_equal(pair.a, act.matrices[name].a)
        assert not np.array_equal(pair.b, act.matrices[name].b) and np.any(act.matrices[name].b)


@pytest.mark.slow
def test_each_kind_is_what_its_name_says(base: FrozenBase, trained: Path) -> None:
    activated = read(base, trained / "activated" / "plan").adapter
    assert activated.invocation_tokens == tuple(base.tokenizer.encode(INVOCATION).ids)
    assert {name.path.rpartition(".")[2] for name in read(base, trained / "qkv" / "plan").matrices} == set(QKV)
    assert RECIPES[Kind.CONDITIONED].start == "last"


@pytest.mark.slow
def test_what_is_there_is_left_as_it_is(base: FrozenBase, trained: Path) -> None:
    file = trained / "family" / "plan" / "adapters.safetensors"
    before = file.read_bytes()
    lines: list[str] = []
    train_roles(base, trained, {Kind.FAMILY: [BY_NAME["plan"]]}, lines.append, steps=1)
    assert file.read_bytes() == before and not lines


@pytest.mark.parametrize(
    "folder", sorted(TRAINED.glob("*/*")), ids=lambda folder: f"{folder.parent.name}-{folder.name}"
)
def test_adapters_of_the_repository_are_what_the_recipe_makes(base: FrozenBase, folder: Path) -> None:
    kind = Kind(folder.parent.name)
    recipe, content = RECIPES[kind], read(base, folder)
    layers = recipe.layers or len(base.model.layers)
    assert {name.layer for name in content.matrices} == set(range(8 - layers, 8))
    assert {name.path.rpartition(".")[2] for name in content.matrices} == set(recipe.targets)
    assert {pair.rank for pair in content.matrices.values()} == {recipe.rank}
    assert sum(file.stat().st_size for file in folder.iterdir()) < 400_000
    if kind is Kind.FAMILY:
        assert content.adapter.family == read(base, TRAINED / "family" / "plan").adapter.family


def test_every_role_has_an_adapter_in_the_repository() -> None:
    assert {folder.name for folder in (TRAINED / Kind.FAMILY).iterdir()} == {role.name for role in ROLES}
    assert {folder.name for folder in TRAINED.iterdir()} == {kind.value for kind in Kind} - {Kind.QV}


def test_what_shares_bases_cache_reads_bases(base: FrozenBase) -> None:
    """An adapter's own input may differ, by as much as the divergence says: base's keys and values are read."""
    ids = mx.array([base.tokenizer.encode("Marc lives in Cairo. Ines likes nuts best.").ids])
    layers = base.model.layers
    computed = base_pass(layers, base.model.model.embed_tokens(ids))
    asked = mx.ones(ids.shape)
    for layer, hidden, kept in zip(layers, computed.inputs, computed.layers, strict=False):
        plain = plain_keys_values(layer, hidden)
        assert mx.allclose(plain.keys, kept.keys, atol=1e-4) and mx.allclose(plain.values, kept.values, atol=1e-4)
    assert squared_divergence(computed.layers[5:], computed.layers, asked).item() == 0

    other = KeysValues(computed.layers[7].keys * 2, computed.layers[7].values * 2)
    energies = [
        [mx.square(getattr(each, side)).sum().item() for each in computed.layers] for side in ("keys", "values")
    ]
    expected = sum(energy[7] / sum(energy) for energy in energies) / 2
    assert squared_divergence([other], computed.layers, asked).item() == pytest.approx(expected, rel=1e-4)
    keys, values = BesideBase(computed.layers[7], other).update_and_fetch(other.keys + 1, other.values)
    rounded = RoundedCache().update_and_fetch(computed.layers[7].keys, computed.layers[7].values)
    assert mx.allclose(keys, rounded[0] + 1, atol=1e-4) and mx.array_equal(values, rounded[1])


@pytest.mark.slow
def test_training_keeps_prompts_near_base(base: FrozenBase) -> None:
    """The same steps without the weight on divergence end farther from base."""

    def divergence(closeness: float) -> float:
        recipe = RoleRecipe(layers=2, steps=6, rows=((16, 2),), closeness=closeness, max_norm=1.0)
        trainer = RoleTrainer(base, recipe, BY_NAME["act"])
        trainer.run()
        ids = mx.array([list(trainer._examples(0)[0].prompt)])
        embedded = base.model.model.embed_tokens(ids)
        theirs = base_pass(base.model.layers, embedded)
        with base.current.of(StepInputs(ids, [0], adapters=[trainer.acting()])):
            ours = base_pass(base.model.layers, embedded)
            plain = [plain_keys_values(base.model.layers[7], ours.inputs[7])]
        return float(squared_divergence(plain, theirs.layers, mx.ones(ids.shape)).item())

    assert 0 < divergence(1000.0) < 0.5 * divergence(1e-6)
