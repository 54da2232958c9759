"""Settings of the whole suite: properties have no deadline, because machines differ."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("harts", deadline=None, print_blob=True)
settings.load_profile("harts")
