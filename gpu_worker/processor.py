"""What processor this is, by the names of Linux's /proc/cpuinfo."""

import platform
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Processor:
    """Empty where the system does not say, as outside Linux."""

    vendor: str = ""  # "AuthenticAMD", "GenuineIntel"
    model: str = ""  # "AMD EPYC 7B13"
    features: frozenset[str] = frozenset()  # "avx2", "amx_bf16"; of x86 only

    @classmethod
    def read(cls) -> "Processor":
        fields: dict[str, str] = {}
        try:
            with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
                for line in file:
                    if not line.strip():
                        break  # The first core stands for all.
                    name, _, value = line.partition(":")
                    fields[name.strip()] = value.strip()
        except OSError:
            pass
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        return cls(
            vendor=fields.get("vendor_id", ""),
            model=fields.get("model name", platform.machine()),
            features=frozenset(fields.get("flags", "").split()) if is_x86 else frozenset(),
        )
