"""What is not installed is named with the command that works today."""

from __future__ import annotations

import pytest

from shiva.core import needs


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    with pytest.raises(ImportError, match=r"nowhere is not here: pip install -e '\.\[report\]' in a checkout"):
        needs.need("nowhere", "report")
    with pytest.raises(ImportError, match=r"\.\[train\]"):
        needs.need("nowhere", "train")
