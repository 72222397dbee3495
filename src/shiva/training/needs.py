"""Training's own dependencies, imported when they are first used; the base install has none of them."""

from __future__ import annotations

import functools

from shiva.core import needs

need = functools.partial(needs.need, extra="train")
