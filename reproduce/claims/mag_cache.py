"""diffusers' MagCache as a candidate that knows its ratios, for experiments that draw outside an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shiva.evaluate.candidates import Candidate
from shiva.evaluate.rivals import CacheName
from shiva.session import Session


@dataclass(frozen=True)
class MagCached(Candidate):
    """A candidate inside MagCache."""

    cache: CacheName | None = "MagCache"
    magnitudes: tuple[float, ...] = ()
    """Of a dense run of as many steps."""

    @contextlib.contextmanager
    def attached(self, pipe: Any, ratios: Callable[[], Sequence[float]] | None = None) -> Iterator[Session | None]:
        with super().attached(pipe, lambda: self.magnitudes) as session:
            yield session
