"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No test times anything: Hypothesis fails an example that takes more than 200 ms by itself, which a busy machine makes of any.
settings.register_profile("topobus", deadline=None)
settings.load_profile("topobus")
