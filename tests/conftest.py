"""What all tests share: how long a property's examples take is no fault of theirs, as the machine has other work."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
