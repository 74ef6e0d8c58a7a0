"""Roles of the embedded model: their questions, and adapters of every kind, trained for a step or two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentcache.models.adapters import AdapterContent, read_adapter
from agentcache.models.builtin.embedded import DATA
from agentcache.training.decoder_model import FrozenBase
from training.role_adapters import INVOCATION, QKV, RECIPES, Kind, load_frozen, train_roles
from training.roles import BY_NAME, ROLES, f1, role_case, role_cases
from training.words import held_out


def test_what_is_asked_was_told_and_nothing_names_the_role() -> None:
    for case in role_cases(3, 12, 80, is_held_out=True):
        told = " ".join(message["content"] for message in case.messages[:-1])
        assert case.fact.subject in told and case.fact.value in told
        assert held_out(case.fact.subject, case.fact.value)
        assert case.messages[-1]["role"] == "user" and case.fact.subject in case.messages[-1]["content"]
        assert not any(role.name in told for role in ROLES)
        assert len({role.answer(case.fact) for role in ROLES}) == len(ROLES)
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
