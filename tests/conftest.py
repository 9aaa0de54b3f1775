"""What all tests share."""
from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run tests are shared: how long one example took says nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
