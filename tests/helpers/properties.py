"""How long property-based tests search, and values that anyone might give.

In the test suite the search is short and always the same. `MREM_EXAMPLES=5000 pytest …` tries as many, at
random, and keeps what it finds in .hypothesis.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mrem_deploy.base.errors import UserError

T = TypeVar("T")
LONGEST_MESSAGE = 3000

EXAMPLES = int(os.environ.get("MREM_EXAMPLES", "0"))
HARMLESS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "short", max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=HARMLESS
)
settings.register_profile(
    "long", max_examples=max(1, EXAMPLES), deadline=None, suppress_health_check=HARMLESS
)
settings.load_profile("long" if EXAMPLES else "short")
fewer = settings(max_examples=EXAMPLES or 25)  # for a test whose examples take long

# Also halves of characters, which st.text() alone leaves out.
texts = st.text(st.characters(exclude_categories=()), max_size=20)
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 1e308])
)
scalars: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), numbers, texts)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


def writable(text: str) -> bool:
    """Whether a text can be in a UTF-8 file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def made(make: Callable[[], T]) -> T | None:
    """What a call gives; None if it refuses, with a message that says what to do. All else fails."""
    try:
        return make()
    except UserError as error:
        refusal = error
    assert refusal.problem
    assert refusal.remedy
    assert len(str(refusal)) < LONGEST_MESSAGE
    return None
